from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM

from hf_zero import Trainer, TrainingArguments  # the only change: the classes of transformers would do without ZeRO

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()  # takes --zero FILE
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
text = torch.tensor(list(Path(__file__).read_bytes() * 50))  # the bytes of this file, 50 times
rows = [{"input_ids": row, "labels": row} for row in text[: 64 * 512].view(-1, 64)]
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
