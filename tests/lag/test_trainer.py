"""Trainer on the lag device: the default optimizer, a save and a resume, with the CPU's numbers.

accelerate computes on the CPU where it does not know the kind of the accelerator (PartialState looks for CUDA, XPU,
Ascend's and others by name), and hf_zero goes with it. So these tests tell accelerate which device to take.
"""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

import hf_zero
from hf_zero.engine.engine import engine_of
from tests.harness.ranks import run_ranks
from tests.hf import runs
from tests.lag import device, group
from tests.lag.matrix_runs import digest, llama

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _train(stage: int, folder: str, place: str, resume: bool) -> dict[str, Any]:
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20}}
    zero |= {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    more = {
        "max_steps": 3,
        "save_strategy": "steps" if stage == 3 else "no",
        "save_steps": 2,
        "use_cpu": place == "cpu",
    }
    args = hf_zero.TrainingArguments(**runs.arguments(folder, **more), zero=zero)
    rows = [{name: [token % 23 for token in row[name]] for name in ("input_ids",)} for row in runs.examples(40, 1)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    trainer = hf_zero.Trainer(model=llama(), args=args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    engine = engine_of(trainer.model)
    assert engine is not None and engine.device.type == place and args.optim == "adamw_torch_fused"
    seen: dict[str, Any] = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    if stage == 3:
        trainer.model.save_pretrained(f"{folder}/weights", state_dict=None)  # as if it were not given
        seen["saved"] = digest(safetensors.torch.load_file(f"{folder}/weights/model.safetensors"))
    return seen | {"weights": digest(engine.full_state_dict(keep=True))}


def on_lag(stage: int, folder: str, resume: bool) -> dict[str, Any]:
    device.enable()
    group.register()
    _tell_accelerate()
    seen = _train(stage, folder, "lag", resume)
    torch.accelerator.synchronize()
    assert device.take_reports() == []
    return seen


def _tell_accelerate() -> None:
    """Make it take this rank's device, as it takes an Ascend one."""

    def set_device(self: PartialState) -> None:
        self.device = torch.device(device.NAME, self.local_process_index)
        torch.accelerator.set_device_index(self.local_process_index)

    PartialState._prepare_backend = lambda *_, **__: (group.NAME, DistributedType.MULTI_NPU)
    PartialState.set_device = set_device


@pytest.mark.parametrize("stage", [2, 3])
def test_trainer(stage: int, tmp_path: Any) -> None:
    """Stage 2 saves nothing: safetensors takes no tensor of a device that torch has no DLPack number for."""
    for resume in (False, True)[: 2 if stage == 3 else 1]:
        cpu, lag = str(tmp_path / "cpu"), str(tmp_path / "lag")
        expected = run_ranks(_train, 2, stage, cpu, "cpu", resume, init_group=False)
        assert run_ranks(on_lag, 2, stage, lag, resume, init_group=False) == expected
