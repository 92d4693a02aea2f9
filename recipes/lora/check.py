"""Evaluates a trained adapter with plain transformers and PEFT, and merges it; nothing of hf_zero is imported here.

    python -m recipes.lora.check OUTPUT [--merge FOLDER] [--tolerance T]

OUTPUT is a folder that train.py wrote. Exit status 1 where the loss is not the one that was measured in training.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from recipes.causal_lm.data import Blocks, load_blocks

# In bf16 sums are rounded otherwise where PEFT computes adapters in fp32, and merging rounds each weight once more.
TOLERANCE = {False: 1e-4, True: 2e-2}


def mean_loss(model: Any, blocks: Blocks, batch_size: int) -> float:
    """The mean loss per token, over all blocks, which are of equal length."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for rows in blocks.ids.split(batch_size):
            total += model(input_ids=rows, labels=rows).loss.item() * len(rows)
    return total / len(blocks)


def check(output: Path, merge: Path | None, tolerance: float | None, batch_size: int) -> int:
    """Print the losses; return the exit status."""
    data = json.loads((output / "data.json").read_text(encoding="utf-8"))
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    expected = summary["eval_loss_after"]
    if expected is None:
        raise SystemExit(f"{output}: the run did not evaluate (--eval_blocks 0), so there is no loss to compare with.")
    base, bf16, dataset = data["base"], data["bf16"], data["dataset"]
    sizes = {name: data[name] for name in ("config", "text_column", "length", "num_train", "num_eval")}
    tokenizer = AutoTokenizer.from_pretrained(base)
    _, blocks = load_blocks(dataset, tokenizer, **sizes)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16" if bf16 else "float32")
    losses = {"base, without adapter": mean_loss(plain, blocks, batch_size)}
    model = PeftModel.from_pretrained(plain, output / "adapter")
    losses["base and adapter"] = mean_loss(model, blocks, batch_size)
    model = model.merge_and_unload()
    losses["merged"] = mean_loss(model, blocks, batch_size)
    if merge is not None:
        model.save_pretrained(merge)
        tokenizer.save_pretrained(merge)
        again = AutoModelForCausalLM.from_pretrained(merge, dtype="auto")
        losses["merged, saved and loaded"] = mean_loss(again, blocks, batch_size)

    limit = TOLERANCE[bf16] if tolerance is None else tolerance
    print(f"{'in training':<26}{expected:.6f}")
    for name, loss in losses.items():
        print(f"{name:<26}{loss:.6f}")
    differing = [name for name, loss in losses.items() if "without" not in name and not abs(loss - expected) <= limit]
    print(f"DIFFERENT by more than {limit:g}: {', '.join(differing)}" if differing else f"Equal within {limit:g}.")
    return 1 if differing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Evaluate a trained adapter without hf_zero.")
    parser.add_argument("output", type=Path, help="a folder that recipes/lora/train.py wrote")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="write the model with the adapter merged into it")
    parser.add_argument("--tolerance", type=float, help="largest difference of a loss; default 1e-4, in bf16 2e-2")
    parser.add_argument("--batch_size", type=int, default=4)
    args = parser.parse_args()
    disable_progress_bar()
    status = check(args.output, args.merge, args.tolerance, args.batch_size)
    if "hf_zero" in sys.modules:
        raise AssertionError("hf_zero was imported: this was to show that plain transformers and PEFT are enough")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
