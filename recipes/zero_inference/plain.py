"""The texts that plain transformers writes in one process: what the model in shards is compared with.

    python -m recipes.zero_inference.plain < REQUEST > TEXTS

The request names model, type, device, options and the batches of every rank; the answer is one JSON line. generate.py
--compare runs this. Nothing of hf_zero is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.zero_inference.texts import Batch, Options, Written, peak_memory, prepare_tokenizer, write

CLONE = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLES = frozenset(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])


def ask(
    model: str, *, dtype: str, device: str, options: Options, batches: list[list[Batch]]
) -> tuple[list[list[Written]], int]:
    """Run this file in a process of its own; returns what it wrote, by rank, and its peak memory in bytes."""
    request = {"model": model, "dtype": dtype, "device": device, "options": asdict(options), "batches": batches}
    alone = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    command = [sys.executable, "-m", "recipes.zero_inference.plain"]
    done = subprocess.run(
        command, cwd=CLONE, env=alone, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"The plain model could not be run for the comparison (see above): {' '.join(command)}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return [[Written(**one) for one in texts] for texts in answer["texts"]], answer["peak_memory"]


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    request: dict[str, Any] = json.load(sys.stdin)
    options = Options(**request["options"])
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(request["model"]))
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=request["dtype"])
    model = model.to(request["device"]).eval()
    texts = [
        [
            asdict(one)
            for number, batch in enumerate(batches)
            for one in write(model, tokenizer, batch, options, number=number * len(request["batches"]) + rank)
        ]
        for rank, batches in enumerate(request["batches"])
    ]
    if "hf_zero" in sys.modules:
        raise AssertionError("hf_zero was imported: this was to be plain transformers")
    print(json.dumps({"texts": texts, "peak_memory": peak_memory()}))


if __name__ == "__main__":
    main()
