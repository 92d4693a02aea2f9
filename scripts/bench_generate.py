"""Speed of generate on a sharded model, beside plain processes and FSDP2, in one interleaved run.

    python scripts/bench_generate.py                      # 2 gloo ranks on this machine, a Llama of 125 M, fp32
    python scripts/bench_generate.py --quick              # fewer rounds
    python scripts/bench_generate.py --variants plain,loop --batches 8 --rounds 4

Every variant generates for the same prompts, different on every rank, with greedy decoding; all of them hold the same
weights. A round is a call of `generate` for each of its batches. Variants: plain (every rank has the whole model to
itself, side by side), once and stream (hf_zero at stage 3, `gather_for_generation`; "once" gathers anew for every
call), loop (gathered once for all batches of a round, as Trainer does with predict_with_generate), fsdp2 (fully_shard
per decoder layer and on the root). A variant's turn begins with a call for one token, which is shown by itself: where
a hypervisor takes free memory back, it pays for what lay idle while the others had their turns.

Read the ratios: medians over rounds of the ratio within a round; CPU seconds (all threads of all ranks) hardly move
with the load of the machine. The run fails if a text differs from plain's, or a target is missed:

    loop and once >= 0.95 x plain, stream >= 1.3 x fsdp2       in tokens/s of all ranks together
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from benchlib import ModelSize
from torch import nn

from hf_zero.hf.models.generation import calls_in_a_row

VARIANTS = ("plain", "once", "stream", "fsdp2", "loop")
# Variant -> (the one it is compared with, tokens/s over that one's at least)
TARGETS = {"loop": ("plain", 0.95), "once": ("plain", 0.95), "stream": ("fsdp2", 1.3)}


_LEGEND = """tokens/s: of all ranks; a step gives every sequence one token. first token: of a turn, in no other figure.
x: tokens/s over those of another variant, the median over rounds. by CPU: the same ratio if CPU seconds counted."""


# ---------------------------------------------------------------- in a rank
def make_model(variant: str, size: ModelSize) -> nn.Module:
    model = size.build().eval()
    model.requires_grad_(False)
    if variant == "fsdp2":
        return _fully_sharded(model)
    if variant != "plain":
        import hf_zero

        config = {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10 * size.hidden},
            "gather_for_generation": "stream" if variant == "stream" else "once",
        }
        hf_zero.shard(model, config)
    return model


def _fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def generate(variant: str, model: Any, prompts: torch.Tensor, new: int) -> torch.Tensor:
    more = {"synced_gpus": True} if variant == "fsdp2" else {}
    mask = torch.ones_like(prompts)
    settings = {"do_sample": False, "use_cache": True, "max_new_tokens": new, "min_new_tokens": new}
    with torch.no_grad():
        output: torch.Tensor = model.generate(prompts, attention_mask=mask, pad_token_id=0, **settings, **more)
    return output[:, prompts.shape[1] :]


def generate_all(variant: str, model: Any, batches: Sequence[torch.Tensor], new: int) -> torch.Tensor:
    """[sequences, new tokens] of all batches."""
    with calls_in_a_row() if variant == "loop" else contextlib.nullcontext():
        return torch.cat([generate(variant, model, prompts, new) for prompts in batches])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant: the slowest rank's seconds, all ranks' CPU seconds, and texts that are not plain's."""
    size = ModelSize.of(args)
    models = {name: make_model(name, size) for name in args.variants}
    numel = sum(param.numel() for param in size.build().parameters())
    shape = (args.batch, args.prompt)

    def prompts_of(number: int) -> list[torch.Tensor]:
        steps = range(number * args.batches, (number + 1) * args.batches)
        return [benchlib.make_batch(size.vocab, shape, dist.get_rank(), step)["input_ids"] for step in steps]

    for name, model in models.items():
        generate_all(name, model, prompts_of(0), 4)
    gc.collect()
    gc.freeze()
    first: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    cpu: dict[str, list[float]] = {name: [] for name in models}
    differing: dict[str, int] = dict.fromkeys(models, 0)
    for number in range(args.rounds):
        prompts = prompts_of(number + 1)
        texts = {}
        for name in models if number % 2 == 0 else reversed(models):
            dist.barrier()
            start = time.perf_counter()
            generate(name, models[name], prompts[0], 1)
            first[name].append(time.perf_counter() - start)
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            texts[name] = generate_all(name, models[name], prompts, args.new)
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - busy)
        for name, text in texts.items():
            differing[name] += not torch.equal(text, texts["plain"])
        if dist.get_rank() == 0:
            print(f"[bench_generate] round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (first, seconds, cpu, differing))
    all_first, all_seconds, all_cpu, all_differing = zip(*everyone, strict=True)
    return {
        "numel": numel,
        "first": {name: _by_round(max, [one[name] for one in all_first]) for name in models},
        "seconds": {name: _by_round(max, [one[name] for one in all_seconds]) for name in models},
        "cpu": {name: _by_round(sum, [one[name] for one in all_cpu]) for name in models},
        "differing": {name: sum(one[name] for one in all_differing) for name in models},
    }


def _by_round(combine: Callable[[Sequence[float]], float], ranks: Sequence[Sequence[float]]) -> list[float]:
    return [combine(values) for values in zip(*ranks, strict=True)]


# ---------------------------------------------------------------- in the launcher
@dataclasses.dataclass(frozen=True)
class Verdict:
    text: str
    ok: bool


def report(args: argparse.Namespace, result: dict[str, Any]) -> Verdict:
    """The text to print, and whether texts agree and targets are met."""
    seconds: dict[str, list[float]] = result["seconds"]
    about = benchlib.environment()
    lines = [", ".join(f"{key} {value}" for key, value in about.items())]
    lines.append(f"model: Llama {vars(ModelSize.of(args))}, {result['numel'] / 1e6:.1f} M parameters, random weights")
    lines.append(
        f"{args.world} gloo rank(s), {args.threads} thread(s) each, fp32; {args.batches} batches of {args.batch} per "
        f"rank, prompts of {args.prompt} tokens, {args.new} new tokens, greedy; {args.rounds} rounds"
    )
    bases = [name for name in ("plain", "fsdp2") if name in seconds]
    rows = []
    for name, mine in seconds.items():
        steps = args.batches * args.new
        tokens = args.world * args.batch * steps
        row = [name, f"{tokens / statistics.median(mine):.1f}", f"{statistics.median(mine) / steps * 1e3:.1f}"]
        row.append(f"{statistics.median(result['first'][name]):.2f}")
        for base in bases:
            low, high = benchlib.spread(seconds[base], mine)
            row.append(f"{benchlib.paired(seconds[base], mine):.3f} ({low:.2f}-{high:.2f})")
        row.append(f"{statistics.median(result['cpu'][name]):.2f}")
        row += [f"{benchlib.paired(result['cpu'][base], result['cpu'][name]):.3f}" for base in bases]
        rows.append(row)
    head = [
        "variant",
        "tokens/s",
        "ms per step",
        "first token s",
        *(f"x {base} (quartiles)" for base in bases),
        "CPU s",
    ]
    head += [f"by CPU x {base}" for base in bases]
    lines += ["", benchlib.table(head, rows), "", _LEGEND]
    ok = True
    for name, (other, target) in TARGETS.items():
        if name in seconds and other in seconds:
            ratio = benchlib.paired(seconds[other], seconds[name])
            met = ratio >= target
            lines.append(f"{name} over {other}: {ratio:.3f}, target {target}: {'ok' if met else 'MISSED'}")
            ok = ok and met
    for name, count in result["differing"].items():
        if count:
            lines.append(f"{name}: {count} texts differ from plain's: FAILED")
            ok = False
    return Verdict("\n".join(lines), ok)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", default=",".join(VARIANTS[:-1]), help="comma-separated; plain is always among them")
    add("--world", type=int, default=2, help="ranks")
    add("--rounds", type=int, help="default 12; 2 with --quick")
    add("--quick", action="store_true")
    add("--batches", type=int, default=1, help="batches per round")
    add("--batch", type=int, default=4, help="sequences per rank")
    add("--prompt", type=int, default=16, help="tokens of a prompt")
    add("--new", type=int, default=64, help="tokens to generate")
    benchlib.size_arguments(parser, ModelSize(768, 2048, 12, 12, 25600))
    benchlib.common_arguments(parser)
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (2 if args.quick else 12)
    chosen = args.variants.split(",")
    unknown = [name for name in chosen if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant(s) {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    args.variants = [name for name in VARIANTS if name in chosen or name == "plain"]
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if benchlib.in_rank():
        benchlib.run_rank(lambda: measure(args))
        return
    result = benchlib.launch(sys.argv, args.world, timeout_s=args.timeout, threads=args.threads)
    verdict = report(args, result)
    benchlib.tell(args, result, verdict.text)
    if not verdict.ok:
        sys.exit("a target is missed or texts differ")


if __name__ == "__main__":
    main()
