"""Arithmetic alone says what stage 3 does with models of the sizes that people train: 8 GPUs that are not there.

Their embeddings and heads are most of `stage3_max_live_parameters`, or more, and their layers are more than "auto"
makes of `reduce_bucket_size`: neither may keep a layer from being gathered ahead, in one operation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed.work import Finish, Pending
from hf_zero.extras.estimate import plan, replay
from hf_zero.extras.estimate.pretend import PretendedComm
from hf_zero.runtime.prefetch import PrefetchLimits
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.unit import ShardUnit, UnitKind


@dataclass(frozen=True)
class Sizes:
    """The sizes of transformers' configuration, and millions of elements of embeddings and head together and of a
    layer.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    _: KW_ONLY
    tied: bool
    root: int
    layer: int

    def config(self) -> Any:
        from transformers import AutoConfig

        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        sizes = {name: getattr(self, name) for name in (*names, "head_dim", "vocab_size")}
        return AutoConfig.for_model(self.kind, tie_word_embeddings=self.tied, **sizes)


MODELS = {
    "Llama-2-7B": Sizes("llama", 4096, 11008, 32, 32, 32, 128, 32000, tied=False, root=262, layer=202),
    "Mistral-7B": Sizes("mistral", 4096, 14336, 32, 32, 8, 128, 32000, tied=False, root=262, layer=218),
    "Llama-3-8B": Sizes("llama", 4096, 14336, 32, 32, 8, 128, 128256, tied=False, root=1051, layer=218),
    "Qwen2.5-7B": Sizes("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, tied=False, root=1090, layer=233),
    "Qwen3-8B": Sizes("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, tied=False, root=1245, layer=193),
    "Gemma-2-9B": Sizes("gemma2", 3584, 14336, 42, 16, 8, 256, 256000, tied=True, root=918, layer=198),
    "Llama-3-70B": Sizes("llama", 8192, 28672, 80, 64, 8, 128, 128256, tied=False, root=2101, layer=856),
}
_OF_THE_MODEL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
KEYS: dict[str, dict[str, Any]] = {"default": {}, "auto": dict.fromkeys(_OF_THE_MODEL, "auto")}


def model_on_meta(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(MODELS[name].config())
    return model


class Notes:
    """The notes say what a replayed training does, in order: "all-gather of UNIT", "reduce-scatter of UNIT", "left
    UNIT".
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.units: dict[str, ShardUnit] = {}

    def comm(self) -> type[PretendedComm]:
        lines = self.lines

        class Noting(PretendedComm):
            def _begin(self, call: Callable[..., Any], what: str, finish: Finish = None) -> Pending:
                lines.append(what)
                return super()._begin(call, what, finish)

        return Noting

    def params(self) -> type[OnDemandParams]:
        notes = self

        class Leaving(OnDemandParams):
            def after_use(self, unit: ShardUnit) -> None:
                notes.units[unit.name] = unit
                notes.lines.append(f"left {unit.name}")
                super().after_use(unit)

            def hold(self, unit: ShardUnit) -> None:
                notes.units[unit.name] = unit
                super().hold(unit)

        return Leaving


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_gathered_ahead_in_one_operation(name: str, keys: str) -> None:
    model, notes = model_on_meta(name), Notes()
    zero = {"stage": 3, **KEYS[keys]}
    config = ZeroConfig.load({"bf16": {"enabled": True}, "zero_optimization": zero}).resolve(model=model, world_size=8)
    with (
        mock.patch.object(plan, "PretendedComm", notes.comm()),
        mock.patch.object(replay, "OnDemandParams", notes.params()),
    ):
        plan.plan_model(model, config)
    assert PrefetchLimits.of(config.zero).why_none_ahead(notes.units.values()) == ""
    root = next(unit for unit in notes.units.values() if unit.kind is UnitKind.ROOT)
    layers = [unit for unit in notes.units.values() if unit is not root]
    sizes = MODELS[name]
    assert len(layers) == sizes.num_hidden_layers
    assert [round(unit.numel / 1e6) for unit in (root, *layers)] == [sizes.root, *[sizes.layer] * len(layers)]

    assert all(flat.layout.num_buckets == 1 for unit in notes.units.values() for flat in unit.flats)

    steps = 3
    counts = Counter(line for line in notes.lines if line.startswith(("all-gather", "reduce-scatter")))
    kept_whole = Counter({what: n for what, n in counts.items() if what.rpartition(" of ")[2] not in notes.units})
    # The norms, if any are: reduced once in a step; a plan ends with one gather of what an update has changed.
    assert all(n == (steps if what.startswith("reduce") else 1) for what, n in kept_whole.items()), kept_whole
    for unit in notes.units.values():
        assert counts[f"all-gather of {unit.name}"] == (steps if unit is root else 2 * steps)
        assert counts[f"reduce-scatter of {unit.name}"] == steps
    starts = [number for number, line in enumerate(notes.lines) if line == f"all-gather of {root.name}"]
    last, names = notes.lines[starts[-1] :], [unit.name for unit in layers]
    turn = last.index(f"left {names[-1]}") + 1
    assert_gathered_ahead(last[:turn], names)
    assert_gathered_ahead(last[turn:], names[::-1])


def assert_gathered_ahead(lines: list[str], names: list[str]) -> None:
    for before, name in itertools.pairwise(names):
        assert lines.index(f"all-gather of {name}") < lines.index(f"left {before}"), name
