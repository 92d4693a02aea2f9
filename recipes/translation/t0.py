"""Lets a T5 whose weights are spread over the processes answer, each rank a text of its own: ZeRO inference.

    hf-zero launch --num_gpus 2 recipes/translation/t0.py outputs/translation/stage3
    hf-zero launch --num_gpus 1 recipes/translation/t0.py outputs/translation/stage3

Where the Hub can be reached, `t0.py bigscience/T0_3B --texts "Is this review positive or negative? Review: ..."`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

import hf_zero

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a folder that run_translation.py wrote, or a hub id")
parser.add_argument(
    "--texts", nargs="+", default=["Null characters are not allowed.", "Monday"], help="one for each rank"
)
args = parser.parse_args()

world_size = int(os.environ.get("WORLD_SIZE", "1"))
width = AutoConfig.from_pretrained(args.model).d_model
config: dict[str, Any] = {
    "fp16": {"enabled": False},
    "bf16": {"enabled": False},  # True where the GPU has it
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},  # Leave it out where the memory of the GPUs suffices.
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    },
    "steps_per_print": 2000,
    "train_batch_size": 1 * world_size,
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": False,
}

hf_zero.HfZeroConfig(config)  # It comes before the model: each rank then reads its own part of the weights.
model = AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype="float32")
engine = hf_zero.initialize(model=model, config=config)[0]
engine.module.eval()

tokenizer = AutoTokenizer.from_pretrained(args.model)
text = args.texts[engine.global_rank % len(args.texts)]
inputs = tokenizer(text, return_tensors="pt")["input_ids"].to(engine.device)
answer = engine.module.generate(inputs, max_new_tokens=64, synced_gpus=True)[0]
print(f"rank{engine.global_rank}:\n   in={text}\n  out={tokenizer.decode(answer, skip_special_tokens=True)}")
