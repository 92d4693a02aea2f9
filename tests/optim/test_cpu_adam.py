"""CPUAdam as a torch optimizer: torch's numbers and habits, its own precision, and clear refusals."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import ConfigError, NativeError, StateError
from hf_zero.native.library import LIBRARY_VARIABLE, library
from hf_zero.optim import CPUAdam

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 31), nn.GELU(), nn.LayerNorm(31), nn.Linear(31, 7)).to(dtype)


def groups(model: nn.Module, **first: Any) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, **first}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 3e-3}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        inputs = torch.randn(8, 13, generator=generator).to(dtype)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_near(ours: nn.Module, theirs: nn.Module, rtol: float = 1e-6) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert (a - b).abs().max() <= rtol * b.abs().max(), name


def assert_equal_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    first, second = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert first.keys() == second.keys() and first
    for number in first:
        assert first[number].keys() == second[number].keys()
        for name, value in first[number].items():
            assert value.dtype == second[number][name].dtype, name
            assert torch.equal(value, second[number][name]), name


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("adamw_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_trains_as_torch(adamw_mode: bool, dtype: torch.dtype, maximize: bool) -> None:
    ours, theirs = make_model(dtype), make_model(dtype)
    hyper: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05, "maximize": maximize}
    optimizer = CPUAdam(groups(ours, weight_decay=0.2), adamw_mode=adamw_mode, **hyper)
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    reference = kind(groups(theirs, weight_decay=0.2), **hyper)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step) for o in (optimizer, reference)]
    before = make_model(dtype)
    for round_ in range(4):
        for model, opt, scheduler in zip((ours, theirs), (optimizer, reference), schedulers, strict=True):
            train(model, opt, steps=5, seed=round_)
            scheduler.step()
    # Gradients of the two runs drift apart with their parameters, so fp32 is a little looser than one update is.
    assert_near(ours, theirs, 1e-5 if dtype == torch.float32 else 1e-12)
    assert (ours[0].weight - before[0].weight).abs().max() > 1e-2, "vacuous: nothing was learnt"
    mine, their = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert all(mine[number].keys() == their[number].keys() for number in their)
    assert mine[0]["step"].dtype == torch.float32 and mine[0]["step"].shape == () and mine[0]["step"] == 20


@pytest.mark.parametrize("grad_type", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_parameters_are_copies_of_an_fp32_master(dtype: torch.dtype, grad_type: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(5, 103).to(dtype)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours.grad_dtype = None  # gradients of any type may be assigned
    optimizer, reference = CPUAdam([ours], lr=1e-4), torch.optim.AdamW([theirs], lr=1e-4, weight_decay=0.0)
    for _ in range(20):
        ours.grad = torch.randn(5, 103).to(grad_type)
        theirs.grad = ours.grad.float()
        optimizer.step()
        reference.step()
    state = optimizer.state[ours]
    assert state["master"].dtype == state["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(state["master"], theirs.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(ours, state["master"].to(dtype))
    assert (state["master"] != ours).any(), "vacuous: the master is no finer than the parameter"


def test_bf16_moments() -> None:
    ours, exact = make_model(), make_model()
    optimizer, reference = CPUAdam(ours.parameters(), fp32_optimizer_states=False), CPUAdam(exact.parameters())
    train(ours, optimizer, steps=50)
    train(exact, reference, steps=50)
    assert {t.dtype for s in optimizer.state.values() for n, t in s.items() if n != "step"} == {torch.bfloat16}
    for a, b, start in zip(ours.parameters(), exact.parameters(), make_model().parameters(), strict=True):
        assert (a - b).norm() < 0.1 * (b - start).norm()
    double = CPUAdam(make_model(torch.float64).parameters(), fp32_optimizer_states=False)
    train(make_model(torch.float64), double, steps=1)


@pytest.mark.parametrize("narrow_states", [False, True], ids=["fp32-states", "bf16-states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_state_dict_goes_on_bit_for_bit(dtype: torch.dtype, narrow_states: bool) -> None:
    def new(model: nn.Module) -> CPUAdam:
        return CPUAdam(groups(model, lr=0.1), weight_decay=0.1, fp32_optimizer_states=not narrow_states)

    model = make_model(dtype)
    optimizer = new(model)
    train(model, optimizer, steps=3)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    again = make_model(dtype)
    again.load_state_dict(saved["model"])
    resumed = new(again)
    seen: list[int] = []
    resumed.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    resumed.load_state_dict(saved["optimizer"])
    assert seen == [6]
    assert_equal_state(resumed, optimizer)
    train(model, optimizer, steps=3, seed=2)
    train(again, resumed, steps=3, seed=2)
    assert_equal_state(resumed, optimizer)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_states_of_torch_load() -> None:
    ours, theirs = make_model(), make_model()
    reference = torch.optim.AdamW(groups(theirs, lr=0.1), weight_decay=0.1, betas=(0.8, 0.9))
    train(theirs, reference, steps=5)
    ours.load_state_dict(theirs.state_dict())
    optimizer = CPUAdam(groups(ours))
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 3e-3]
    train(ours, optimizer, steps=10, seed=2)
    train(theirs, reference, steps=10, seed=2)
    assert_near(ours, theirs, 1e-5)
    refused = torch.optim.AdamW(make_model().parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="amsgrad"):
        CPUAdam(make_model().parameters()).load_state_dict(refused.state_dict())


def test_copies_and_pickles_go_on() -> None:
    model = make_model()
    optimizer = CPUAdam(model.parameters(), weight_decay=0.1)
    train(model, optimizer, steps=2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, steps=2, seed=3)
    train(twin, twin_optimizer, steps=2, seed=3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_no_bias_correction_is_what_it_says() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([parameter], lr=0.1, betas=(0.9, 0.99), eps=0.0, bias_correction=False)
    parameter.grad = torch.tensor([1.0, -2.0, 4.0])
    optimizer.step()
    # The step is lr * (0.1 g) / sqrt(0.01 g * g) = lr * sign(g).
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9, 1.1, 0.9]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_memory_layout(dtype: torch.dtype) -> None:
    """Transposed, channels_last and strided parameters, with gradients of a layout of their own."""
    torch.manual_seed(0)
    starts = [
        torch.randn(6, 5).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(10, 4).to(dtype)[::2],
        torch.randn(()),
        torch.randn(0, 3),
    ]
    layouts = [nn.Parameter(start.to(dtype)) for start in starts]
    plain = [nn.Parameter(start.to(dtype).clone(memory_format=torch.contiguous_format)) for start in starts]
    before = [parameter.detach().clone() for parameter in plain]
    assert not any(parameter.is_contiguous() for parameter in layouts[:3])
    for parameters in (layouts, plain):
        torch.manual_seed(1)
        optimizer = CPUAdam(parameters, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(dtype)
            optimizer.step()
    for a, b, start in zip(layouts, plain, before, strict=True):
        assert torch.equal(a, b)
        assert not a.numel() or (a - start).abs().max() > 0.1


def test_closure_hooks_and_parameters_without_gradient() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([used, unused], lr=torch.tensor(0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> torch.Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert calls == ["before", "closure", "after"]
    torch.testing.assert_close(used.detach(), torch.full((3,), 0.9))
    assert torch.equal(unused, torch.ones(3)) and unused not in optimizer.state


def test_autograd_notices_the_update() -> None:
    """The optimizer does what torch's optimizers do: backward through a graph that saved the old values is
    an error.
    """
    weight = nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([weight])
    weight.grad = torch.ones(3)
    loss = (weight * weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lr": -1.0}, "lr=-1.0: expected 0 or more"),
        ({"lr": float("nan"), "eps": -1}, "lr=nan: expected 0 or more; eps=-1"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"amsgrad": True}, "use torch.optim.AdamW"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_values_are_named(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match="CPUAdam: ") as caught:
        CPUAdam([nn.Parameter(torch.ones(2))], **values)
    assert text in str(caught.value)
    optimizer = CPUAdam([nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **values})
    assert len(optimizer.param_groups) == 1


def test_parameters_it_cannot_update_are_named() -> None:
    good = nn.Parameter(torch.ones(2))
    good.grad = torch.ones(2)
    elsewhere = nn.Parameter(torch.ones(3, 4, device="meta"))
    elsewhere.grad = torch.ones(3, 4, device="meta")
    complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    complex_.grad = torch.ones_like(complex_)
    sparse = nn.Parameter(torch.ones(2, 2))
    sparse.grad = torch.ones(2, 2).to_sparse()
    for bad, error, text in (
        (elsewhere, ConfigError, r"parameter 1 of group 0 \[3, 4\] is on meta(.|\n)*offload_optimizer"),
        (complex_, ConfigError, "parameter 1 of group 0: its type is torch.complex64"),
        (sparse, StateError, "parameter 1 of group 0 is torch.sparse_coo: use torch.optim.SparseAdam"),
    ):
        optimizer = CPUAdam([good, bad])
        with pytest.raises(error, match=text):
            optimizer.step()
        assert torch.equal(good, torch.ones(2)), "a step that fails must change nothing"


def test_without_the_library_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.native import adam

    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = CPUAdam([parameter])
    optimizer.step()
    value = parameter.detach().clone()
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nonexistent")
    for cached in (library, adam._function):
        cached.cache_clear()
    try:
        with pytest.raises(NativeError, match="pip install"):
            optimizer.step()
    finally:
        monkeypatch.undo()
        for cached in (library, adam._function):
            cached.cache_clear()
    assert torch.equal(parameter, value) and optimizer.state[parameter]["step"] == 1
    optimizer.step()
    assert not torch.equal(parameter, value)
