"""Step time of hf_zero's stages beside torch DDP and FSDP2, in one interleaved run.

    python scripts/bench_step.py                          # 2 gloo ranks on this machine, fp32
    python scripts/bench_step.py --dtype bf16 --variants ddp,fsdp2,zero3
    python scripts/bench_step.py --per-layer              # what a layer costs by itself: 1 rank, 12 and 96 layers
    python scripts/bench_step.py --device accelerator --world 8 --dtype bf16   # a GPU for each rank, over NCCL
    scripts/hosts.sh 2 500mbit 0 torchrun --nnodes 2 --node_rank {rank} --master_addr {master} scripts/bench_step.py

Every variant trains its own copy of the same model on the same data inside the same processes, a few steps in turn.
Read the ratios: medians over rounds of the ratio within a round. CPU seconds (all threads of all ranks) hardly move
with the load of the machine. The run fails if the losses of the variants differ. With one variant it tells the peak of
memory too: variants of one process share that.

Variants: plain (one rank only), ddp, fsdp2 (fully_shard per decoder layer and on the root), zero0 ... zero3 (hf_zero,
stage3_param_persistence_threshold 10 x hidden, as transformers' "auto"), zero3-p0 (threshold 0), zero3-auto (bucket
sizes by transformers' "auto" rules too); hybrid (FSDP2 sharded within a host, replicated over hosts) and zero1-host
... zero3-host (sharding_group "host"), zero3-host-hybrid (hybrid_shard too), zero3-offload and zero3-host-offload (all
states in the host's memory), zero2-8bit and zero3-8bit (8-bit messages between hosts: gradients, at stage 3 parameters
too), deepspeed2 and deepspeed3 (the extra [peers], with DS_ACCELERATOR=cpu), under torchrun; zero0-O1 ... zero2-O3,
levels of FP8 as msamp names them (around it fp32, or fp16 with --dtype bf16; needs torchao: PYTHONPATH=.venv/torchao).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from benchlib import ModelSize, Series
from smoke_checks import place
from torch import nn

# Largest relative difference of a loss from the first variant's, over all steps.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
LAYER_CUTS = (
    # The same number of parameters, 10 M, in few large layers and in many small ones. With few tokens besides, what is
    # left of a step is what every layer costs whatever its size.
    ModelSize(hidden=256, intermediate=704, layers=12, heads=8, vocab=1024),
    ModelSize(hidden=88, intermediate=240, layers=96, heads=4, vocab=6272),
)


LAYER_AIM_MS = 0.1
# FP8 by the levels of msamp.
FP8_VARIANTS = tuple(f"zero{stage}-O{level}" for stage in range(3) for level in (1, 2, 3) if stage or level < 3)


class Torch:
    """One rank without any wrapper, and the base of what torch brings along."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.args = args
        self.device = benchlib.compute_device(args.device)
        self.model = self.wrap(model.to(self.device))
        self.optimizer = make_optimizer(self.model.parameters(), args)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.args.dtype == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with self.precision():
            loss: torch.Tensor = self.model(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        if self.args.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state on this rank; call between `backward` and `update`."""
        params = list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return benchlib.nbytes([*params, *(param.grad for param in params), *states])


class BareHooks(Torch):
    """Plain, with what no engine of gradients in flat memory can do without: per parameter and backward a hook before
    the gradient, which does nothing, one behind it, and a copy. What hf_zero's cost beyond this is its own Python."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self._grads = [(param, torch.zeros_like(param)) for param in model.parameters()]
        for param, flat in self._grads:
            param.register_hook(lambda grad: None)
            param.register_post_accumulate_grad_hook(functools.partial(self._take, flat))
        return model

    @staticmethod
    def _take(flat: torch.Tensor, param: torch.Tensor) -> None:
        grad, param.grad = param.grad, None
        assert grad is not None
        flat.copy_(grad)

    def update(self) -> None:
        for param, flat in self._grads:
            param.grad = flat
        super().update()


class DDP(Torch):
    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


class FSDP2(Torch):
    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if self.args.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shape = self.shape()
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("hosts", "ranks")[-len(shape) :])
        layers: Any = model.get_submodule("model.layers")
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def shape(self) -> tuple[int, ...]:
        return (dist.get_world_size(),)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # fully_shard casts


class Hybrid(FSDP2):
    """Sharded within a host, and replicated over hosts."""

    def shape(self) -> tuple[int, ...]:
        per_host = int(os.environ["LOCAL_WORLD_SIZE"])
        return (dist.get_world_size() // per_host, per_host)


class Zero(benchlib.ZeroLoop):
    def state_bytes(self) -> int:
        total: int = self.engine.memory_report()["total"]
        return total


class DeepSpeed(benchlib.ZeroLoop):
    """DeepSpeed of the extra [peers]; it does not tell the bytes of its states."""

    library = "deepspeed"

    def state_bytes(self) -> int:
        return 0


def make_optimizer(params: Any, args: argparse.Namespace) -> torch.optim.Optimizer:
    fused, foreach = args.optimizer == "fused", args.optimizer == "foreach"
    return torch.optim.AdamW(params, lr=args.lr, weight_decay=0.01, fused=fused, foreach=foreach)


def zero_config(name: str, args: argparse.Namespace, hidden: int) -> dict[str, Any]:
    """hf_zero's configuration of a variant such as zero3-p0; sizes that are not named keep their defaults."""
    stage, _, flavour = name.removeprefix("zero").partition("-")
    zero: dict[str, Any] = {"stage": int(stage)}
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0 if flavour == "p0" else 10 * hidden
    if flavour.startswith("host"):
        zero["sharding_group"] = "host"
        zero["hybrid_shard"] = flavour.endswith("hybrid")
    if flavour.endswith("offload"):
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    if flavour == "8bit":
        zero |= {"zero_quantized_gradients": True, "zero_quantized_weights": zero["stage"] == 3}
    if flavour == "auto":
        zero["reduce_bucket_size"] = hidden * hidden
        zero["stage3_prefetch_bucket_size"] = int(0.9 * hidden * hidden)
    fp8 = name in FP8_VARIANTS
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.clip,
        "zero_optimization": zero,
        "bf16": {"enabled": args.dtype == "bf16" and not fp8},
        "fp16": {"enabled": args.dtype == "bf16" and fp8, "initial_scale_power": 12},
        **({"msamp": {"enabled": True, "opt_level": flavour}} if fp8 else {}),
    }


@functools.cache
def _built(size: ModelSize) -> nn.Module:
    """The model that every variant copies: random numbers for large ones take ten seconds."""
    return size.build()


def make_variant(name: str, size: ModelSize, args: argparse.Namespace) -> Torch | Zero | DeepSpeed:
    model = copy.deepcopy(_built(size))
    if args.compile:
        layers: Any = model.get_submodule("model.layers")
        for layer in layers:
            layer.compile()
    if name.startswith(("zero", "deepspeed")):
        model = place.put(model, args.device)
        optimizer = make_optimizer(model.parameters(), args)
        config = zero_config(name.replace("deepspeed", "zero"), args, size.hidden)
        return (Zero if name.startswith("zero") else DeepSpeed)(model, optimizer, config)
    return {"plain": Torch, "hooks": BareHooks, "ddp": DDP, "fsdp2": FSDP2, "hybrid": Hybrid}[name](model, args)


# ---------------------------------------------------------------- in a rank
def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure on a rank; variants are named "variant", with --per-layer "variant/layers"."""
    sizes = {"": ModelSize.of(args)}
    if args.per_layer:
        sizes = {f"/{size.layers}": size for size in LAYER_CUTS}
    variants: dict[str, Torch | Zero | DeepSpeed] = {}
    size_of: dict[str, ModelSize] = {}
    numel = {suffix: sum(param.numel() for param in _built(size).parameters()) for suffix, size in sizes.items()}
    benchlib.restart_peak()
    before = benchlib.resident()
    for suffix, size in sizes.items():
        for variant in args.variants:
            name = variant + suffix
            size_of[name] = size
            variants[name] = make_variant(variant, size, args)

    device = benchlib.compute_device(args.device)

    def batch_of(name: str, step: int) -> dict[str, torch.Tensor]:
        batch = benchlib.make_batch(size_of[name].vocab, (args.micro_batch, args.seq), dist.get_rank(), step)
        return {key: value.to(device) for key, value in batch.items()}

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[bench_step] {text}", file=sys.stderr, flush=True)

    counts = {"rounds": args.rounds, "steps": args.steps, "warmup": args.warmup}
    series = benchlib.measure_in_turn(variants, batch_of, **counts, say=say)
    memory = {}
    for name, made in variants.items():
        made.backward(made.forward(batch_of(name, len(series[name].losses))))
        memory[name] = made.state_bytes()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, benchlib.anonymous_peak() - before)
    return {
        "numel": numel,
        "series": {name: vars(one) for name, one in series.items()},
        "state_bytes": memory,
        "peak": max(peaks),
    }


# ---------------------------------------------------------------- in the launcher
def report(args: argparse.Namespace, result: dict[str, Any]) -> tuple[str, bool]:
    """The text to print, and whether the losses agree."""
    series = {name: Series(**values) for name, values in result["series"].items()}
    lines = header(args, result["numel"])
    if args.per_layer:
        lines += per_layer_table(args, series)
    else:
        lines += step_table(series, result["numel"][""], result["state_bytes"])
    if len(series) == 1 and args.device == "cpu":
        lines.append(f"Peak memory: {result['peak'] / 1e6:.0f} MB of the rank with most, beside a copy of the model.")
    lines.append(f"Other processes kept {benchlib.cores_of_others(series.values()):.1f} cores busy during the run.")
    agree = _losses_agree(args, series, lines)
    return "\n".join(lines), agree


def step_table(series: dict[str, Series], numel: int, state_bytes: dict[str, int]) -> list[str]:
    """Step time, CPU time and memory of every variant, and their ratios to DDP's and FSDP2's."""
    bases = [name for name in ("plain", "ddp", "fsdp2", "hybrid") if name in series]
    head = ["variant", "step ms", *(f"x {base} (quartiles)" for base in bases), "CPU s"]
    head += [*(f"CPU x {base}" for base in bases), "bytes/param", "page faults", "MB sent"]
    rows = []
    for name, one in series.items():
        row = [name, f"{one.step_s() * 1e3:.1f}"]
        for base in bases:
            low, high = benchlib.spread(one.round_s(), series[base].round_s())
            row.append(f"{benchlib.paired(one.round_s(), series[base].round_s()):.3f} ({low:.2f}-{high:.2f})")
        row.append(f"{statistics.median(one.cpu_s):.3f}")
        row += [f"{benchlib.paired(one.cpu_s, series[base].cpu_s):.3f}" for base in bases]
        row.append(f"{state_bytes[name] / numel:.2f}" if state_bytes[name] else "-")
        row += [f"{statistics.median(one.faults):.0f}", f"{statistics.median(one.sent) / 1e6:.1f}"]
        rows.append(row)
    return [
        "",
        benchlib.table(head, rows),
        "",
        "step ms: median over all steps, slowest rank. Ratios: median over rounds of the ratio within a round.",
        "CPU s, page faults: per step, all threads of all ranks. bytes/param: parameters, gradients and optimizer",
        "state of one rank before the update. MB sent: per step, by rank 0's host to others.",
    ]


def header(args: argparse.Namespace, numel: dict[str, int]) -> list[str]:
    about = benchlib.environment()
    lines = [", ".join(f"{key} {value}" for key, value in about.items())]
    sizes = LAYER_CUTS if args.per_layer else (ModelSize.of(args),)
    for size, count in zip(sizes, numel.values(), strict=True):
        lines.append(f"model: Llama {vars(size)}, {count / 1e6:.1f} M parameters, random weights")
    where = "gloo" if args.device == "cpu" else args.device
    lines.append(
        f"{args.world} {where} rank(s), {args.threads} thread(s) each, {args.dtype}, micro-batch {args.micro_batch} x "
        f"{args.seq} tokens{', compiled layers' * args.compile}, AdamW({args.optimizer}), clip {args.clip or 'off'}, "
        f"{args.rounds} rounds x {args.steps} steps per variant after {args.warmup} to warm up"
    )
    for name in args.variants:
        if name.startswith("zero"):
            config = zero_config(name, args, sizes[0].hidden)["zero_optimization"]
            lines.append(f"{name}: {json.dumps(config)}, else defaults")
    if args.world == 1 and any(name.startswith("zero3") for name in args.variants):
        lines.append("zero3 on one rank: parameters stay unsharded, as at stage 2 (there is nothing to gather)")
    return lines


def per_layer_table(args: argparse.Namespace, series: dict[str, Series]) -> list[str]:
    """The time of a variant beyond plain, at both depths and per layer (the slope between them)."""
    few, many = (size.layers for size in LAYER_CUTS)
    head = ["variant", *(f"{n} layers ms" for n in (few, many)), *(f"over plain, {n}" for n in (few, many))]
    head += ["ms per layer", "CPU ms per layer", *(f"{name} CPU ms" for name in benchlib.PASSES)]
    rows = []
    for name in args.variants:
        cuts = {n: series[f"{name}/{n}"] for n in (few, many)}
        plain = {n: series[f"plain/{n}"] for n in (few, many)}
        over = {n: _differences(cuts[n].round_s(), plain[n].round_s()) for n in (few, many)}
        cpu = {n: _differences(cuts[n].cpu_s, plain[n].cpu_s) for n in (few, many)}
        row = [name, *(f"{cuts[n].step_s() * 1e3:.1f}" for n in (few, many))]
        row += [f"{statistics.median(over[n]) * 1e3:+.1f}" for n in (few, many)]
        for both in (over, cpu):
            slopes = [(b - a) / (many - few) for a, b in zip(both[few], both[many], strict=True)]
            row.append(f"{statistics.median(slopes) * 1e3:+.3f}")
        row += [f"{cost:+.3f}" for cost in _per_layer_by_pass(series, name, "plain")]
        rows.append(row)
    lines = [
        "",
        benchlib.table(head, rows),
        "",
        "ms per layer: how the time over plain grows from one depth to the other. By pass: of the least CPU time of a",
        "step, which other processes disturb least.",
        "hooks: plain with bare hooks that copy every gradient.",
    ]
    if "hooks" in args.variants:
        lines += ["", *_own_python(args, series)]
    return lines


def _own_python(args: argparse.Namespace, series: dict[str, Series]) -> list[str]:
    """The time of a variant beyond hooks that do nothing and copies of the gradients, beside the aim."""
    lines = [f"beyond bare hooks and their copies, CPU ms per layer (aim: at most {LAYER_AIM_MS} in each pass):"]
    for name in args.variants:
        if name not in ("plain", "hooks"):
            costs = _per_layer_by_pass(series, name, "hooks")
            told = ", ".join(f"{cost:+.3f} {one}" for one, cost in zip(benchlib.PASSES, costs, strict=True))
            lines.append(f"{name}: {told}: {'ok' if max(costs) <= LAYER_AIM_MS else 'missed'}")
    return lines


def _per_layer_by_pass(series: dict[str, Series], name: str, base: str) -> list[float]:
    """CPU ms per layer by which a variant exceeds another one, in each of benchlib.PASSES."""
    few, many = (size.layers for size in LAYER_CUTS)
    costs = []
    for number in range(len(benchlib.PASSES)):
        more = {n: series[f"{name}/{n}"].pass_s(number) - series[f"{base}/{n}"].pass_s(number) for n in (few, many)}
        costs.append((more[many] - more[few]) / (many - few) * 1e3)
    return costs


def _differences(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(values, base, strict=True)]


def _losses_agree(args: argparse.Namespace, series: dict[str, Series], lines: list[str]) -> bool:
    """Whether all variants train alike; says so in `lines`."""
    limit, agree = LOSS_TOLERANCE[args.dtype], True
    lines.append("")
    for suffix in sorted({name.partition("/")[2] for name in series}):
        group = {name: one for name, one in series.items() if name.partition("/")[2] == suffix}
        first, *others = group
        want = group[first].losses
        worst, guilty = 0.0, others[0] if others else first
        for name in others:
            for mine, theirs in zip(group[name].losses, want, strict=True):
                difference = abs(mine - theirs) / abs(theirs) if math.isfinite(mine) else math.inf
                if difference > worst:
                    worst, guilty = difference, name
        verdict = "ok" if worst <= limit else f"FAILED, limit {limit:g}"
        lines.append(
            f"losses over {len(want)} steps, {want[0]:.4f} -> {want[-1]:.4f}: largest difference from {first} "
            f"{worst:.2g} relative ({guilty}): {verdict}"
        )
        agree = agree and worst <= limit
    return agree


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", help="comma-separated; the default is all that fit the setting")
    add("--device", choices=("cpu", *place.CHOICES), default="cpu", help="what ranks compute on; a rank each")
    add("--world", type=int, default=2, help="ranks (default 2; 1 with --per-layer)")
    add("--per-layer", action="store_true", help="overhead per layer on one rank, models of 12 and 96 layers")
    add("--rounds", type=int, default=10)
    add("--steps", type=int, default=3, help="steps of a variant per round")
    add("--warmup", type=int, default=3)
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--compile", action="store_true", help="torch.compile the decoder layers of every variant")
    add("--optimizer", choices=("fused", "foreach", "loop"), default="fused", help="implementation of AdamW, for all")
    add("--lr", type=float, default=1e-4)
    add("--clip", type=float, default=0.0, help="gradient norm to clip at; 0 is off")
    add("--micro-batch", type=int, default=2)
    add("--seq", type=int, help="tokens of a sequence (default 128; 32 with --per-layer)")
    benchlib.size_arguments(parser, ModelSize(384, 1024, 12, 6, 8192))
    benchlib.common_arguments(parser)
    args = parser.parse_args(argv)
    args.seq = args.seq or (32 if args.per_layer else 128)
    if args.per_layer:
        args.world = 1
    on_hosts = [
        "hybrid",
        *(f"zero{stage}-host{mode}" for stage in (1, 2, 3) for mode in ("", "-hybrid")),
        "zero2-8bit",
        "zero3-8bit",
    ]
    on_hosts += ["zero3-offload", "zero3-host-offload", "deepspeed2", "deepspeed3"]
    known = ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "zero3-p0", "zero3-auto"]
    if args.world == 1:
        known = ["plain", "hooks", "fsdp2", "zero2", "zero3"] if args.per_layer else ["plain", *known]
    args.variants = args.variants.split(",") if args.variants else known
    unknown = [name for name in args.variants if name not in (*known, *on_hosts, *FP8_VARIANTS)]
    if unknown:
        parser.error(f"unknown variant(s) {', '.join(unknown)}; in this setting there are {', '.join(known)}")
    if args.per_layer and args.variants[0] != "plain":
        args.variants = ["plain", *(name for name in args.variants if name != "plain")]
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if benchlib.in_rank():
        result = benchlib.run_rank(lambda: measure(args), args.device)
        if result is None:
            return
    else:
        result = benchlib.launch(sys.argv, args.world, timeout_s=args.timeout, threads=args.threads)
    text, agree = report(args, result)
    benchlib.tell(args, result, text)
    if not agree:
        sys.exit("the variants do not train alike")


if __name__ == "__main__":
    main()
