"""The lag device is late, finds the races that it is there for, and accepts what is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.ranks import run_ranks
from tests.lag import device

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

LAG = "lag"
COUNT = 64


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _on_lag(case: Callable[[], None]) -> None:
    device.enable()
    case()
    assert device.take_reports() == [], "a mistake that no call has raised, or that the case did not expect"


@contextmanager
def reported(*parts: str) -> Any:
    """Inside, a call raises or a mistake is noted whose text has all of `parts`."""
    with pytest.raises(RuntimeError) as caught:
        yield
        torch.accelerator.synchronize()
    assert all(part in str(caught.value) for part in parts), f"expected {parts} in: {caught.value}"
    assert len(device.take_reports()) == 1


def host(value: float = 1.0) -> torch.Tensor:
    return torch.full((COUNT,), value).pin_memory()


def side_copy(value: float, stream: torch.Stream) -> torch.Tensor:
    """A tensor of the current stream that `stream` fills with a copy from the host."""
    target = torch.empty(COUNT, device=LAG)
    with stream:
        target.copy_(host(value), non_blocking=True)
    return target


def is_poison(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all())


# ---------------------------------------------------------------- devices, streams, events
def devices_are_chosen_by_thread() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(LAG)
    assert torch.accelerator.device_count() == 4
    torch.accelerator.set_device_index(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert torch.accelerator.current_device_index() == 1
    assert torch.empty(1, device=LAG).device == torch.device(LAG, 1)
    assert torch.empty(1, device="lag:0").device == torch.device(LAG, 0)
    with pytest.raises(RuntimeError, match="no device"):
        torch.accelerator.set_device_index(4)


def streams_are_chosen_by_thread_and_device() -> None:
    first, other = torch.Stream(device="lag:0"), torch.Stream(device="lag:0")
    assert first != other
    default = torch.accelerator.current_stream()
    with first:
        assert torch.accelerator.current_stream() == first
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
        assert seen == [default]
        assert torch.accelerator.current_stream("lag:1") != first
        with other:
            assert torch.accelerator.current_stream() == other
        assert torch.accelerator.current_stream() == first
    assert torch.accelerator.current_stream() == default


def late_copy_is_seen_after_a_wait_only() -> None:
    side = torch.Stream(device=LAG)
    target = side_copy(3.0, side)
    assert device.queued_tasks() == 1
    assert is_poison(target + 0)
    torch.accelerator.current_stream().wait_stream(side)
    assert (target + 0).cpu().eq(3).all()
    assert device.queued_tasks() == 0


def event_is_waited_for_to_its_position() -> None:
    side, event = torch.Stream(device=LAG), torch.Event(device=LAG)
    assert event.query(), "never recorded"
    first = side_copy(1.0, side)
    event.record(side)
    second = side_copy(2.0, side)
    event.wait(torch.accelerator.current_stream())
    assert (first + 0).cpu().eq(1).all()
    assert is_poison(second + 0)
    side.synchronize()


def event_is_waited_for_through_another_stream() -> None:
    one, two = torch.Stream(device=LAG), torch.Stream(device=LAG)
    target = side_copy(5.0, one)
    two.wait_stream(one)
    torch.accelerator.current_stream().wait_event(two.record_event())
    assert (target + 0).cpu().eq(5).all()
    torch.accelerator.synchronize()


def query_is_late_and_comes_to_an_end() -> None:
    side = torch.Stream(device=LAG)
    target = side_copy(1.0, side)
    event = side.record_event()
    assert not event.query()
    assert not side.query() or event.query()
    assert event.query()
    torch.accelerator.current_stream().wait_event(event)
    del target


def early_runs_at_once() -> None:
    device.set_schedule("early")
    side = torch.Stream(device=LAG)
    target = side_copy(3.0, side)
    assert device.queued_tasks() == 0
    assert (target + 0).cpu().eq(3).all()
    side.synchronize()


def random_schedule_replays() -> None:
    def run(seed: int) -> list[int]:
        device.set_schedule(f"random:{seed}")
        side, queued, targets = torch.Stream(device=LAG), [], []
        for _ in range(24):
            targets.append(side_copy(1.0, side))
            queued.append(device.queued_tasks())
        side.synchronize()
        return queued

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    assert 0 in first
    assert max(first) > 0


# ---------------------------------------------------------------- operations
def mixed_devices_are_refused() -> None:
    there, here = torch.ones(3, device=LAG), torch.ones(3)
    for call in (
        lambda: there + here,
        lambda: here + there,
        lambda: there.add_(here),
        lambda: torch.cat([there, here]),
        lambda: torch._foreach_add([there], [torch.tensor(1.0).reshape(1)]),
        lambda: there + torch.ones(3, device="lag:1"),
        lambda: torch._fused_adamw_(
            *[[torch.ones(3, device=LAG)] for _ in range(4)],
            [],
            [torch.tensor(1.0)],
            lr=0.1,
            beta1=0.9,
            beta2=0.9,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        ),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            call()


def numbers_of_the_host_are_accepted() -> None:
    there = torch.ones(3, device=LAG)
    for result in (there * torch.tensor(2.0), torch.tensor(2.0) * there, there * 2, 2.0 * there):
        assert result.device == there.device
        assert result.dtype == torch.float32
        assert result.tolist() == [2, 2, 2]
    assert (torch.ones((), device=LAG) * 2.5).dtype == torch.float32
    assert there[torch.tensor([0, 2])].shape == (2,)


def views_share_memory() -> None:
    base = torch.zeros(4, 6, device=LAG)
    views = [base[1], base.t()[2], base.view(24)[3:7], base.reshape(2, 12), base.unfold(1, 2, 2), base.detach()]
    views += [
        *base.split(2),
        *base.unbind(1),
        base.expand(2, 4, 6)[0],
        base.as_strided((2,), (6,), 1),
        base.view(torch.int32),
    ]
    for view in views:
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    base[1].add_(1)
    base.t()[2].mul_(5)
    assert base.sum().item() == 5 + 5
    other = torch.empty(0, device=LAG)
    other.set_(base.untyped_storage(), 6, (6,), (1,))
    assert other.tolist() == base[1].tolist()
    other.set_(base)
    assert other.shape == (4, 6)


def storages_are_resized() -> None:
    tensor = torch.arange(8.0, device=LAG)
    storage = tensor.untyped_storage()
    storage.resize_(64)
    assert tensor.tolist() == list(range(8))
    before = torch.accelerator.memory_allocated()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() == before - 64
    with pytest.raises(RuntimeError, match="storage of size 0"):
        tensor + 1
    storage.resize_(32)
    assert is_poison(tensor)
    assert torch.empty(2, device=LAG).resize_(3, 5).shape == (3, 5)


def results_are_those_of_the_cpu() -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 8)
    y = x.to(LAG)
    for call in (
        lambda t: t.softmax(-1),
        lambda t: t @ t.t(),
        lambda t: t.to(torch.bfloat16).sum(0),
        lambda t: torch.cat([t, t]).sort(0)[0],
        lambda t: t.masked_fill(t > 0, 2.0),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.arange(3, device=t.device).repeat(2),
        lambda t: torch.where(t > 0, t, 0.0),
        lambda t: torch._foreach_norm([t, t + 1])[1],
        lambda t: nn.functional.layer_norm(t, (8,)),
        lambda t: nn.functional.group_norm(t, 2),
        lambda t: torch.isfinite(t).all(),
    ):
        assert torch.equal(call(y).cpu(), call(x))
    there, here = (
        nn.functional.scaled_dot_product_attention(t[None, None], t[None, None], t[None, None]) for t in (y, x)
    )
    torch.testing.assert_close(there.cpu(), here)  # the CPU's own kernel for it is not used
    torch.manual_seed(5)
    dropped = nn.functional.dropout(x, 0.5)
    torch.manual_seed(5)
    assert torch.equal(nn.functional.dropout(y, 0.5).cpu(), dropped)


def generators_have_a_state() -> None:
    generator = torch.Generator(device=LAG).manual_seed(4)
    assert generator.device.type == LAG
    state = generator.get_state()
    first = torch.rand(5, generator=generator, device=LAG)
    assert not torch.equal(torch.rand(5, generator=generator, device=LAG).cpu(), first.cpu())
    generator.set_state(state)
    assert torch.equal(torch.rand(5, generator=generator, device=LAG).cpu(), first.cpu())
    assert torch.equal(first.cpu(), torch.rand(5, generator=torch.Generator().manual_seed(4)))
    assert generator.device.type == LAG


# ---------------------------------------------------------------- copies
def host_sees_a_copy_after_its_own_wait_only() -> None:
    source, target = torch.ones(COUNT, device=LAG), host(0.0)
    target.copy_(source, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert is_poison(target)
    source + 0  # runs what is queued
    assert device.queued_tasks() == 0
    assert is_poison(target)
    other = torch.Stream(device=LAG)
    other.wait_event(event)
    assert is_poison(target), "a stream's wait is not the host's"
    event.synchronize()
    assert target.eq(1).all()


def host_sees_what_the_device_had_in_the_order_of_the_stream() -> None:
    source = torch.ones(COUNT, device=LAG)
    kept = source.to("cpu", non_blocking=True)
    assert kept.is_pinned()
    source.zero_()
    torch.accelerator.synchronize()
    assert kept.eq(1).all()


def wait_for_one_stream_is_not_a_wait_for_another() -> None:
    one, two = torch.Stream(device=LAG), torch.Stream(device=LAG)
    source, target = torch.ones(COUNT, device=LAG), host(0.0)
    one.wait_stream(torch.accelerator.current_stream())
    with one:
        target.copy_(source, non_blocking=True)
    two.synchronize()
    torch.accelerator.current_stream().synchronize()
    assert is_poison(target)
    two.wait_stream(one)
    two.synchronize()
    assert target.eq(1).all()


def host_writes_before_the_copy_are_reported() -> None:
    source, target = host(1.0), torch.empty(COUNT, device=LAG)
    target.copy_(source, non_blocking=True)
    with reported("a copy of 256 bytes from pinned memory", "test_device.py", "found in device.synchronize"):
        source.zero_()


def host_writes_before_it_knows_of_the_end_are_reported() -> None:
    source, target = host(1.0), torch.empty(COUNT, device=LAG)
    target.copy_(source, non_blocking=True)
    target + 0
    assert device.queued_tasks() == 0
    with reported("wrote to the source of a copy"):
        source.zero_()


def host_writes_after_its_wait_are_right() -> None:
    source, target = host(1.0), torch.empty(COUNT, device=LAG)
    target.copy_(source, non_blocking=True)
    torch.accelerator.current_stream().record_event().synchronize()
    source.zero_()
    torch.accelerator.synchronize()
    assert target.cpu().eq(1).all()


def pageable_copies_are_over_at_once() -> None:
    source = torch.ones(COUNT)
    target = torch.empty(COUNT, device=LAG)
    target.copy_(source, non_blocking=True)
    source.zero_()
    back = torch.empty(COUNT)
    back.copy_(target, non_blocking=True)
    assert back.eq(1).all()
    assert device.queued_tasks() == 0


def device_reads_what_it_has_written_to_the_host() -> None:
    source, between, target = torch.ones(COUNT, device=LAG), host(0.0), torch.empty(COUNT, device=LAG)
    between.copy_(source, non_blocking=True)
    target.copy_(between, non_blocking=True)
    between.copy_(target + 1, non_blocking=True)
    torch.accelerator.synchronize()
    assert target.cpu().eq(1).all()
    assert between.eq(2).all()


def copies_convert_on_the_way() -> None:
    source = host(1.5)
    target = torch.empty(COUNT, device=LAG, dtype=torch.bfloat16)
    target.copy_(source, non_blocking=True)
    back = torch.zeros(COUNT, dtype=torch.float64).pin_memory()
    back.copy_(target, non_blocking=True)
    assert is_poison(back)
    torch.accelerator.synchronize()
    assert back.eq(1.5).all()


def memory_is_pinned_in_place() -> None:
    tensor = torch.ones(COUNT)
    assert not tensor.is_pinned()
    with device.pinned(tensor):
        assert tensor.is_pinned()
        assert tensor[8:].is_pinned()
        with pytest.raises(RuntimeError, match="pinned already"), device.pinned(tensor[4:]):
            pass
    assert not tensor.is_pinned()
    assert host().is_pinned()
    with reported("unpinned under a copy of"), device.pinned(tensor):
        tensor.to(LAG, non_blocking=True)


# ---------------------------------------------------------------- memory
def fresh_memory_is_poison() -> None:
    assert is_poison(torch.empty(COUNT, device=LAG))
    assert is_poison(torch.empty(COUNT, device=LAG, dtype=torch.bfloat16))


def memory_freed_under_a_copy_is_reported() -> None:
    target = side_copy(1.0, torch.Stream(device=LAG))
    with reported("a block of 256 bytes", "stream 1 of lag:0", "nobody called record_stream"):
        del target


def memory_freed_under_an_operation_is_reported() -> None:
    tensor, side = torch.ones(COUNT, device=LAG), torch.Stream(device=LAG)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = tensor.sum()
    with reported("was freed while stream 1 of lag:0"):
        del tensor
    del total


def memory_is_freed_rightly() -> None:
    side = torch.Stream(device=LAG)
    target = side_copy(1.0, side)
    torch.accelerator.current_stream().wait_stream(side)
    del target
    target = side_copy(1.0, side)
    target.record_stream(side)
    del target
    target = side_copy(1.0, side)
    side.synchronize()
    del target
    with side:
        target = host().to(LAG, non_blocking=True)
    del target
    torch.accelerator.synchronize()


def memory_has_a_limit() -> None:
    before = torch.accelerator.memory_allocated()
    device.set_memory_limit(before + 1000)
    held = torch.empty(500, device=LAG, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=r"lag out of memory\. Tried to allocate 501 bytes on lag:0"):
        torch.empty(501, device=LAG, dtype=torch.uint8)
    torch.empty(501, device="lag:1", dtype=torch.uint8)
    del held
    torch.empty(1000, device=LAG, dtype=torch.uint8)
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 1000
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before


# ---------------------------------------------------------------- what the host waits for
def waits_of_the_host_are_counted() -> None:
    tensor, event = torch.ones(3, device=LAG), torch.Event(device=LAG)
    event.record()
    pinned = torch.ones(3).pin_memory()
    device.take_syncs()
    tensor.mul_(2).sum()
    torch.full((2,), 1.0, device=LAG)
    pinned.copy_(tensor, non_blocking=True)
    event.wait()
    assert device.take_syncs() == []
    for kind, call in {
        "item": lambda: tensor[0].item(),
        "copy": lambda: tensor.tolist(),
        "aten::nonzero": lambda: tensor[tensor > 0],
        "aten::equal": lambda: torch.equal(tensor, tensor),
        "event.synchronize": event.synchronize,
        "stream.synchronize": torch.accelerator.current_stream().synchronize,
        "device.synchronize": torch.accelerator.synchronize,
    }.items():
        call()
        syncs = device.take_syncs()
        assert [sync[0] for sync in syncs] == [kind]
        assert "test_device.py" in syncs[0][1]
        assert "waits_of_the_host_are_counted" in syncs[0][1]


# ---------------------------------------------------------------- a model
class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.norm(self.embed(ids))).flatten(0, 1), labels.flatten())


def _train(place: str, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Tiny().to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(2):
        loss = model(ids.to(place), ids.roll(step + 1).to(place))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in (*losses, *model.parameters())]


def model_trains_as_on_the_cpu() -> None:
    threads = set()
    probe = torch.ones(1, device=LAG, requires_grad=True)
    probe.register_hook(lambda grad: threads.add(threading.get_ident()))
    (probe * 2).sum().backward()
    assert threads
    assert threading.get_ident() not in threads, "autograd did not run in the device's thread"
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        for ours, theirs in zip(_train(LAG, options), _train("cpu", options), strict=True):
            assert torch.equal(ours, theirs), options


CASES = [
    devices_are_chosen_by_thread,
    streams_are_chosen_by_thread_and_device,
    late_copy_is_seen_after_a_wait_only,
    event_is_waited_for_to_its_position,
    event_is_waited_for_through_another_stream,
    query_is_late_and_comes_to_an_end,
    early_runs_at_once,
    random_schedule_replays,
    mixed_devices_are_refused,
    numbers_of_the_host_are_accepted,
    views_share_memory,
    storages_are_resized,
    results_are_those_of_the_cpu,
    generators_have_a_state,
    host_sees_a_copy_after_its_own_wait_only,
    host_sees_what_the_device_had_in_the_order_of_the_stream,
    wait_for_one_stream_is_not_a_wait_for_another,
    host_writes_before_the_copy_are_reported,
    host_writes_before_it_knows_of_the_end_are_reported,
    host_writes_after_its_wait_are_right,
    pageable_copies_are_over_at_once,
    device_reads_what_it_has_written_to_the_host,
    copies_convert_on_the_way,
    memory_is_pinned_in_place,
    fresh_memory_is_poison,
    memory_freed_under_a_copy_is_reported,
    memory_freed_under_an_operation_is_reported,
    memory_is_freed_rightly,
    memory_has_a_limit,
    waits_of_the_host_are_counted,
    model_trains_as_on_the_cpu,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_lag(case: Callable[[], None]) -> None:
    run_ranks(_on_lag, 1, case, init_group=False)
