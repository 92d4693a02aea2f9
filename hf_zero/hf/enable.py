"""Owns what is in force in this process: the active configuration and the patch points in transformers and accelerate.

A patch point is a method of theirs that acts through one of our functions. `enable` puts functions into all, so that
unmodified scripts use ZeRO; `disable` puts the originals back. They are checked by name and signature first: an
upgrade that renamed one is an error that says so, never a run without ZeRO.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.distributed.processes import adopt_cluster_variables
from hf_zero.errors import ConfigError
from hf_zero.hf.conflicts import check_environment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PatchPoint:
    """A method of a foreign class that ours wraps: `wrap(original)` is put in its place.

    For static and class methods `wrap` gets and gives the plain function.
    """

    owner: type
    name: str
    parameters: tuple[str, ...]  # leading ones after the first
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def problem(self) -> str | None:
        """Why the patch point cannot be used, or None."""
        where = f"{self.owner.__name__}.{self.name}"
        method = self.owner.__dict__.get(self.name)
        if method is None:
            return f"{where} is missing"
        found = tuple(inspect.signature(_plain(method)).parameters)[1:]
        if found[: len(self.parameters)] != self.parameters:
            return f"{where} takes ({', '.join(found)}), expected ({', '.join(self.parameters)}, ...)"
        return None


@dataclass(frozen=True)
class _Patch:
    point: PatchPoint
    original: Callable[..., Any]
    ours: Callable[..., Any]


def _plain(method: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(method, "__func__", method)
    return function


class Activation:
    """What is in force: at most one configuration, held strongly, and the patch points that were opened for it."""

    def __init__(self) -> None:
        self.config: ZeroConfig | None = None
        # Given to `enable`: serves arguments without `zero`, and Accelerators that user code makes.
        self.enabled: ZeroConfig | None = None
        self._patches: list[_Patch] = []
        self._held_back = 0

    def activate(self, config: ZeroConfig, *, for_everyone: bool) -> None:
        """Make `config` the active one, and open the patch points if they are not open yet."""
        self._open()
        self.config = config
        if for_everyone:
            self.enabled = config

    def deactivate(self) -> None:
        """Forget the configuration and put every original back."""
        for patch in reversed(self._patches):
            owner, name = patch.point.owner, patch.point.name
            if owner.__dict__.get(name) is patch.ours:
                setattr(owner, name, patch.original)
            else:
                # Somebody wrapped our wrapper. It passes through while nothing is active, so it may stay.
                logger.warning("%s.%s was patched again by other code and stays so", owner.__name__, name)
        self._patches.clear()
        self.config = None
        self.enabled = None

    @property
    def accelerator_config(self) -> ZeroConfig | None:
        """The configuration that an Accelerator made by user code right now has to take."""
        return None if self._held_back else self.enabled

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Accelerators made inside are left alone: a Trainer attaches its own, with its arguments."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1

    def _open(self) -> None:
        if self._patches:
            return
        patch_points = all_patch_points()
        check_patch_points(patch_points)
        for point in patch_points:
            original = point.owner.__dict__[point.name]
            ours = functools.wraps(_plain(original))(point.wrap(_plain(original)))
            if isinstance(original, staticmethod | classmethod):
                ours = type(original)(ours)  # type: ignore[assignment]
            setattr(point.owner, point.name, ours)
            self._patches.append(_Patch(point, original, ours))


# One per process, because what it patches is one per process.
ACTIVATION = Activation()


def enable(config: ZeroConfig | str | Path | Mapping[str, Any]) -> None:
    """Let unmodified transformers, TRL and accelerate code of this process run under ZeRO.

    Call it before the Trainer or Accelerator (and, for stage 3, the model) is made. A second call replaces the
    configuration.

    Args:
        config: Path of a JSON file, a dict, a JSON string, or a ZeroConfig.
    Raises:
        ConfigError: The configuration is wrong, accelerate was told to use DeepSpeed, or this version of
            transformers or accelerate lacks a patch point.
    """
    check_environment()
    adopt_cluster_variables()  # before accelerate looks at the environment
    ACTIVATION.activate(ZeroConfig.load(config), for_everyone=True)


class HfZeroConfig:
    """What from_pretrained and from_config follow, for scripts without a Trainer (DeepSpeed: HfDeepSpeedConfig).

    In force from when it is made, before the model is, until `disable` or the next configuration; it need not be kept.

    Args:
        config: Path of a JSON file, a dict, a JSON string, or a ZeroConfig.
    Raises:
        ConfigError: The configuration is wrong.
    """

    def __init__(self, config: ZeroConfig | str | Path | Mapping[str, Any]) -> None:
        self.config = ZeroConfig.load(config)
        ACTIVATION.activate(self.config, for_everyone=False)

    def is_zero3(self) -> bool:
        return self.config.stage == 3


def disable() -> None:
    """End what `enable` or `TrainingArguments(zero=...)` began: no active configuration, every original in place.

    Models and accelerators that already run under ZeRO go on doing so.
    """
    ACTIVATION.deactivate()


def active_config() -> ZeroConfig | None:
    """The active configuration, or None."""
    return ACTIVATION.config


def check_patch_points(patch_points: list[PatchPoint]) -> None:
    """Raise if a method that we act through is not there or takes other arguments.

    Raises:
        ConfigError: Names every such method and the installed versions.
    """
    problems = [problem for point in patch_points if (problem := point.problem()) is not None]
    if problems:
        installed = ", ".join(f"{name} {version(name)}" for name in ("transformers", "accelerate"))
        listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, start=1))
        raise ConfigError(
            f"hf_zero does not fit the installed {installed}:\n{listed}\n"
            'Install the versions that hf_zero was written for: pip install "transformers>=5.23,<5.24" '
            '"accelerate>=1.15,<1.16".'
        )


def all_patch_points() -> list[PatchPoint]:
    """Every method of transformers and accelerate that ours wraps."""
    # Here, because these modules import this one for the active configuration.
    from hf_zero.hf.accelerator.plugin import accelerator_patch_points
    from hf_zero.hf.models.patches import model_patch_points
    from hf_zero.hf.trainer.trainer import trainer_patch_points

    return [*trainer_patch_points(), *accelerator_patch_points(), *model_patch_points()]
