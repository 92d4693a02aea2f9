"""The meaning of "auto": rules by which TrainingArguments and the model give values, as transformers has them.

A rule fills its key where the file says "auto". Where the file has a value instead, most rules demand that it equals
the argument, compared by value ("8" is 8). Some rules also fill a key that is missing. Arguments and models are only
looked at by attribute, so anything alike will do. What is left of the batch numbers follows from the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.conditions import ACCUMULATION, MICRO, TRAIN
from hf_zero.config.schema import number

ABSENT: Any = object()  # where None is a value


def _same(value: Any) -> Any:
    return value


def _either(*values: Any) -> bool:
    return any(bool(value) for value in values)


def _warmup(steps: int, warmup: float) -> int:
    return max(1, int(warmup) if warmup >= 1 else math.ceil(steps * warmup))


def _at_least_1(steps: int) -> int:
    return max(1, steps)


@dataclass(frozen=True)
class Rule:
    """The source of one key's value when the file leaves it to TrainingArguments."""

    path: str
    reads: tuple[str, ...]  # attributes of the arguments; world_size and num_training_steps are the resolver's
    value: Callable[..., Any] = _same
    name: str = ""  # what messages call the source; "" is the attribute
    must_match: bool = True
    normal: Callable[[Any], Any] = _same  # of the file's value, before it is compared
    batch: bool = False  # auto_find_batch_size may change it, so the arguments win over the file then
    fills_missing: bool = False
    takes_none: bool = False  # None is a value to it, not the lack of one

    @property
    def argument(self) -> str:
        return self.name or "+".join(self.reads)


RULES: tuple[Rule, ...] = (
    Rule(MICRO, ("per_device_train_batch_size",), batch=True, fills_missing=True),
    Rule(ACCUMULATION, ("gradient_accumulation_steps",), fills_missing=True),
    Rule(
        TRAIN,
        ("world_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
        lambda *factors: math.prod(factors),
        "train_batch_size (calculated)",
        batch=True,
        fills_missing=True,
    ),
    Rule("gradient_clipping", ("max_grad_norm",), lambda norm: norm or 0.0, fills_missing=True, takes_none=True),
    Rule("optimizer.params.lr", ("learning_rate",)),
    Rule("optimizer.params.betas", ("adam_beta1", "adam_beta2"), lambda *betas: list(betas)),
    Rule("optimizer.params.eps", ("adam_epsilon",)),
    Rule("optimizer.params.weight_decay", ("weight_decay",)),
    Rule("scheduler.params.warmup_min_lr", (), lambda: 0.0, must_match=False),
    Rule("scheduler.params.warmup_max_lr", ("learning_rate",)),
    Rule("scheduler.params.total_num_steps", ("num_training_steps",), name="num_training_steps (calculated)"),
    Rule(
        "scheduler.params.warmup_num_steps",
        ("num_training_steps", "warmup_steps"),
        _warmup,
        "warmup_steps",
        normal=_at_least_1,
    ),
    Rule("fp16.enabled", ("fp16", "fp16_full_eval"), _either, "fp16|fp16_full_eval", takes_none=True),
    Rule("bf16.enabled", ("bf16", "bf16_full_eval"), _either, "bf16|bf16_full_eval", takes_none=True),
    Rule("amp.enabled", ("fp16",), bool, must_match=False, takes_none=True),
)

# Without arguments nothing can stand for these, so "auto" is a mistake there.
NEEDS_ARGUMENTS = frozenset(
    {
        "optimizer.params.lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
    }
)


class Arguments:
    """TrainingArguments, or an object with some of their attributes, or None."""

    def __init__(self, args: Any, world_size: int, num_training_steps: int | None) -> None:
        self.args = args
        steps = num_training_steps
        if steps is None:
            max_steps = self.read("max_steps")
            steps = max_steps if isinstance(max_steps, int) and max_steps > 0 else None
        self._own: dict[str, Any] = {"world_size": world_size}
        if steps is not None:
            self._own["num_training_steps"] = steps

    def read(self, name: str) -> Any:
        """The attribute, or None."""
        return getattr(self.args, name, None)

    def value(self, rule: Rule) -> Any:
        """The value that the arguments give for a rule, or ABSENT where one of its attributes is missing."""
        values = [self._own.get(name, getattr(self.args, name, ABSENT)) for name in rule.reads]
        if any(value is ABSENT or (value is None and not rule.takes_none) for value in values):
            return ABSENT
        given = [number(value) if isinstance(value, str) else value for value in values]
        return rule.value(*(value if new is None else new for value, new in zip(values, given, strict=True)))


def equal(one: Any, other: Any) -> bool:
    """Whether two values mean the same: 8 and "8", 1e-5 and "1e-5", a list and a tuple."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    first, second = number(one), number(other)
    if first is not None and second is not None:
        return first == second
    return bool(one == other)


@dataclass(frozen=True)
class HiddenSize:
    """The width `h` that bucket sizes are derived from."""

    value: int
    from_parameters: bool


def bucket_sizes(hidden: int, stage: int) -> Mapping[str, int]:
    """The values of "auto" for the keys that follow the model's width."""
    sizes = {"zero_optimization.reduce_bucket_size": hidden * hidden}
    if stage == 3:
        sizes["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden * hidden)
        sizes["zero_optimization.stage3_param_persistence_threshold"] = 10 * hidden
    return sizes


def hidden_size(model: Any) -> HiddenSize | None:
    """The model's width: from its config as transformers takes it, else from its parameters, else None.

    Only `model.config` and the shapes of `model.parameters()` are read, so sharded and meta models will do.
    """
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for size in (getattr(holder, "hidden_size", None), getattr(holder, "hidden_sizes", None)):
            widths = [one for one in (size if isinstance(size, list | tuple) else [size]) if type(one) is int]
            if widths:
                return HiddenSize(max(widths), from_parameters=False)
    widest = Counter(_widths(model)).items()
    if not widest:
        return None
    width, _ = max(widest, key=lambda item: (item[1], item[0]))
    return HiddenSize(width, from_parameters=True)


def _widths(model: Any) -> Iterator[int]:
    """Yield each matrix's number of columns; for a kernel or a stack of matrices, the longest side but the first."""
    parameters = getattr(model, "parameters", None)
    for parameter in parameters() if callable(parameters) else ():
        shape = tuple(parameter.shape)
        if len(shape) >= 2 and max(shape[1:]) > 0:
            yield max(shape[1:])


# ---------------------------------------------------------------- the batch numbers
@dataclass(frozen=True)
class Batch:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size.

    `inferred` names the numbers that followed from the others, `defaulted` those set to 1 or so.
    """

    train: int
    micro: int
    accumulation: int
    inferred: tuple[str, ...] = ()
    defaulted: tuple[str, ...] = ()

    def multiplies_up(self, world_size: int) -> bool:
        product = self.micro * self.accumulation * world_size
        return min(self.train, self.micro, self.accumulation) > 0 and self.train == product

    def problem(self, world_size: int) -> str:
        """DeepSpeed's text, which people search for."""
        return (
            "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
            f"gradient_acc_step * world_size {self.train} != {self.micro} * {self.accumulation} * {world_size}"
        )

    def remedy(self, world_size: int) -> str:
        """The nearest train_batch_size that would do, for what was given and not inferred."""
        step = world_size
        if MICRO not in self.inferred:
            step *= self.micro
        if ACCUMULATION not in (*self.inferred, *self.defaulted):
            step *= self.accumulation
        if MICRO in self.inferred or ACCUMULATION in self.inferred:
            nearest = max(1, round(self.train / step)) * step
            return f"Set train_batch_size to a multiple of {step}, such as {nearest}, or leave it out."
        product = self.micro * self.accumulation * world_size
        return f"Set train_batch_size to {product}, or leave one of the three out: it follows from the others."


def complete_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> Batch:
    """Infer what is missing, in the six ways of DeepSpeed; with nothing to go by, one sample per rank and step."""
    if train is not None and micro is not None and accumulation is not None:
        return Batch(train, micro, accumulation)
    if train is not None and micro is not None:
        return Batch(train, micro, train // micro // world_size, (ACCUMULATION,))
    if train is not None and accumulation is not None:
        return Batch(train, train // world_size // accumulation, accumulation, (MICRO,))
    if micro is not None and accumulation is not None:
        return Batch(micro * accumulation * world_size, micro, accumulation, (TRAIN,))
    if train is not None:
        return Batch(train, train // world_size, 1, (MICRO,), (ACCUMULATION,))
    if micro is not None:
        return Batch(micro * world_size, micro, 1, (TRAIN,), (ACCUMULATION,))
    steps = 1 if accumulation is None else accumulation
    defaulted = (MICRO,) if accumulation is not None else (MICRO, ACCUMULATION)
    return Batch(steps * world_size, 1, steps, (TRAIN,), defaulted)
