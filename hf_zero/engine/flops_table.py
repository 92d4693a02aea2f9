"""The profile of a step as text, in the layout of DeepSpeed's flops profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from hf_zero.config import FlopsProfilerSection

_WIDTH = 78
_UNKNOWN = "unknown: use engine.backward(loss)"
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
_NOTATIONS = """Notations:
data parallel size (dp_size), model parallel size(mp_size),
number of parameters (params), number of multiply-accumulate operations(MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)
"""
_ORDER = """Each module profile is listed after its name in the following order:
params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency,
fwd FLOPS

Note: 1. Matrix products, convolutions and attention are counted, wherever they are called; a module has those of the
modules inside it. 2. The time of a module has the all-gathers inside it, and not that of its own parameters.
3. Counting takes the host some time for each operation, which the times contain. Compiled layers run uncompiled here.
"""


@dataclass(frozen=True)
class StepProfile:
    """Of rank 0: operations of one micro-batch, seconds of its forward and backward and of the update."""

    step: int
    world_size: int
    micro_batch: int
    micro_batches: int  # of the step
    params: int
    forward_flops: int
    backward_flops: int | None  # None: the script did not leave the backward to the engine
    forward_s: float
    backward_s: float
    step_s: float


@dataclass(frozen=True)
class ModuleProfile:
    """Of the forward of a module, with the modules inside it."""

    params: int
    flops: int
    seconds: float

    @property
    def macs(self) -> int:
        return self.flops // 2


Profiles = Mapping[nn.Module, ModuleProfile]


def text_of(step: StepProfile, model: nn.Module, profiles: Profiles, section: FlopsProfilerSection) -> str:
    """All that is shown. `profiles` has every module of `model`."""
    parts = [
        _title("DeepSpeed Flops Profiler"),
        f"Profile Summary at step {step.step}:",
        _NOTATIONS,
        *(f"{name:<70}  {value:<8}" for name, value in _summary(step)),
        "",
        _title("Aggregated Profile per GPU"),
        *_aggregated(model, profiles, section.module_depth, section.top_modules),
    ]
    if section.detailed:
        parts += ["", _title("Detailed Profile per GPU"), _ORDER, *_detailed(model, profiles)]
    return "\n".join([*parts, "-" * _WIDTH])


def scaled(number: float, unit: str = "") -> str:
    """ "1.5 G": by powers of 1000, two digits behind the point."""
    for scale, prefix in _SCALES:
        if number >= scale:
            return f"{round(number / scale, 2):g} {prefix}{unit}"
    return f"{round(number, 2):g} {unit}".rstrip()


def _title(text: str) -> str:
    return f" {text} ".center(_WIDTH, "-")


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.2f} us"


def _rate(flops: float | None, seconds: float) -> str:
    if flops is None:
        return _UNKNOWN
    return scaled(flops / seconds if seconds > 0 else 0.0, "FLOPS")


def _summary(one: StepProfile) -> Iterator[tuple[str, object]]:
    backward = one.backward_flops
    both, both_s = None if backward is None else one.forward_flops + backward, one.forward_s + one.backward_s
    whole_s = both_s + one.step_s / one.micro_batches  # each micro-batch has its part of the update
    share = f" = fwd + bwd + step / {one.micro_batches}" if one.micro_batches > 1 else ""
    yield "world size: ", one.world_size
    yield "data parallel size: ", one.world_size
    yield "model parallel size: ", 1
    yield "batch size per GPU: ", one.micro_batch
    yield "params per GPU: ", scaled(one.params)
    yield "params of model = params per GPU * mp_size: ", scaled(one.params)
    yield "fwd MACs per GPU: ", scaled(one.forward_flops // 2, "MACs")
    yield "fwd flops per GPU: ", scaled(one.forward_flops)
    yield "bwd flops per GPU: ", _UNKNOWN if backward is None else scaled(backward)
    yield "fwd flops of model = fwd flops per GPU * mp_size: ", scaled(one.forward_flops)
    yield "fwd latency: ", _seconds(one.forward_s)
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency: ", _rate(one.forward_flops, one.forward_s)
    yield "bwd latency: ", _seconds(one.backward_s)
    yield "bwd FLOPS per GPU = bwd flops per GPU / bwd latency: ", _rate(backward, one.backward_s)
    yield "fwd+bwd FLOPS per GPU = fwd+bwd flops per GPU / (fwd+bwd latency): ", _rate(both, both_s)
    yield "step latency: ", _seconds(one.step_s)
    yield f"iter latency{share}: ", _seconds(whole_s)
    yield "FLOPS per GPU = fwd+bwd flops per GPU / iter latency: ", _rate(both, whole_s)
    yield "samples/second: ", round(one.micro_batch * one.world_size / whole_s, 2)


def _aggregated(model: nn.Module, profiles: Profiles, depth: int, top: int) -> Iterator[str]:
    """The `top` classes of modules at each depth down to `depth`, -1 for all."""
    levels = _by_depth(model, profiles)
    yield f"Top {top} modules in terms of params, MACs or fwd latency at different model depths:"
    for at, classes in enumerate(levels if depth < 0 else levels[: depth + 1]):
        yield f"depth {at}:"
        yield f"    params      - {_largest(classes, top, lambda one: one.params, scaled)}"
        yield f"    MACs        - {_largest(classes, top, lambda one: one.macs, lambda n: scaled(n, 'MACs'))}"
        yield f"    fwd latency - {_largest(classes, top, lambda one: one.seconds, _seconds)}"


def _by_depth(model: nn.Module, profiles: Profiles) -> list[dict[str, ModuleProfile]]:
    """For each depth the sums of each class of modules there."""
    levels, modules = [], [model]
    while modules:
        sums: dict[str, ModuleProfile] = {}
        for module in modules:
            name, one = type(module).__name__, profiles[module]
            before = sums.get(name, ModuleProfile(0, 0, 0.0))
            sums[name] = ModuleProfile(
                before.params + one.params, before.flops + one.flops, before.seconds + one.seconds
            )
        levels.append(sums)
        modules = [child for module in modules for child in module.children()]
    return levels


def _largest(
    classes: Mapping[str, ModuleProfile],
    top: int,
    value: Callable[[ModuleProfile], float],
    text: Callable[[float], str],
) -> dict[str, str]:
    ordered = sorted(classes.items(), key=lambda item: value(item[1]), reverse=True)
    return {name: text(value(one)) for name, one in ordered[:top]}


def _detailed(model: nn.Module, profiles: Profiles) -> Iterator[str]:
    """The model as Python prints it, with the profile of each module behind its name."""

    def lines(name: str, module: nn.Module, indent: str) -> Iterator[str]:
        text = ", ".join(filter(None, [_described(profiles[module], profiles[model]), module.extra_repr()]))
        inside = list(module.named_children())
        if not inside:
            yield f"{indent}{name}{type(module).__name__}({text})"
            return
        yield f"{indent}{name}{type(module).__name__}("
        yield f"{indent}  {text}"
        for child, one in inside:
            yield from lines(f"({child}): ", one, f"{indent}  ")
        yield f"{indent})"

    return lines("", model, "")


def _described(one: ModuleProfile, total: ModuleProfile) -> str:
    return ", ".join(
        [
            f"{scaled(one.params)} = {_percent(one.params, total.params)}% Params",
            f"{scaled(one.macs, 'MACs')} = {_percent(one.macs, total.macs)}% MACs",
            f"{_seconds(one.seconds)} = {_percent(one.seconds, total.seconds)}% latency",
            _rate(one.flops, one.seconds),
        ]
    )


def _percent(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, 2) if whole else 0:g}"
