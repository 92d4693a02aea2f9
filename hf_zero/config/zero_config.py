"""ZeroConfig: a configuration that was read and checked, to be resolved against arguments, model and world size."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from hf_zero.config.cross_checks import GROUP
from hf_zero.config.parse import Parsed, parse
from hf_zero.config.problems import Problem, Problems, raise_all
from hf_zero.config.resolve import Outcome, Surroundings, resolve
from hf_zero.config.resolved import ResolvedConfig
from hf_zero.config.schema import AUTO, look_up, put, section_of, show

# Blocks and keys of the file that decide where parameters are and how they are gathered.
_OF_PARAMETERS = ("zero_optimization", "aio", "desync_timeout", "gather_for_generation")
# Blocks and keys that decide the dtype of parameters.
_OF_TYPES = ("bf16", "bfloat16", "fp16", "keep_fp32")
_OF_OPTIMIZER = ("offload_optimizer", "cpu_offload")

_Section = TypeVar("_Section")
Source = str | os.PathLike[str] | Mapping[str, Any]


class ZeroConfig:
    """A configuration in DeepSpeed's schema.

    It is never changed: resolving twice, with other arguments or ranks, starts from the same file. Picklable.
    """

    def __init__(self, parsed: Parsed) -> None:
        self._parsed = parsed

    @classmethod
    def load(cls, source: Source | ZeroConfig, *, defer: bool = False) -> ZeroConfig:
        """Read a configuration from a path, a JSON string or a dict (which is copied), strictly.

        Args:
            defer: Keep problems of keys and values for `resolve`, which then raises them together with its own.
        Raises:
            ConfigError: A key or value is wrong (all problems are listed), there is no such file, or it is not JSON.
        """
        if isinstance(source, ZeroConfig):
            return source
        config = cls(parse(source))
        if config._parsed.problems and not defer:
            raise_all(config.source, config.check())
        return config

    @property
    def source(self) -> str:
        """The place that it came from, for messages: a path, "a dict" or "a JSON string"."""
        return self._parsed.source

    @property
    def raw(self) -> dict[str, Any]:
        """The configuration as the user gave it (a copy)."""
        return copy.deepcopy(self._parsed.raw)

    @property
    def values(self) -> dict[str, Any]:
        """The values under canonical names and types, "auto" included (a copy). They load as the file does."""
        return copy.deepcopy(self._parsed.values)

    @property
    def stage(self) -> int:
        """The ZeRO stage, which needs no resolving."""
        stage = self.get("zero_optimization.stage")
        return stage if isinstance(stage, int) else 0

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded between their uses: stage 3."""
        return self.stage == 3

    @property
    def desync_timeout(self) -> float:
        """Seconds after which a rank that waits for others gives up, which needs no resolving."""
        return float(self.get("desync_timeout", ResolvedConfig.desync_timeout))

    def section(self, block: str, kind: type[_Section]) -> _Section:
        """A block without "auto", in the form that is declared beside the class that obeys it; not resolved."""
        return section_of(kind, block, lambda path: look_up(self._parsed.values, path))

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path as the file has it ("auto" included), under canonical names and types."""
        return copy.deepcopy(look_up(self._parsed.values, path, default))

    def check(self) -> list[Problem]:
        """Every problem that the file has by itself: wrong keys and values, contradictions, what is not supported."""
        return list(self.alone().problems)

    def alone(self) -> Outcome:
        """The outcome of the file by itself, with its problems or its notices."""
        return resolve(self._parsed, Surroundings(file_only=True))

    def outcome(self, args: Any = None, model: Any = None, world_size: int = 1, **others: Any) -> Outcome:
        """Resolve with the same arguments as `resolve`, for a caller that reports problems in its own way."""
        return resolve(self._parsed, Surroundings(args=args, model=model, world_size=world_size, **others))

    def problems(self, args: Any = None, model: Any = None, world_size: int = 1, **others: Any) -> list[Problem]:
        """The problems that `resolve` would raise for the same arguments."""
        return list(self.outcome(args, model, world_size, **others).problems)

    def resolve(
        self,
        args: Any = None,
        model: Any = None,
        world_size: int = 1,
        *,
        num_training_steps: int | None = None,
        client_optimizer: bool = False,
        client_scheduler: bool = False,
        makes_loader: bool | None = None,
    ) -> ResolvedConfig:
        """Fill in "auto" and defaults. No communication: ranks with the same inputs get the same result.

        Args:
            args: TrainingArguments or an object with some of their attributes; None in a plain loop.
            model: Only `model.config` and the shapes of `model.parameters()` are read.
            world_size: Number of ranks that share the data.
            num_training_steps: For schedulers; None takes args.max_steps where that is set.
            client_optimizer: The caller brings the optimizer, so an optimizer block needs no learning rate.
            client_scheduler: The caller brings the scheduler, or builds it later, so its block needs no numbers yet.
            makes_loader: hf_zero makes the loader of the data; None where that is not known.
        Raises:
            ConfigError: All problems at once, each with key, value, what was expected, and remedy.
        """
        outcome = self.outcome(
            args,
            model,
            world_size,
            num_training_steps=num_training_steps,
            client_optimizer=client_optimizer,
            client_scheduler=client_scheduler,
            makes_loader=makes_loader,
        )
        raise_all(self.source, outcome.problems)
        if outcome.config is None:
            raise AssertionError("a configuration without problems must resolve")
        return outcome.config

    def filled_in(self, values: Mapping[str, Any]) -> ZeroConfig:
        """A copy with `values` (dotted path -> value) instead of "auto", where the file says "auto"."""
        filled = copy.deepcopy(self._parsed.values)
        for path, value in values.items():
            if look_up(filled, path) == AUTO:
                put(filled, path, value)
        return ZeroConfig(dataclasses.replace(self._parsed, values=filled))

    def sharded_in(self, group: str | int) -> ZeroConfig:
        """A copy whose `sharding_group` is `group`, which a mesh of torch's gave.

        Raises:
            ConfigError: The file has another one.
        """
        given = self.get(GROUP)
        if given not in (None, AUTO, group):
            problems = Problems(self.source, self._parsed.lines)
            problems.add(GROUP, given, f"the mesh has {show(group)}: expected the same", "Leave one of the two out.")
            raise_all(self.source, problems.found)
        values = self.values
        put(values, GROUP, group)
        return ZeroConfig(dataclasses.replace(self._parsed, values=values))

    def for_parameters(self, *, types: bool = True) -> ZeroConfig:
        """A copy with the keys of parameters alone, without those of training: a model is loaded under it.

        Args:
            types: False leaves out the dtype: the caller chooses it.
        """
        names = (*_OF_PARAMETERS, *_OF_TYPES) if types else _OF_PARAMETERS
        kept = {name: value for name, value in self.raw.items() if name in names}
        zero = {name: value for name, value in kept.get("zero_optimization", {}).items() if name not in _OF_OPTIMIZER}
        return ZeroConfig.load({**kept, "zero_optimization": zero})

    def __repr__(self) -> str:
        return f"ZeroConfig({self.source}, stage={self.stage})"
