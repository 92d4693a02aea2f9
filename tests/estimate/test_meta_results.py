"""A remembered result on the meta device is what the operation itself gives; plans do not depend on remembering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hf_zero.config import ZeroConfig
from hf_zero.extras.estimate.meta_results import MetaResults
from hf_zero.extras.estimate.plan import plan_model
from hf_zero.extras.estimate.profile import measure
from hf_zero.extras.estimate.tracker import StorageTracker
from tests.estimate.test_estimate_plan import batch, llama

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def looks(result: Any) -> list[Any]:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [(one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes()) for one in tensors]


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "a product": (aten.mm.default, lambda: (meta(3, 4), meta(4, 5))),
    "another type": (aten.add.Tensor, lambda: (meta(3, 4), meta(4, dtype=torch.float64))),
    "strides are kept": (aten.mul.Tensor, lambda: (meta(4, 3).t(), 2)),
    "a number decides the type": (aten.mul.Tensor, lambda: (meta(3, dtype=torch.long), 2.5)),
    "several results": (aten.native_layer_norm.default, lambda: (meta(2, 5, 8), [8], None, None, 1e-5)),
    "in place": (aten.addcmul_.default, lambda: (meta(6), meta(6), meta(6))),
    "a view": (aten.view.default, lambda: (meta(6), [2, 3])),
    "a list": (aten.cat.default, lambda: ([meta(2, 3), meta(4, 3)],)),
    "a new tensor": (aten.full.default, lambda: ([2, 3], 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_gives_what_the_operation_gives(name: str) -> None:
    func, inputs = CALLS[name]
    kwargs = {"device": torch.device("meta")} if func is aten.full.default else {}
    results, expected = MetaResults(), looks(func(*inputs(), **kwargs))
    for _ in range(3):
        args = inputs()
        result = results.call(func, args, kwargs)
        assert looks(result) == expected
        shares = [one for one in args if isinstance(one, torch.Tensor) and one is result]
        assert bool(shares) == (name == "in place")
        if name == "a view":
            assert result.untyped_storage()._cdata == args[0].untyped_storage()._cdata


def test_numbers_of_other_types_are_other_calls() -> None:
    results = MetaResults()
    for number, dtype in ((2, torch.long), (2.0, torch.float32), (2, torch.long), (True, torch.long)):
        assert results.call(aten.mul.Tensor, (meta(3, dtype=torch.long), number), {}).dtype is dtype


def test_a_wrong_call_is_an_error_each_time() -> None:
    results = MetaResults()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            results.call(aten.add_.Tensor, (meta(3), meta(4)), {})


def test_values_are_computed() -> None:
    results = MetaResults()
    for number in (1.0, 2.0):
        assert results.call(aten.mul.Tensor, (torch.tensor(number), 3.0), {}).item() == 3 * number


@pytest.mark.parametrize(("func", "inputs"), [(aten.add.out, 2), (aten.sqrt.out, 1)])
@pytest.mark.parametrize("numel", [3, 0])  # 0: torch resizes it, each time
def test_an_operation_writes_to_the_tensor_it_is_given(func: Any, inputs: int, numel: int) -> None:
    results = MetaResults()
    for _ in range(3):
        out = meta(numel)
        assert results.call(func, [meta(3)] * inputs, {"out": out}) is out
        assert looks(out) == looks(meta(3))


class _Forgetful(MetaResults):
    """Calls every operation, as if nothing had been called alike before."""

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


@pytest.mark.parametrize("stage", [1, 3])
def test_plans_are_those_of_operations_that_all_ran(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }

    def plan() -> Any:
        model = llama().to("meta")
        config = ZeroConfig.load(raw).resolve(model=model, world_size=2)
        profile = measure(model, config, batch("meta"), on_host=False)
        return profile, plan_model(model, config, profile=profile)

    again = [plan(), plan()]
    monkeypatch.setattr(StorageTracker, "_results", _Forgetful())
    assert again == [plan()] * 2
