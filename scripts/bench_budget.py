"""activation_memory at five budgets: bytes and CPU time of a step of a Llama of 12 layers, one rank on the CPU.

    python scripts/bench_budget.py

The budgets go from the least that can be met to what keeps all activations. Each is held in turns with the others, in
every round of measurements, so that other work on the machine meets all alike; CPU seconds are the least of a budget's
steps. "planned" is the peak of the checkpointed layers by the sizes that the first step measured, "held" what a
forward leaves in memory, as counted by the process (its RssAnon), over what it leaves with the least budget.

Checked: losses are those of the model without checkpoints, to the bit; no plan is over its budget; with a larger
budget no more layers are recomputed, and no more CPU time is taken than with the one before (2 % for what a clock
cannot tell). Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero import checkpointing
from hf_zero.extras.activations import active
from hf_zero.extras.activations.budget import Budget, Choice, least, peak_of

LAYERS = 12
TOLERANCE = 1.02
Step = tuple[float, float, int]  # loss, CPU seconds, bytes after the forward
# All that is large is mapped by itself, so that the process shrinks when it is freed.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def anonymous() -> int:
    """Bytes of the process that are in memory and of no file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "vocab_size": 512}
        self.model: Any = LlamaForCausalLM(
            LlamaConfig(**sizes, num_hidden_layers=LAYERS, num_attention_heads=4)
        ).train()
        self.ids = torch.randint(512, (args.batch, args.length))

    def step(self) -> Step:
        self.model.zero_grad()
        start = time.process_time()
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        left = anonymous()
        loss.backward()
        return loss.item(), time.process_time() - start, left

    def with_budget(self, memory: int | str, steps: int) -> tuple[Budget, list[Step]]:
        """Steps behind the one that measures."""
        checkpointing.configure(deepspeed_config={"activation_checkpointing": {"activation_memory": memory}})
        now = active.current()
        assert now is not None and now.budget is not None
        self.step()
        done = [self.step() for _ in range(steps)]
        assert checkpointing._end is not None
        checkpointing._end()
        return now.budget, done


def budgets_of(bench: Bench) -> list[int]:
    sizes = bench.with_budget("1TB", 1)[0].sizes
    first, last = least(sizes, can_offload=False), peak_of(sizes, [Choice.KEEP] * LAYERS)
    return [first + (last - first) * quarter // 4 for quarter in range(5)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("steps", 2), ("width", 128), ("batch", 2), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    torch.set_num_threads(1)
    bench = Bench(args)
    expected = bench.step()[0]
    bench.model.gradient_checkpointing_enable({"use_reentrant": False})
    limits = budgets_of(bench)
    rows: dict[int, list[Step]] = {limit: [] for limit in limits}
    plans: dict[int, Budget] = {}
    for turn in range(args.rounds):
        for limit in limits if turn % 2 == 0 else limits[::-1]:
            plans[limit], done = bench.with_budget(limit, args.steps)
            rows[limit] += done
    return show(args, expected, rows, plans)


def show(
    args: argparse.Namespace,
    expected: float,
    rows: dict[int, list[Step]],
    plans: dict[int, Budget],
) -> int:
    problems = []
    print(f"Llama of {LAYERS} layers, width {args.width}, {args.batch} x {args.length} tokens, {args.rounds} rounds\n")
    print("| budget, MB | planned, MB | recomputed | held, MB | CPU s | of the least budget's |")
    print(f"|{'---|' * 6}")
    first = min(rows)
    base, ground = min(cpu for _, cpu, _ in rows[first]), min(left for _, _, left in rows[first])
    before: tuple[int, float] | None = None
    for limit, done in rows.items():
        plan = plans[limit]
        planned, recomputed = peak_of(plan.sizes, plan.choices), plan.choices.count(Choice.RECOMPUTE)
        cpu, left = min(one[1] for one in done), min(one[2] for one in done)
        cells = [limit / 1e6, planned / 1e6, recomputed, (left - ground) / 1e6, cpu, cpu / base]
        print("| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")
        problems += (
            [f"{limit}: another loss than without checkpoints"] if {one[0] for one in done} != {expected} else []
        )
        problems += [f"{limit}: the plan takes {planned}"] if planned > limit else []
        if before is not None and (recomputed > before[0] or cpu > TOLERANCE * before[1]):
            problems.append(f"{limit}: {recomputed} recomputed, {cpu:.3f} s; with less {before[0]}, {before[1]:.3f} s")
        before = recomputed, cpu
    print("\n".join(["", *problems]) if problems else "\nwithin the budgets, and the time falls with them")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
