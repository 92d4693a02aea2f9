from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_zero import ZeroTrainerMixin, zero_arguments


class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer):
    pass


(args,) = HfArgumentParser(zero_arguments(SFTConfig)).parse_args_into_dataclasses()  # takes --zero FILE
texts = [f"Question: what is {n} + {n}?\nAnswer: {2 * n}." for n in range(200)]
tokens = ByteLevelBPETokenizer()  # stands for AutoTokenizer.from_pretrained, which needs a network or a folder
tokens.train_from_iterator(texts, vocab_size=400, special_tokens=["<end>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens._tokenizer, eos_token="<end>", pad_token="<end>")
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
data = Dataset.from_dict({"text": texts})
trainer = ZeroSFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
trainer.train()
trainer.save_model()
