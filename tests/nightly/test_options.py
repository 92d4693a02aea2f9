"""Options of Trainer and of TRL's trainers at stages 2 and 3 beside the same program under DistributedDataParallel.

All three run on the same two ranks, since much depends on what a rank has in its batch: the order of sampling, the
tokens that are counted, the neighbours of a sample in a loss. `even_batches=False` is not here: where ranks have
unequal numbers of batches, Trainer's own evaluation hangs under DistributedDataParallel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.hf import runs, test_entries, test_trl, trl_runs

STAGES = (2, 3)
_EVALS = {"eval_strategy": "steps", "eval_steps": 2}
_SAVES = {"save_strategy": "steps", "save_steps": 2}

OPTIONS: dict[str, dict[str, Any]] = {
    "no accumulation": {"gradient_accumulation_steps": 1},
    "accumulation": {"gradient_accumulation_steps": 4},
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "torch.compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    # batches
    "by length": {"train_sampling_strategy": "group_by_length"},
    "in order": {"train_sampling_strategy": "sequential"},
    "seed of the data": {"data_seed": 11},
    "another seed": {"seed": 3},
    "last batch dropped": {"dataloader_drop_last": True, "per_device_train_batch_size": 3, "max_steps": 6},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2},
    "split batches": {"accelerator_config": {"split_batches": True}},
    "dispatched batches": {"accelerator_config": {"dispatch_batches": True}},
    "all columns": {"remove_unused_columns": False},
    # losses
    "label smoothing": {"label_smoothing_factor": 0.1},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "tokens of each rank": {"average_tokens_across_devices": False},
    "bf16": {"bf16": True},
    "tokens counted": {"include_num_input_tokens_seen": "all"},
    # updates
    "no clipping": {"max_grad_norm": 0.0},
    "much clipping": {"max_grad_norm": 0.01},
    "weight decay": {"weight_decay": 0.1},
    "betas": {"adam_beta1": 0.7, "adam_beta2": 0.9},
    "fused adamw": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop", "optim_args": "eps=1e-3", "learning_rate": 1e-3},
    # rates
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "constant with warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    "inverse square root": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 1},
    "cosine with a floor": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, **_EVALS},
    # evaluation, saves
    "evaluation": {**_EVALS, "eval_delay": 3, "eval_accumulation_steps": 1},
    "evaluation first": {**_EVALS, "eval_on_start": True},
    "resumed": {**_SAVES, "save_total_limit": 1, "resume": True},
    "best model": {**_EVALS, **_SAVES, "load_best_model_at_end": True, "max_steps": 7},
    "best model alone": {**_EVALS, **_SAVES, "load_best_model_at_end": True, "max_steps": 7, "save_only_model": True},
    "worst model": {**_EVALS, **_SAVES, "load_best_model_at_end": True, "max_steps": 7, "greater_is_better": True},
    "saves of the model": {**_SAVES, "save_only_model": True},
    "jit checkpoint": {"enable_jit_checkpoint": True},
}

# name -> a function of trl_runs, and its arguments
TRL: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "sft": (trl_runs.simple, ("sft",), {}),
    "sft, packed": (trl_runs.simple, ("sft",), {"packing": True, "packing_strategy": "wrapped"}),
    "sft, checkpointed": (trl_runs.simple, ("sft",), {"gradient_checkpointing": True}),
    "sft, dft": (trl_runs.simple, ("sft",), {"loss_type": "dft"}),
    "sft, chunked": (trl_runs.simple, ("sft",), {"loss_type": "chunked_nll"}),
    "sft, completions": (trl_runs.simple, ("sft of answers",), {"completion_only_loss": True}),
    "sft, prompts too": (trl_runs.simple, ("sft of answers",), {"completion_only_loss": False}),
    **{
        f"dpo, {loss}": (trl_runs.dpo, ("model",), {"loss_type": [loss]})
        for loss in ("hinge", "ipo", "nca_pair", "sppo_hard", "aot", "apo_zero", "discopop")
    },
    **{
        f"dpo, {loss}": (trl_runs.dpo, ("model",), {"loss_type": [loss], "label_smoothing": 0.1})
        for loss in ("robust", "exo_pair")
    },
    "dpo, two losses": (
        trl_runs.dpo,
        ("model",),
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]},
    ),
    "dpo, weighted": (trl_runs.dpo, ("model",), {"use_weighting": True}),
    "dpo, divergence": (trl_runs.dpo, ("model",), {"f_divergence_type": "js_divergence"}),
    "dpo, precomputed": (trl_runs.dpo, ("precomputed",), {}),
    "dpo, adapters": (trl_runs.dpo, ("lora",), {}),
    "kto": (trl_runs.simple, ("kto",), {}),
    "kto, apo": (trl_runs.simple, ("kto",), {"loss_type": "apo_zero_unpaired"}),
    "orpo": (trl_runs.simple, ("orpo",), {}),
    "cpo": (trl_runs.simple, ("cpo",), {}),
    "cpo, simpo": (trl_runs.simple, ("cpo",), {"loss_type": "simpo"}),
    "reward, centred": (trl_runs.reward, (), {"center_rewards_coefficient": 0.1}),
    "grpo, dr": (trl_runs.grpo, (0.1,), {"loss_type": "dr_grpo"}),
    "grpo, iterated": (trl_runs.grpo, (0.1,), {"num_iterations": 2, "max_steps": 4}),
}


def train_all(folder: str, options: dict[str, Any]) -> list[runs.Outcome]:
    """Train on every rank of a job: DDP first, since the others change transformers while they run."""
    runs.persistence = 0
    found = []
    for kind, stage in (("ddp", 0), *(("enable", stage) for stage in STAGES)):
        if "resume" in options:
            runs.train(kind, stage, f"{folder}/{stage}", **{**options, "resume": None, "max_steps": 2})
        found.append(runs.train(kind, stage, f"{folder}/{stage}", **options))
    return found


def train_all_of_trl(name: str, folder: str, base: str) -> list[runs.Outcome]:
    runs.persistence = 0
    function, own, more = TRL[name]
    return [function(stage, f"{folder}/{stage}", base, *own, **more) for stage in (None, *STAGES)]


def launch(function: Any, *args: Any) -> list[runs.Outcome]:
    """Rank 0's outcomes: under DDP, where every weight must have moved, and at each stage."""
    first, second = run_ranks(function, 2, *args, timeout=180, init_group=False)
    assert [run.norms for run in first] == [run.norms for run in second], "the ranks differ"
    start = runs.build().state_dict()  # a weight that is not among these is an adapter's or a new head's
    weights = first[0].weights.items()
    still = [name for name, value in weights if value.equal(start.get(name, torch.zeros_like(value)))]
    assert not still, f"vacuous: {still}"
    return first


@pytest.mark.parametrize("name", OPTIONS)
def test_option_of_trainer(name: str, tmp_path: Path) -> None:
    want, *found = launch(train_all, str(tmp_path), OPTIONS[name])
    for stage, got in zip(STAGES, found, strict=True):
        # Under bf16 a difference in the last bit of a weight may round it to another number of 8 bits.
        bounds = {"rel": 1e-3, "weights": 1e-4} if name == "bf16" else {}
        test_entries.assert_same(got, want, label=f"{name}, stage {stage}", **bounds)


@pytest.mark.parametrize("name", TRL)
def test_option_of_trl(name: str, tmp_path: Path) -> None:
    base = trl_runs.base(str(tmp_path))
    want, *found = launch(train_all_of_trl, name, str(tmp_path), base)
    for stage, got in zip(STAGES, found, strict=True):
        least = 0.01 if name == "sft, dft" else 0.05  # its loss is weighted with the probability of the token
        test_trl.assert_same(want, got, f"{name}, stage {stage}", least=least)
