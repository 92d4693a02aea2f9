"""A script hands its command line, its data and its surroundings to `initialize`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import hf_zero
from hf_zero.extras.launcher.node import free_port
from tests.harness.launches import bare_environment, write_script
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--local_rank", type=int, default=-1)
    added = hf_zero.add_config_arguments(made)
    assert added is made
    return made


def start(args: Any = None, **more: Any) -> Any:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hf_zero.initialize(args=args, model=model, optimizer=optimizer, **more)


@pytest.mark.parametrize("option", ["--zero", "--zero_config", "--deepspeed_config", "--deepscale_config"])
def test_the_configuration_comes_from_the_command_line(option: str, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(CONFIG))
    args = parser().parse_args(["--deepspeed", option, str(path)])
    assert args.deepspeed is True and args.local_rank == -1
    engine, *_ = start(args)
    assert engine.config.stage == 2 and engine.config.train_micro_batch_size_per_gpu == 4
    assert args.local_rank == 0  # DeepSpeed sets it too


def test_options_that_the_script_adds_itself() -> None:
    """Each script of DeepSpeed's documents adds --deepspeed_config by itself."""
    args = argparse.Namespace(deepspeed_config=json.dumps(CONFIG), local_rank=0)
    assert start(args)[0].config.stage == 2
    assert start(config_params=CONFIG)[0].config.stage == 2


def test_one_configuration_only() -> None:
    args = parser().parse_args(["--deepspeed_config", json.dumps(CONFIG)])
    with pytest.raises(hf_zero.ConfigError, match=r"2 configurations, by args\.deepspeed_config and config="):
        start(args, config=CONFIG)
    with pytest.raises(hf_zero.ConfigError, match="config= and config_params="):
        start(config=CONFIG, config_params=CONFIG)
    args = parser().parse_args(["--zero", "{}", "--deepspeed_config", "{}"])
    with pytest.raises(hf_zero.ConfigError, match=r"args\.zero and args\.deepspeed_config"):
        start(args)
    with pytest.raises(hf_zero.ConfigError, match=r"needs a configuration(.|\n)*add_config_arguments"):
        start(parser().parse_args(["--deepspeed"]))


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_other_parallelism_is_refused(name: str) -> None:
    with pytest.raises(hf_zero.ConfigError, match=rf"initialize\({name}=\.\.\.\)"):
        start(config=CONFIG, **{name: object()})


def share_of(drop_last: bool, samples: int) -> tuple[list[float], int, list[int]]:
    """The samples that this rank sees in an epoch, the length of its loader, and the sizes of its batches."""
    data = TensorDataset(torch.arange(float(samples)))

    def collate(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([row[0] for row in rows]) + 0.5

    config = {**CONFIG, "dataloader_drop_last": drop_last}
    loader = start(config=config, training_data=data, collate_fn=collate)[2]
    batches = list(loader)
    return [float(x) - 0.5 for batch in batches for x in batch], len(loader), [len(batch) for batch in batches]


def test_training_data_is_dealt_out() -> None:
    shares = run_ranks(share_of, 2, False, 24)
    assert sorted(shares[0][0] + shares[1][0]) == [float(i) for i in range(24)]
    assert shares[0][1:] == (3, [4, 4, 4])
    dropped = run_ranks(share_of, 2, True, 22)
    assert dropped[0][1:] == (2, [4, 4])
    assert len({*dropped[0][0], *dropped[1][0]}) == 16


def join(**arguments: Any) -> tuple[bool, int, str]:
    hf_zero.init_distributed(**arguments)
    hf_zero.init_distributed()  # a second call changes nothing
    dist.barrier()  # nobody leaves before the others have come
    return dist.is_initialized(), dist.get_world_size(), dist.get_backend()


def refuse() -> str:
    with pytest.raises(hf_zero.ConfigError) as caught:
        start(config=CONFIG, dist_init_required=False)
    with pytest.raises(hf_zero.ConfigError, match="dist_backend='nccl' needs a GPU"):
        hf_zero.init_distributed("nccl")
    assert not dist.is_initialized()
    return str(caught.value)


def test_init_distributed() -> None:
    assert run_ranks(join, 2, init_group=False) == [(True, 2, "gloo")] * 2
    assert run_ranks(join, 1, init_group=False, dist_backend="gloo", verbose=False) == [(True, 1, "gloo")]
    assert run_ranks(refuse, 1, init_group=False)[0].startswith("dist_init_required=False, but no process group")


ALONE = """
    import os, torch, hf_zero, torch.distributed as dist
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)  # no launcher
    assert not dist.is_initialized()
    losses = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        for _ in range(5):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        engine.teardown()
    assert dist.get_rank() == 0 and dist.get_world_size() == 1  # scripts ask, with or without a launcher
    assert len(set(losses)) == 1, losses
    print("done", losses[0])
"""


@pytest.mark.slow
def test_a_script_alone(tmp_path: Path) -> None:
    """Also twice at a time: no port is taken that the other one would need."""
    both = run_script(write_script(tmp_path, ALONE), folder=tmp_path, processes=2, instead=bare_environment())
    assert both.status == [0, 0], both.err
    assert all(out.startswith("done") for out in both.outs), both.outs


def test_the_local_rank_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    args = argparse.Namespace(local_rank=5, zero=CONFIG)
    start(args)
    assert args.local_rank == 0  # the launcher's word, not the default of the script's parser
    monkeypatch.delenv("LOCAL_RANK")
    for given, expected in ((-1, 0), (None, 0), (3, 3)):
        args = argparse.Namespace(local_rank=given, zero=CONFIG)
        start(args)
        assert args.local_rank == expected


OLD_LAUNCH = """
    import argparse, json, os, sys
    import torch
    import hf_zero

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    args = hf_zero.add_config_arguments(parser).parse_args()
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = hf_zero.initialize(args=args, model=model, optimizer=optimizer)[0]
    engine.backward(engine(torch.full((4, 2), float(engine.global_rank))).sum() / 4)
    engine.step()
    weight = engine.full_state_dict(keep=True)["weight"][0, 0].item()
    told = [engine.global_rank, engine.world_size, args.local_rank, "--local" in " ".join(sys.argv), weight]
    os.write(1, (json.dumps(told) + "\\n").encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], pytest.param(["--use-env"], marks=pytest.mark.nightly)])
def test_the_launcher_that_torch_had_first(option: list[str], tmp_path: Path) -> None:
    """The launcher `python -m torch.distributed.launch` gives --local-rank on the command line, or with --use-env does
    not.
    """
    script = write_script(tmp_path, OLD_LAUNCH, "old.py")
    line = [
        sys.executable,
        "-m",
        "torch.distributed.launch",
        *option,
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
    ]
    job = subprocess.run(
        [*line, str(script), "--zero", json.dumps(CONFIG)],
        env=bare_environment(ACCELERATE_USE_CPU="true"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    told = sorted(json.loads(text) for text in job.stdout.splitlines() if text.startswith("["))
    assert told == [[rank, 2, rank, not option, 0.75] for rank in range(2)]
