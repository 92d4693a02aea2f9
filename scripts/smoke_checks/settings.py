"""The configurations that a smoke run trains: every stage with every medium that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Optimizer states + parameters; "delayed" are states on the host, updated beside the next step.
MEDIA = {
    0: ("none",),
    1: ("none", "cpu", "nvme", "delayed"),
    2: ("none", "cpu", "nvme", "delayed"),
    3: ("none", "cpu", "nvme", "delayed", "none+cpu", "cpu+cpu", "nvme+nvme"),
}


@dataclass(frozen=True)
class Setting:
    stage: int
    medium: str = "none"
    precision: str = "fp32"
    pin: bool = True

    def __str__(self) -> str:
        words = [f"stage {self.stage}"]
        words += [] if self.medium == "none" else [self.medium]
        words += [] if self.precision == "fp32" else [self.precision]
        words += [] if self.pin else ["unpinned"]
        return ", ".join(words)

    @property
    def states(self) -> str:
        return self.medium.partition("+")[0]

    @property
    def params(self) -> str:
        return self.medium.partition("+")[2] or "none"

    @property
    def is_offloaded(self) -> bool:
        return self.medium != "none"

    @property
    def is_delayed(self) -> bool:
        return self.states == "delayed"

    def config(self, shape: Shape, folder: str) -> dict[str, Any]:
        """hf_zero's configuration; `folder` is for files of offload."""
        states = "cpu" if self.is_delayed else self.states
        zero: dict[str, Any] = {
            "stage": self.stage,
            "stage3_param_persistence_threshold": 0,  # small parameters too
            "offload_optimizer": {
                "device": states,
                "nvme_path": folder,
                "pin_memory": self.pin,
                "delayed_update": self.is_delayed,
            },
            "offload_param": {
                "device": self.params,
                "nvme_path": folder,
                "pin_memory": self.pin,
                "max_in_cpu": 0,
            },
        }
        return {
            "train_micro_batch_size_per_gpu": shape.micro_batch,
            "gradient_accumulation_steps": shape.accumulation,
            "gradient_clipping": shape.clip,
            "zero_optimization": zero,
            **({} if self.precision == "fp32" else {self.precision: {"enabled": True}}),
        }


@dataclass(frozen=True)
class Shape:
    """The shape of the batches, and the number of steps."""

    micro_batch: int = 2
    tokens: int = 32
    accumulation: int = 2
    clip: float = 1.0
    steps: int = 3
    lr: float = 2e-2


def every_setting() -> Iterator[Setting]:
    for stage, media in MEDIA.items():
        for medium in media:
            yield Setting(stage, medium)
    for stage, medium in ((0, "none"), (2, "cpu"), (3, "none"), (3, "cpu+cpu")):
        yield Setting(stage, medium, "bf16")
    yield Setting(2, "cpu", pin=False)
    yield Setting(3, "cpu+cpu", pin=False)


# A rehearsal trains these: each way to hold states and parameters once.
BRIEF = (
    Setting(0),
    Setting(1, "delayed"),
    Setting(2, "cpu"),
    Setting(3),
    Setting(3, "nvme+nvme"),
    Setting(3, "cpu+cpu", "bf16"),
    Setting(2, "cpu", pin=False),
)
