"""TrainingArguments with `zero`: the configuration beside the arguments that its "auto" values come from."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeVar

import transformers

from hf_zero.config import ZeroConfig
from hf_zero.distributed.processes import prepare_to_be_joined
from hf_zero.errors import ConfigError
from hf_zero.hf.conflicts import check_environment, check_rivals, check_run
from hf_zero.hf.enable import activate

_Arguments = TypeVar("_Arguments", bound=transformers.TrainingArguments)

# HfArgumentParser takes the second of three types for the command line.
_FIELD_TYPE = dict[str, Any] | str | None
_HELP = (
    "Train under ZeRO: the path of a JSON file in DeepSpeed's schema, or the JSON itself (a dict in Python). "
    '"auto" values are taken from the other arguments and the model.'
)


class ZeroArgumentsMixin:
    """Gives a TrainingArguments class the field `zero`: the configuration is checked and made the active one.

    Raises:
        ConfigError: When the arguments are made, on every rank: all problems of the configuration, and every
            difference to the arguments.
    """

    zero: Any

    def __post_init__(self) -> None:
        if isinstance(self.zero, os.PathLike):
            self.zero = os.fspath(self.zero)
        if self.zero is None:
            _refuse_deepspeed(getattr(self, "deepspeed", None))
            super().__post_init__()  # type: ignore[misc]
            return
        # Problems of the file are kept, to be reported together with what it contradicts in the arguments.
        config = ZeroConfig.load(self.zero, defer=True)
        check_rivals(config, self)
        check_environment()
        prepare_to_be_joined()  # by accelerate, which looks at the environment
        super().__post_init__()  # type: ignore[misc]
        check_run(config, self)
        self._zero_config = config
        activate(config, for_everyone=False)

    @property
    def zero_config(self) -> ZeroConfig | None:
        """The configuration that `zero` names, or None."""
        if self.zero is not None and "_zero_config" not in self.__dict__:
            self._zero_config = ZeroConfig.load(self.zero)
        return self.__dict__.get("_zero_config")

    def __getstate__(self) -> dict[str, Any]:
        # training_args.bin holds what the user gave, nothing of hf_zero's own.
        return {name: value for name, value in self.__dict__.items() if name != "_zero_config"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__module__ != __name__:
            return super().__reduce_ex__(protocol)
        return TrainingArguments._blank, (type(self).__bases__[-1],), self.__getstate__()

    @classmethod
    def _blank(cls, base: type[Any]) -> Any:
        """Make an instance for pickle. A class made by zero_arguments has no name, so it is made again from `base`."""
        return object.__new__(zero_arguments(base))


def _refuse_deepspeed(given: Any) -> None:
    """Raise where the configuration was left in the argument that has transformers look for DeepSpeed."""
    if given is not None:
        name = given if isinstance(given, str) else "..."
        raise ConfigError(
            "TrainingArguments.deepspeed is given, but zero is not: hf_zero takes the configuration as zero.\n"
            f"Write zero={name!r} instead of deepspeed={name!r} (--zero instead of --deepspeed on a command line). "
            "A program that keeps deepspeed= takes the TrainingArguments of transformers, under hf-zero launch "
            "--as-deepspeed (or with DeepSpeed itself)."
        )


@dataclasses.dataclass(repr=False)
class TrainingArguments(ZeroArgumentsMixin, transformers.TrainingArguments):
    """transformers.TrainingArguments with `zero`.

    Args:
        zero (`dict` or `str`, *optional*): A configuration in DeepSpeed's schema: path, dict or JSON string.
    """

    zero: dict[str, Any] | str | None = dataclasses.field(default=None, metadata={"help": _HELP})


@dataclasses.dataclass(repr=False)
class Seq2SeqTrainingArguments(ZeroArgumentsMixin, transformers.Seq2SeqTrainingArguments):
    """transformers.Seq2SeqTrainingArguments with `zero`.

    Args:
        zero (`dict` or `str`, *optional*): A configuration in DeepSpeed's schema: path, dict or JSON string.
    """

    zero: dict[str, Any] | str | None = dataclasses.field(default=None, metadata={"help": _HELP})


# Base -> its class with `zero`; zero_arguments adds to them.
_MADE: dict[type[Any], type[Any]] = {one.__bases__[1]: one for one in (TrainingArguments, Seq2SeqTrainingArguments)}


def zero_arguments(base: type[_Arguments]) -> type[_Arguments]:
    """`base`, a dataclass of training arguments such as trl's SFTConfig, with `zero`. Equal for equal `base`."""
    if issubclass(base, ZeroArgumentsMixin):
        return base
    if base not in _MADE:
        _MADE[base] = dataclasses.make_dataclass(
            f"Zero{base.__name__}",
            [("zero", _FIELD_TYPE, dataclasses.field(default=None, metadata={"help": _HELP}))],
            bases=(ZeroArgumentsMixin, base),
            namespace={"__doc__": base.__doc__, "__module__": __name__},
            repr=False,
        )
    return _MADE[base]


# A pickle (training_args.bin) names the place where they are exported, not this file. HfArgumentParser looks there for
# the names in an annotation, so it is given as what it stands for.
for _exported in (TrainingArguments, Seq2SeqTrainingArguments):
    _exported.__module__ = "hf_zero"
    _exported.__annotations__["zero"] = _FIELD_TYPE
