"""Processes that train together, and who sees them: launch lines as a user types them, and the error where accelerate
counts one process of several."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate import Accelerator, PartialState

import hf_zero
from tests.harness.at_night import all_at_night
from tests.harness.launches import bare_environment, write_script
from tests.harness.ranks import RankFailure, run_ranks
from tests.harness.versions import is_older
from tests.hf.runs import _tokenizer as tokenizer
from tests.hf.runs import build, zero_config

ROOT = Path(__file__).parents[2]
CONFIG = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}

# The script writes what it sees, and how many samples of the eight its rank had: one line of JSON to the log.
_BODY = """
    import json, os, torch, transformers
    from datasets import Dataset
    seen = []
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(1, 1)
        def forward(self, x, labels=None):
            seen.extend(x.view(-1).tolist())
            return {{"loss": (self.lin(x) - labels).pow(2).mean()}}
    {arguments}
    torch.manual_seed(0)
    data = Dataset.from_dict({{"x": [[float(i)] for i in range(8)], "labels": [[0.0]] * 8}})
    trainer = {trainer}(model=Net(), args=args, train_dataset=data)
    trainer.train()
    with open(f"saw-{{os.environ['RANK']}}.json", "w") as file:
        weight = trainer.model.lin.weight.item()
        json.dump([args.world_size, trainer.is_world_process_zero(), sorted(seen), weight], file)
"""
_SETTINGS = 'per_device_train_batch_size=2, max_steps=2, save_strategy="no", report_to="none", disable_tqdm=True'
PLAIN = _BODY.format(
    arguments=f'args = transformers.TrainingArguments("out", {_SETTINGS})', trainer="transformers.Trainer"
)
OURS = _BODY.format(
    arguments=(
        "import hf_zero; parser = transformers.HfArgumentParser(hf_zero.TrainingArguments); "
        "args, = parser.parse_args_into_dataclasses(); args.per_device_train_batch_size, args.max_steps = 2, 2"
    ),
    trainer="hf_zero.Trainer",
)


def readme_lines() -> list[str]:
    """The launch lines that README gives for a machine without a GPU."""
    block = re.search(r"other launchers.*?```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.split("  #")[0].strip() for line in block[1].splitlines() if line.strip()]


@pytest.mark.slow
@pytest.mark.parametrize("number", all_at_night(range(3), (0, 2)))  # each launcher
def test_launch_lines_of_the_readme(number: int, tmp_path: Path) -> None:
    """The lines run as printed, in a fresh shell on a machine without a GPU: two ranks that see each other, each with
    its half.
    """
    lines = readme_lines()
    assert len(lines) == 3, lines
    line = run_line(lines[number], tmp_path)
    ranks = [json.loads((tmp_path / f"saw-{rank}.json").read_text()) for rank in range(2)]
    assert [saw[:2] for saw in ranks] == [[2, True], [2, False]], line
    assert ranks[0][2] != ranks[1][2] and sorted(ranks[0][2] + ranks[1][2]) == [float(i) for i in range(8)], line
    assert ranks[0][3] == ranks[1][3]


def run_line(line: str, folder: Path) -> str:
    write_script(folder, PLAIN, "script.py")
    write_script(folder, OURS, "trainer.py")
    (folder / "zero3.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 3}}))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = bare_environment(PYTHONPATH=str(ROOT), PATH=path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    if library := os.environ.get("HF_ZERO_LIBRARY"):
        env["HF_ZERO_LIBRARY"] = library
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return line


# -------------------------------------------------------------------- one of several is all that accelerate sees
def arguments(**more: Any) -> dict[str, Any]:
    return {"per_device_train_batch_size": 2, "max_steps": 2, "report_to": "none", "save_strategy": "no", **more}


def unseen(entry: str, folder: str) -> None:
    if entry == "arguments":
        hf_zero.TrainingArguments(folder, zero=zero_config(2), **arguments())
    elif entry == "enable":
        import transformers

        hf_zero.enable(zero_config(2))
        transformers.Trainer(model=build(), args=transformers.TrainingArguments(folder, **arguments()))
    elif entry == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        hf_zero.enable(zero_config(2))
        args = SFTConfig(folder, bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, **arguments())
        data = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
        SFTTrainer(model=build(), args=args, train_dataset=data, processing_class=tokenizer())
    elif entry == "attach":
        hf_zero.ZeroPlugin({**CONFIG, "train_micro_batch_size_per_gpu": 2}).attach(Accelerator())
    else:
        PartialState()  # does not look at ACCELERATE_USE_CPU, which Accelerator does
        os.environ["ACCELERATE_USE_CPU"] = "true"
        hf_zero.enable({**CONFIG, "train_micro_batch_size_per_gpu": 2})
        Accelerator()


@pytest.mark.skipif(is_older("accelerate", "1.13"), reason="accelerate 1.12 counts them, where there is no GPU")
@pytest.mark.parametrize("entry", ["arguments", "enable", "sft", "attach", "partial state"])
def test_processes_that_accelerate_does_not_see(entry: str, tmp_path: Path) -> None:
    """Two ranks without --use_cpu on a machine without a GPU: each would train on everything."""
    failures = run_ranks(unseen, 2, entry, str(tmp_path), expect_error=True, init_group=False, timeout=60)
    remedy = "PartialState(cpu=True)" if entry == "partial state" else "--use_cpu"
    for failure in failures:
        assert isinstance(failure, RankFailure) and failure.kind == "ConfigError", failure
        for part in ("2 processes", "sees 1", "ACCELERATE_USE_CPU", remedy):
            assert part in failure.message


@pytest.mark.parametrize("entry", ["arguments", "enable"])
def test_deepspeed_chosen_by_accelerate(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is what `accelerate launch` sets for distributed_type: DEEPSPEED; accelerate itself would miss
    the package.
    """
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(hf_zero.ConfigError, match="distributed_type: MULTI_GPU"):
        unseen(entry, str(tmp_path))


def seen(folder: str, own_group: bool) -> tuple[int, int]:
    if own_group:
        dist.init_process_group("gloo")
    args = hf_zero.TrainingArguments(folder, zero=zero_config(2), **arguments(use_cpu=True))
    if dist.is_initialized():
        dist.barrier()  # rank 0 serves the store: it must not leave while the other one still joins
    return args.world_size, args.process_index


@pytest.mark.parametrize("own_group", [False, True])
def test_processes_that_are_seen(own_group: bool, tmp_path: Path) -> None:
    assert run_ranks(seen, 2, str(tmp_path), own_group, init_group=False) == [(2, 0), (2, 1)]
    assert run_ranks(seen, 1, str(tmp_path), own_group, init_group=False) == [(1, 0)]


def test_lines_of_the_recipes_name_the_cpu() -> None:
    """The launch lines of recipes and scripts, of torchrun and accelerate, say what a machine without a GPU needs.

    A script that joins its processes by hf_zero, or sets `use_cpu` itself, needs nothing.
    """
    told = re.compile(r"use_cpu|ACCELERATE_USE_CPU|\.\.\.$|nnodes")
    checked = 0
    for path in [*ROOT.glob("recipes/*/README.md"), *ROOT.glob("recipes/*/*.py")]:
        script = path.parent / "train.py"
        if not script.is_file() or re.search(r"hf_zero\.init|use_cpu=", script.read_text()):
            continue
        text = path.read_text().replace("\\\n", " ")
        for found in re.finditer(r"^.*\b(torchrun|accelerate launch) --.*train\.py.*$", text, re.MULTILINE):
            assert told.search(found[0]), f"{path}: {shlex.join([found[0]])}"
            checked += 1
    assert checked > 5
