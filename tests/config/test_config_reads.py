"""A key that is said to be obeyed is read by the code that trains: looked at while it runs, field by field."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.config import ResolvedConfig
from hf_zero.config.keys import OBEYED, statuses
from hf_zero.config.resolved import (
    ActivationCheckpointing,
    Aio,
    CheckpointSection,
    CommsLoggerSection,
    FlopsProfilerSection,
    Fp8Section,
    LossScaling,
    OffloadOptimizer,
    OffloadParam,
    Precision,
    ZeroSection,
)
from hf_zero.errors import ConfigError
from hf_zero.extras.monitors.trackers import CometSection, FilesSection, WandbSection
from hf_zero.extras.pipeline.pipeline_section import PipelineSection
from tests.harness.ranks import run_ranks
from tests.harness.torchao_path import use_torchao

SECTIONS = (
    ResolvedConfig,
    ZeroSection,
    OffloadParam,
    OffloadOptimizer,
    Aio,
    CheckpointSection,
    CometSection,
    CommsLoggerSection,
    FlopsProfilerSection,
    FilesSection,
    WandbSection,
    ActivationCheckpointing,
    PipelineSection,
    Precision,
    LossScaling,
    Fp8Section,
)
BLOCKS = {
    "zero_optimization": "ZeroSection",
    "zero_optimization.offload_param": "OffloadParam",
    "zero_optimization.offload_optimizer": "OffloadOptimizer",
    "aio": "Aio",
    "checkpoint": "CheckpointSection",
    "tensorboard": "FilesSection",
    "csv_monitor": "FilesSection",
    "flops_profiler": "FlopsProfilerSection",
    "wandb": "WandbSection",
    "comet": "CometSection",
    "comms_logger": "CommsLoggerSection",
    "activation_checkpointing": "ActivationCheckpointing",
    "pipeline": "PipelineSection",
    "msamp": "Fp8Section",
}
# Keys whose value is in a field of another name. What is asked for in 16 bits is one decision, made of many keys.
FIELDS = {
    "zero_optimization.stage": "ResolvedConfig.stage",
    "checkpoint.async": "CheckpointSection.asynchronous",
    "zero_force_ds_cpu_optimizer": "ResolvedConfig.force_native_adam",
    "data_types.grad_accum_dtype": "ResolvedConfig.grad_accum_dtype",
    "fp16.enabled": "ResolvedConfig.dtype",
    "bf16.bf16_master_weights_and_grads": "ResolvedConfig.bf16_masters",
    "bf16.bf16_optimizer_states": "ResolvedConfig.bf16_masters",
    "bf16.enabled": "ResolvedConfig.dtype",
    "amp.enabled": "ResolvedConfig.dtype",
    "amp.opt_level": "ResolvedConfig.dtype",
    "bf16.check_grad_overflow": "Precision.skip_nonfinite",
    "torch_autocast.enabled": "Precision.autocast",
    "torch_autocast.dtype": "Precision.autocast",
    "fp16.loss_scale": "LossScaling.static",
    "amp.loss_scale": "LossScaling.static",
    "fp16.initial_scale_power": "LossScaling.initial_power",
    "fp16.loss_scale_window": "LossScaling.window",
    "fp16.hysteresis": "LossScaling.hysteresis",
    "fp16.consecutive_hysteresis": "LossScaling.consecutive_hysteresis",
    "fp16.min_loss_scale": "LossScaling.min_scale",
}


def configurations(folder: str) -> list[dict[str, Any]]:
    disk = {"device": "nvme", "nvme_path": folder}
    cpu = {"device": "cpu", "delayed_update": True}
    arena = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}
    arena |= {"synchronize_checkpoint_boundary": True}
    scales = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 2}
    return [
        {
            "fp16": scales,
            "zero_optimization": {"stage": 1},
            "steps_per_print": 2,
            "csv_monitor": {"enabled": True, "output_path": folder},
            "flops_profiler": {"enabled": True, "output_file": f"{folder}/flops"},
            "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]},
        },
        {"zero_optimization": {"stage": 2, "offload_optimizer": cpu}, "activation_checkpointing": arena},
        {"zero_optimization": {"stage": 1}, "msamp": {"enabled": True, "opt_level": "O3"}},
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": disk,
                "offload_param": {**disk, "max_in_cpu": 0},
            },
        },
    ]


class Reads:
    """The fields of the resolved configuration, and of its `settings`, that are read outside hf_zero/config."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        for section in SECTIONS:
            section.__getattribute__ = self._watch(section.__name__)  # type: ignore[method-assign]

    def _watch(self, section: str) -> Any:
        def read(instance: Any, name: str) -> Any:
            if _reads_for_training(sys._getframe(1)):
                self.found.add(f"{section}.{name}")
            value = object.__getattribute__(instance, name)
            return Watched(value, self) if name == "settings" else value

        return read


class Watched(dict[str, Any]):
    def __init__(self, settings: dict[str, Any], reads: Reads) -> None:
        super().__init__(settings)
        self._reads = reads

    def __getitem__(self, path: str) -> Any:
        self._note(path)
        return super().__getitem__(path)

    def get(self, path: str, default: Any = None) -> Any:
        self._note(path)
        return super().get(path, default)

    def _note(self, path: str) -> None:
        if _reads_for_training(sys._getframe(2)):
            self._reads.found.add(path)


def _reads_for_training(frame: Any) -> bool:
    module = frame.f_globals["__name__"]
    return module.startswith("hf_zero.") and not module.startswith(("hf_zero.config", "hf_zero.extras.cli"))


def train_and_look(folder: str) -> set[str]:
    """Do what a script does with its configuration: training with a loader, a model file, a checkpoint, a text."""
    use_torchao()
    reads = Reads()
    samples = [{"input_ids": torch.arange(4) + 3, "labels": torch.arange(4) + 3} for _ in range(4)]
    for config in configurations(folder):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=1))
        if "activation_checkpointing" in config:
            model.gradient_checkpointing_enable()
        adam = {"type": "AdamW", "params": {"lr": 1e-3}}
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, **config}
        engine, _, loader, _ = hf_zero.initialize(model=model, config=config, training_data=samples)
        for factor in (1.0, 1.0, float("inf") if "fp16" in config else 1.0):
            for batch in loader:
                engine.backward(engine(**batch)["loss"] * factor)
                engine.step()
        assert engine.train_batch_size() == 2
        engine.save_16bit_model(folder)
        engine.save_checkpoint(folder)
        model.eval().generate(torch.tensor([[3, 4]]), max_new_tokens=2, pad_token_id=0)
        engine.teardown()
    args = hf_zero.TrainingArguments(
        output_dir=folder, zero={"train_micro_batch_size_per_gpu": 8}, max_steps=1, use_cpu=True, report_to=[]
    )
    hf_zero.Trainer(model=model, args=args, train_dataset=samples).train()
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    stages = hf_zero.PipelineModule(layers, loss_fn=torch.nn.functional.mse_loss)
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, "pipeline": {"stages": 2}}
    engine = hf_zero.initialize(model=stages, config=config)[0]
    engine.train_batch(iter([(torch.ones(1, 2), torch.zeros(1, 2))]))
    engine.teardown()
    sys.modules["wandb"] = sys.modules["comet_ml"] = None  # type: ignore[assignment]  # so that nobody is logged in
    with pytest.raises(ConfigError):
        monitors = {"wandb": {"enabled": True}, "comet": {"enabled": True}}
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **monitors}
        hf_zero.initialize(model=torch.nn.Linear(2, 2), config=config)
    return reads.found


def field_of(path: str) -> str:
    block, _, name = path.rpartition(".")
    return FIELDS.get(path) or f"{BLOCKS.get(block, 'ResolvedConfig')}.{name}"


def test_what_is_obeyed_is_read_outside_the_configuration(tmp_path: Path) -> None:
    found = set.union(*run_ranks(train_and_look, 2, str(tmp_path)))
    obeyed = [path for path, decided in statuses() if decided.verdict == OBEYED]
    # The parameters of optimizers and schedulers are passed on as they are.
    obeyed = [path for path in obeyed if not path.startswith(("optimizer.", "scheduler."))]
    assert len(obeyed) > 60
    silent = {path for path in obeyed if path not in found and field_of(path) not in found}
    assert not silent, f"nothing looks at {sorted(silent)}"
    sections = (ZeroSection, OffloadParam, OffloadOptimizer, Aio, CheckpointSection)
    kept = {f"{section.__name__}.{one.name}" for section in sections for one in dataclasses.fields(section)}
    # The stage is read from the configuration itself; the estimate replaces it in the section.
    assert kept - found == {"ZeroSection.stage"}, "fields that nobody reads"
