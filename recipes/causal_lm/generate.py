"""Lets a model folder write text, with plain transformers: nothing of hf_zero is imported here.

    python -m recipes.causal_lm.generate MODEL [--compare OTHER_MODEL] [--prompt TEXT] [--max_new_tokens N]

The text is the most likely continuation of the prompt, so it is the same in every run; shown up to a blank line.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PROMPT = 'def count_words(text):\n    """'


def generate(model_name: str, prompt: str, max_new_tokens: int) -> str:
    """The most likely continuation of `prompt`, without the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.eos_token_id
        )
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model folder write text, with plain transformers.")
    parser.add_argument("model", help="a folder or a hub id, such as what `hf-zero consolidate` wrote")
    parser.add_argument("--compare", metavar="OTHER_MODEL", help="show what this model writes as well")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max_new_tokens", type=int, default=40)
    args = parser.parse_args()
    disable_progress_bar()
    for title, model in (("before", args.compare), ("after" if args.compare else "", args.model)):
        if model is not None:
            print(f"-- {title} ({model})" if title else f"-- {model}")
            text = generate(model, args.prompt, args.max_new_tokens)
            print(args.prompt + text.split("\n\n")[0].rstrip(), flush=True)
    if "hf_zero" in sys.modules:
        raise AssertionError("hf_zero was imported: this was to show that plain transformers is enough")


if __name__ == "__main__":
    main()
