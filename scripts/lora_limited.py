"""Loads, generates with and fine-tunes (LoRA) a model that is larger than what one rank may have in memory.

    python scripts/lora_limited.py FOLDER                  # 4 ranks, each allowed 1 / 2.5 of a 2.4 GB model
    python scripts/lora_limited.py FOLDER --plain          # one plain process under the same limit: fails
    python scripts/lora_limited.py FOLDER --hidden 512 --layers 12 --steps 2   # a small one, to try

The limit is RLIMIT_DATA: what a rank has once everything is imported, plus the model's bytes over --factor. The texts
are compared with those of a plain process without a limit. Exit status 1 if they differ or the loss does not fall.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from bench_load import make, sizes

VOCAB = 8000
PROMPT_TOKENS = 12
NEW_TOKENS = 8


def prompts(count: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def texts(model: Any, rows: torch.Tensor) -> list[list[int]]:
    made = model.generate(
        input_ids=rows, attention_mask=torch.ones_like(rows), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    found: list[list[int]] = made[:, PROMPT_TOKENS:].tolist()
    return found


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    import hf_zero
    from hf_zero.hf.models import patches as model_patch_points  # noqa: F401  (imports before the limit is set)
    from hf_zero.hf.trainer import trainer  # noqa: F401  (imports before the limit is set)

    total, _ = sizes(args.folder)
    baseline = benchlib.resident("VmData")
    limit = baseline + int(total / args.factor)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = benchlib.resident()
    if args.plain:
        model = LlamaForCausalLM.from_pretrained(args.folder)
        for param in model.parameters():
            param.data = param.data.clone()  # memory of its own, as training needs
        return {"fits": True}
    # Memory is short: only the next layer is gathered ahead, which a size below a layer's says.
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 1e6}
    config = {"zero_optimization": zero, "gather_for_generation": "stream"}
    hf_zero.enable(config)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = LlamaForCausalLM.from_pretrained(args.folder)
    model.gradient_checkpointing_enable()
    mine = texts(model, prompts(world)[rank : rank + 1])
    lora = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    trainable = [param for param in lora.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    engine = hf_zero.initialize(model=lora.train(), optimizer=optimizer, config=config)[0]
    losses = []
    for _ in range(args.steps):
        rows = prompts(world)[rank : rank + 1]
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    told = {"texts": mine[0], "anonymous": benchlib.resident() - before, "report": engine.memory_report()}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, told)
    return {"losses": losses, "limit": total / args.factor, "model": total, "ranks": everyone}


def report(args: argparse.Namespace, result: dict[str, Any]) -> bool:
    from transformers import LlamaForCausalLM

    print(f"model {result['model'] / 1e9:.2f} GB; each rank may take {result['limit'] / 1e9:.2f} GB in all")
    listed = ", ".join(f"{rank['anonymous'] / 1e9:.2f}" for rank in result["ranks"])
    print(f"memory at the end over the one before the load, GB per rank: {listed}")
    print(f"gathered at most: {result['ranks'][0]['report']['gathered_peak'] / 1e6:.0f} MB")
    print("losses: " + " ".join(f"{loss:.4f}" for loss in result["losses"]))
    plain = LlamaForCausalLM.from_pretrained(args.folder)
    same = [texts(plain, row[None])[0] for row in prompts(args.ranks)] == [rank["texts"] for rank in result["ranks"]]
    print(f"texts equal those of a plain process: {same}")
    return same and result["losses"][-1] < result["losses"][0]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="where the model is, or is made")
    add("--ranks", type=int, default=4)
    add("--factor", type=float, default=2.5, help="how many times the limit the model is")
    add("--steps", type=int, default=4)
    add("--hidden", type=int, default=1024)
    add("--layers", type=int, default=48)
    add("--plain", action="store_true", help="one process with plain transformers")
    return parser.parse_args(argv)


def main() -> None:
    args = parse(sys.argv[1:])
    if benchlib.in_rank():
        benchlib.run_rank(lambda: run_rank(args))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    make(args.folder, args.hidden, args.layers, tied=True, vocab=VOCAB)
    ranks = 1 if args.plain else args.ranks
    result = benchlib.launch(sys.argv, ranks, timeout_s=900, threads=1)
    if args.plain:
        print("a plain process fits under this limit")
        return
    raise SystemExit(0 if report(args, result) else 1)


if __name__ == "__main__":
    main()
