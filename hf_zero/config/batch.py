"""The batch triangle: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size."""

from __future__ import annotations

from dataclasses import dataclass

KEYS = TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class Batch:
    """The three numbers; `inferred` names those that followed from the others, `defaulted` those set to 1 or so."""

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


def complete(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> Batch:
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
