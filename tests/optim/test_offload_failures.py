"""An error of offloading is said on every rank, at once, and loses nothing that was saved."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import OffloadError
from tests.harness.ranks import run_ranks

SIZE = 64


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def start(folder: str, optimizer: Any = torch.optim.AdamW, *, param: str = "none", **offload: Any) -> ZeroEngine:
    torch.manual_seed(0)
    model = Net()
    block = {"device": "nvme", "nvme_path": folder}
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {**block, **offload},
        "offload_param": {**block, "device": param, "max_in_cpu": 0},
    }
    config = {"zero_optimization": zero, "gradient_clipping": 1.0, "desync_timeout": 60}
    return hf_zero.initialize(model=model, optimizer=optimizer(model.parameters(), lr=1e-3), config=config)[0]


def steps(engine: ZeroEngine, count: int) -> None:
    for step in range(count):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(2, SIZE)))
        engine.step()
    engine.finish_updates()


def swap_files(folder: str, rank: int) -> list[Path]:
    return sorted(Path(folder).glob(f"hf_zero_swap/*/rank-{rank:05d}/*.swap"))


def fails_on_every_rank(function: Any, *args: Any, kind: str, said: list[str], world_size: int = 2) -> None:
    failures = run_ranks(function, world_size, *args, timeout=40, expect_error=True)
    for rank, failure in enumerate(failures):
        assert failure.kind == kind, f"rank {rank}: {failure}"
        for text in said:
            assert text in failure.message, f"rank {rank}: {failure.message}"


# -------------------------------------------------------------------- at the start
def start_on_one_bad_path(good: str, bad: str) -> None:
    start(bad if os.environ["RANK"] == "1" else good)


def test_a_path_that_one_rank_cannot_use(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fails_on_every_rank(
        start_on_one_bad_path,
        str(tmp_path),
        str(blocked / "below"),
        kind="OffloadError",
        said=["rank 1: ", str(blocked), "Not a directory"],
    )


def start_on_a_full_disk(folder: str, device: str, param: str) -> None:
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    start(folder, param=param, device=device)


@pytest.mark.parametrize(("device", "param"), [("nvme", "none"), ("none", "nvme")])
def test_a_disk_that_is_full_at_the_start(device: str, param: str, tmp_path: Path) -> None:
    """Space is reserved before the first step, so that is when a rank says so."""
    fails_on_every_rank(
        start_on_a_full_disk,
        str(tmp_path),
        device,
        param,
        kind="OffloadError",
        said=["rank 1", str(tmp_path), "File too large", "bytes"],
    )


def start_with(name: str, folder: str, config: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "amsgrad": lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True),
    }
    start(folder, kinds[name], **config)


@pytest.mark.parametrize(("name", "said"), [("sgd", "torch.optim.sgd.SGD"), ("amsgrad", "amsgrad=True")])
def test_an_optimizer_that_cannot_be_served(name: str, said: str, tmp_path: Path) -> None:
    for device in ("cpu", "nvme"):
        fails_on_every_rank(
            start_with,
            name,
            str(tmp_path),
            {"device": device},
            kind="ConfigError",
            said=[said, '"zero_force_ds_cpu_optimizer": false', "AdamW"],
        )


def start_without_library(folder: str) -> None:
    os.environ["HF_ZERO_LIBRARY"] = "/nowhere/libhf_zero_native.so"
    from hf_zero.native.library import library

    library.cache_clear()
    start(folder, device="cpu")


def test_without_the_native_library(tmp_path: Path) -> None:
    fails_on_every_rank(start_without_library, str(tmp_path), kind="NativeError", said=["/nowhere", "pip install"])


# -------------------------------------------------------------------- in the middle of a run
def damage(folder: str, what: str, param: str) -> None:
    engine = start(folder, param=param, fast_init=True, buffer_count=1)
    steps(engine, 2)
    engine.save_checkpoint(folder + "/checkpoint")
    if engine.rank == 1:
        files = swap_files(folder, 1)
        assert files
        for path in files:
            if what == "removed":
                path.unlink()
            elif what == "truncated":
                os.truncate(path, 4096)
            else:  # no file of this process may grow, or be written, beyond this size: as on a full disk
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    torch.distributed.barrier()
    steps(engine, 3)


def resume(folder: str) -> int:
    engine = start(folder)
    engine.load_checkpoint(folder + "/checkpoint")
    steps(engine, 1)
    count = engine.global_steps
    engine.teardown()
    return count


def damage_and_stay(folder: str) -> None:
    """Fail like a notebook's cell: the error is caught, and the process lives on with what it has."""
    with pytest.raises(OffloadError) as caught:
        damage(folder, "removed", "nvme")
    store = torch.distributed.distributed_c10d._get_default_store()
    store.add("heard", 1)
    deadline = time.monotonic() + 15
    while store.add("heard", 0) < torch.distributed.get_world_size():
        assert time.monotonic() < deadline, "another rank still waits"
        time.sleep(0.05)
    raise caught.value


def test_a_third_rank_hears_of_it_while_the_others_live_on(tmp_path: Path) -> None:
    fails_on_every_rank(damage_and_stay, str(tmp_path), kind="OffloadError", said=["rank 1", "removed"], world_size=3)


@pytest.mark.parametrize("param", ["none", "nvme"])
@pytest.mark.parametrize(
    ("what", "said"), [("removed", "removed"), ("truncated", "was truncated to"), ("full", "File too large")]
)
def test_a_file_that_fails_in_the_middle(what: str, said: str, param: str, tmp_path: Path) -> None:
    """Every rank says which file of which rank; the last checkpoint is whole; the next run sweeps what is left."""
    fails_on_every_rank(
        damage, str(tmp_path), what, param, kind="OffloadError", said=["rank 1", str(tmp_path), ".swap", said]
    )
    assert run_ranks(resume, 2, str(tmp_path), timeout=40) == [3, 3]
    assert not list(tmp_path.glob("hf_zero_swap/*/*/*"))
