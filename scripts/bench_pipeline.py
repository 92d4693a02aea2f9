"""A pipeline of two stages beside DeepSpeed's PipelineEngine, one process and DDP: time of a step and peak memory.

    python scripts/bench_pipeline.py                                     # 2 ranks, some 3 minutes
    python scripts/bench_pipeline.py --peers-python ~/peers/bin/python   # one that has DeepSpeed

Each variant trains the same GPT-like model on the same batches, in a job of its own in every round, so that rounds
interleave. The step is the median of a job's steps behind the first ones; the ratio of a variant is the median over
rounds of its step over DeepSpeed's in the same round (over one process's without DeepSpeed). Memory is the highest
resident set of the larger rank. "idle" is what ranks measured of their own time, beside the formula.

"CPU" has little to do with other work on the machine: how long the batch's forwards and backwards take by their order,
if each takes the CPU seconds of the rank's main thread that it was measured to take (the least of all steps, of each
kind and stage) and messages take no time; with the CPU seconds of the rest of a step on the slower rank. Not for
interleaved chunks, one process and DDP.

"profiled" splits the layers by measured times (partition_method="profile"); all others have equal numbers of them.

Checked: all variants give the same losses. Exit status 1 if not, or if 1F1B takes more than 1.05 x the time of
DeepSpeed's with the same split, or none of ours is ahead of it with no more memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

OURS = ("1f1b", "1f1b profiled", "zero_bubble", "gpipe", "interleaved")
LIMIT = 1.05
WARM_UP = 2
Micro = tuple[torch.Tensor, torch.Tensor]


class Embedding(nn.Module):
    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return hidden


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return result


class Head(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.norm(x))
        return logits


def layers_of(args: argparse.Namespace) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [Block(args.width) for _ in range(args.layers)]
    return [Embedding(args.words, args.width, args.length), *blocks, Head(args.words, args.width)]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(args: argparse.Namespace) -> Iterator[list[Micro]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = [
            torch.randint(args.words, (args.batch, args.length + 1), generator=generator) for _ in range(args.micros)
        ]
        yield [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]


# -------------------------------------------------------------------- one rank of one variant
Step = Callable[[list[Micro]], float]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def make_ours(args: argparse.Namespace) -> tuple[Step, Callable[[], Any]]:
    import hf_zero

    schedule, _, profiled = args.variant.partition(" ")
    module = hf_zero.PipelineModule(
        layers_of(args),
        2,
        loss_fn=loss_of,
        partition_method="profile" if profiled else "uniform",
        virtual_stages=2 if schedule == "interleaved" else 1,
        profile_inputs=torch.zeros(args.batch, args.length, dtype=torch.long),
    )
    config = {**base_config(args), "pipeline": {"schedule": schedule}}
    engine, *_ = hf_zero.initialize(model=module, optimizer=adam, config=config)
    return lambda batch: float(engine.train_batch(iter(batch))), engine.schedule_report


def make_deepspeed(args: argparse.Namespace) -> tuple[Step, Callable[[], Any]]:
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found, unused-ignore]

    deepspeed.init_distributed("gloo", verbose=False)
    module = PipelineModule(layers_of(args), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine = deepspeed.initialize(model=module, optimizer=adam(module.parameters()), config=base_config(args))[0]
    return lambda batch: float(engine.train_batch(iter(batch))), lambda: None


def base_config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.micros,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }


def count_cpu(variant: str, spent: dict[str, list[float]]) -> None:
    """Have every forward and backward add its CPU seconds to `spent`, under its Kind's letter."""

    def counted(letter: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            result = function(*args, **kwargs)
            spent.setdefault(letter(*args), []).append(time.thread_time() - began)
            return result

        return run

    if variant in OURS:
        from hf_zero.extras.pipeline.batch_run import BatchRun

        BatchRun._compute = counted(lambda run, action, *_: action.kind.value, BatchRun._compute)  # type: ignore[method-assign]
    elif variant == "deepspeed":
        from deepspeed.runtime.pipe import engine, schedule  # type: ignore[import-not-found, unused-ignore]

        calls = engine.PipelineEngine._INSTRUCTION_MAP
        for instruction, letter in ((schedule.ForwardPass, "F"), (schedule.BackwardPass, "B")):
            calls[instruction] = counted(lambda *_, letter=letter: letter, calls[instruction])


def make_plain(args: argparse.Namespace) -> tuple[Step, Callable[[], Any]]:
    """torch alone: one process, or DDP with half of the micro-batches on each rank."""
    model: nn.Module = nn.Sequential(*layers_of(args))
    optimizer = adam(model.parameters())
    parts = 1
    if args.variant == "ddp":
        dist.init_process_group("gloo")
        parts, model = 2, nn.parallel.DistributedDataParallel(model)

    def step(batch: list[Micro]) -> float:
        mine = batch[::parts] if parts == 1 or dist.get_rank() == 0 else batch[1::parts]
        total = 0.0
        for number, (ids, labels) in enumerate(mine):
            ends = number == len(mine) - 1 or parts == 1
            with model.no_sync() if not ends else _nothing():  # type: ignore[operator]
                loss = loss_of(model(ids), labels) / len(mine)
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if parts > 1:
            mean = torch.tensor(total)
            dist.all_reduce(mean)
            total = mean.item() / parts
        return total

    return step, lambda: None


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    make = make_deepspeed if args.variant == "deepspeed" else make_ours if args.variant in OURS else make_plain
    step, report = make(args)
    seconds, losses = [], []
    spent: dict[str, list[float]] = {}
    count_cpu(args.variant, spent)
    cpu: list[dict[str, float]] = []
    for number, batch in enumerate(batches(args)):
        if number == args.steps + WARM_UP:
            break
        spent.clear()
        began, cpu_began = time.perf_counter(), time.thread_time()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - began)
        rest = time.thread_time() - cpu_began - sum(map(sum, spent.values()))
        cpu.append({letter: statistics.mean(each) for letter, each in spent.items()} | {"rest": rest})
    peak = benchlib.resident("VmHWM") / 2**20
    found: dict[str, Any] = {"seconds": statistics.median(seconds[WARM_UP:]), "losses": losses, "peak": peak}
    found["cpu"] = {name: min(one[name] for one in cpu[WARM_UP:]) for name in cpu[-1]}
    if schedule := report():
        found |= {"idle": schedule["idle_share"], "bubble": schedule["bubble_share"]}
        found["live"] = [stage["peak_live"] for stage in schedule["stages"]]
    Path(args.out, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


# -------------------------------------------------------------------- all variants
def run_job(args: argparse.Namespace, variant: str, folder: Path) -> list[dict[str, Any]]:
    """Return the findings of each rank."""
    folder.mkdir(parents=True)
    python = args.peers_python if variant == "deepspeed" else sys.executable
    ranks = 1 if variant == "one process" else 2
    sizes = [f"--{name}={getattr(args, name)}" for name in ("width", "layers", "words", "length", "batch", "micros")]
    arguments = [__file__, f"--variant={variant}", f"--out={folder}", f"--steps={args.steps}", *sizes]
    benchlib.run_job(python, ranks, arguments, timeout_s=600)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peers-python", default=sys.executable, help="of the environment that has DeepSpeed")
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=6, help="timed in a job")
    for name, size in (("width", 256), ("layers", 8), ("words", 4096), ("length", 128), ("batch", 4), ("micros", 8)):
        add(f"--{name}", type=int, default=size)
    add("--only", nargs="*", help="these variants, and one process")
    add("--variant", help=argparse.SUPPRESS)
    add("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.variant:
        return run_rank(args)
    import tempfile

    names = list(dict.fromkeys([*(args.only or [*OURS, "ddp"]), "one process"]))
    if benchlib.has_deepspeed(args.peers_python):
        names.insert(0, "deepspeed")
    else:
        print(f"DeepSpeed is not installed for {args.peers_python} (extra [peers], or --peers-python): it is left out")
    rounds: list[dict[str, list[dict[str, Any]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            order = names if number % 2 == 0 else names[::-1]
            rounds.append({name: run_job(args, name, Path(folder, f"{number}-{name}")) for name in order})
    sys.exit(show(names, rounds, args.micros))


def cpu_of(name: str, rounds: list[dict[str, list[dict[str, Any]]]], micros: int) -> float | None:
    """The CPU seconds that a step takes by its order."""
    from hf_zero.extras.pipeline.stage_schedules import Kind, order_of, published_1f1b, simulate

    schedule = name.partition(" ")[0]
    if schedule not in ("deepspeed", "1f1b", "gpipe", "zero_bubble"):
        return None
    least = [
        {one: min(each[name][stage]["cpu"][one] for each in rounds) for one in rounds[0][name][stage]["cpu"]}
        for stage in range(2)
    ]
    orders = [
        published_1f1b(stage, 2, micros) if name == "deepspeed" else order_of(schedule, stage, 2, micros)
        for stage in range(2)
    ]
    costs = [{kind: one.get(kind.value, 0.0) for kind in Kind} for one in least]
    spans = [span for times in simulate(orders, costs=costs) for span in times]
    return float(max(end for _, end in spans) + max(one["rest"] for one in least))


def show(names: list[str], rounds: list[dict[str, list[dict[str, Any]]]], micros: int) -> int:
    base = "deepspeed" if "deepspeed" in names else "one process"
    wrong = 0
    expected = rounds[0]["one process"][0]["losses"]
    cpu = {name: cpu_of(name, rounds, micros) for name in names}
    of_base = f"of {base}'s"
    print(f"| variant | step, s | {of_base} | CPU, s | {of_base} | peak, MiB | {of_base} | idle | formula | live |")
    print(f"|{'---|' * 10}")
    ratios, memory = dict[str, float](), dict[str, float]()
    for name in names:
        step = {one: [max(rank["seconds"] for rank in each[one]) for each in rounds] for one in (name, base)}
        peak = {
            one: statistics.median(max(rank["peak"] for rank in each[one]) for each in rounds) for one in (name, base)
        }
        ratios[name] = statistics.median(mine / its for mine, its in zip(step[name], step[base], strict=True))
        memory[name] = peak[name] / peak[base]
        first = rounds[0][name][0]
        schedule = [f"{first[key]:.2f}" for key in ("idle", "bubble") if key in first] or ["", ""]
        live = str(first.get("live", ""))
        mine, its = cpu[name], cpu[base]
        counted = [f"{mine:.3f}" if mine else "", f"{mine / its:.2f}" if mine and its else ""]
        cells = [f"{statistics.median(step[name]):.3f}", f"{ratios[name]:.2f}", *counted, f"{peak[name]:.0f}"]
        print("| " + " | ".join([name, *cells, f"{memory[name]:.2f}", *schedule, live]) + " |")
        worst = max(
            abs(mine - its) for each in rounds for mine, its in zip(each[name][-1]["losses"], expected, strict=True)
        )
        if worst > 2e-4:
            print(f"{name}: its losses differ by {worst:.1e} from one process's")
            wrong = 1
    if base == "deepspeed":
        return wrong or behind(ratios, memory)
    return wrong


def behind(times: dict[str, float], memory: dict[str, float]) -> int:
    """1 if ours is, by the ratios to DeepSpeed's."""
    ahead = [name for name in OURS if name in times and times[name] < 1 and memory[name] <= 1]
    if not ahead:
        print("none of ours is ahead of DeepSpeed's with no more memory")
    same_split = times.get("1f1b", 0.0)
    if same_split > LIMIT:
        print(f"1F1B takes {same_split:.2f} x the time of DeepSpeed's")
    return int(not ahead or same_split > LIMIT)


if __name__ == "__main__":
    main()
