import copy

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from hf_zero import ZeroTrainerMixin, zero_arguments


class ZeroDPOTrainer(ZeroTrainerMixin, DPOTrainer):
    pass


(args,) = HfArgumentParser(zero_arguments(DPOConfig)).parse_args_into_dataclasses()  # takes --zero FILE
prompts = [f"Question: what is {n} + {n}?\nAnswer:" for n in range(200)]
right, wrong = ([f" {2 * n + off}." for n in range(200)] for off in (0, 1))
tokens = ByteLevelBPETokenizer()  # stands for AutoTokenizer.from_pretrained, which needs a network or a folder
tokens.train_from_iterator(prompts + right + wrong, vocab_size=400, special_tokens=["<end>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens._tokenizer, eos_token="<end>", pad_token="<end>")
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
data = Dataset.from_dict({"prompt": prompts, "chosen": right, "rejected": wrong})
reference = copy.deepcopy(model)  # of a model that has a name TRL loads the reference itself
trainer = ZeroDPOTrainer(model, reference, args=args, train_dataset=data, processing_class=tokenizer)
trainer.train()
trainer.save_model()
