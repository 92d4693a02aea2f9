"""Resolving a configuration: "auto", defaults, the batch triangle, conflicts and refusals."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.config.autofill import RULES, bucket_sizes
from hf_zero.config.parse import parse
from hf_zero.config.resolve import Surroundings, _Resolver
from hf_zero.errors import ConfigError


def arguments(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "learning_rate": 5e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.01,
        "fp16": False,
        "fp16_full_eval": False,
        "bf16": False,
        "bf16_full_eval": False,
        "save_on_each_node": False,
        "auto_find_batch_size": False,
        "max_steps": -1,
        "warmup_steps": 0,
        "fsdp": None,
        "deepspeed": None,
    }
    assert set(changes) <= set(values)
    return SimpleNamespace(**{**values, **changes})


def resolve(config: dict[str, Any], *args: Any, **kwargs: Any) -> ResolvedConfig:
    return ZeroConfig.load(config, defer=True).resolve(*args, **kwargs)


def problems(config: dict[str, Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve(config, *args, **kwargs)
    return str(raised.value)


# The batch triangle

BATCHES = [
    # (train, micro, accumulation), world -> (train, micro, accumulation)
    ((16, None, 1), 4, (16, 4, 1)),  # golden values of DeepSpeed's own logs
    ((32, None, 8), 4, (32, 1, 8)),
    ((32, 2, 4), 4, (32, 2, 4)),
    ((32, 2, None), 4, (32, 2, 4)),
    ((None, 2, 4), 4, (32, 2, 4)),
    ((32, None, None), 4, (32, 8, 1)),
    ((None, 2, None), 4, (8, 2, 1)),
    ((None, None, None), 3, (3, 1, 1)),
    (("12", "2", None), 3, (12, 2, 2)),
    (("auto", "auto", "auto"), 2, (2, 1, 1)),
]


def test_accumulation_alone_says_nothing_of_the_samples() -> None:
    """Accumulation is not enough, and DeepSpeed says the same; the arguments of a Trainer, or the loaders of an
    accelerate loop, say what is missing.
    """
    for micro in ({}, {"train_micro_batch_size_per_gpu": "auto"}):
        text = problems({"gradient_accumulation_steps": 5, **micro}, world_size=3)
        assert "gradient_accumulation_steps = 5: Either train_batch_size or train_micro_batch_size_per_gpu" in text
        args = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=5)
        assert resolve({"gradient_accumulation_steps": 5, **micro}, args, world_size=3).train_batch_size == 30
    assert not ZeroConfig.load({"gradient_accumulation_steps": 5}).check()


def batch_keys(train: Any, micro: Any, accumulation: Any) -> dict[str, Any]:
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    return {key: value for key, value in given.items() if value is not None}


@pytest.mark.parametrize(("given", "world", "want"), BATCHES)
def test_batch_numbers_follow_from_one_another(given: tuple[Any, ...], world: int, want: tuple[int, ...]) -> None:
    config = resolve(batch_keys(*given), world_size=world)
    got = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert got == want


@pytest.mark.parametrize(
    ("given", "world"),
    [
        ((16, 1, 1), 1),
        ((32, 16, None), 4),
        ((10, None, None), 4),
        ((10, None, 3), 1),
        ((7, 2, None), 1),
        ((1, None, 2), 4),
    ],
)
def test_batch_numbers_that_do_not_multiply_up(given: tuple[Any, ...], world: int) -> None:
    text = problems(batch_keys(*given), world_size=world)
    assert (
        "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
        f"world_size {given[0]} != " in text
    )
    assert "Set train_batch_size to" in text


def test_the_remedy_for_batch_numbers_works() -> None:
    text = problems(batch_keys(100, 16, None), world_size=4)
    assert "a multiple of 64, such as 128" in text
    assert resolve(batch_keys(128, 16, None), world_size=4).gradient_accumulation_steps == 2
    text = problems(batch_keys(10, 16, 2), world_size=1)
    assert "Set train_batch_size to 32" in text


def test_origins_of_batch_numbers() -> None:
    origins = resolve(batch_keys(None, 2, None), world_size=2).origins
    assert origins["train_micro_batch_size_per_gpu"] == "file"
    assert origins["gradient_accumulation_steps"] == "default"
    assert origins["train_batch_size"] == "inferred"
    origins = resolve({"train_micro_batch_size_per_gpu": "auto"}, arguments()).origins
    assert origins["train_micro_batch_size_per_gpu"] == "auto"
    assert origins["gradient_accumulation_steps"] == origins["gradient_clipping"] == "TrainingArguments"


# Answers of transformers; test_config_transformers.py compares them value for value.

SCHEDULER: dict[str, Any] = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
}


class Theirs(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):  # type: ignore[misc]
    """transformers' own resolver, built without the deepspeed package that its constructor asks for."""

    def __init__(self, config: dict[str, Any]) -> None:
        HfDeepSpeedConfig.__init__(self, config)
        self._dtype = None
        self.mismatches: list[str] = []


def test_dtype_is_the_one_transformers_takes() -> None:
    names = {torch.bfloat16: "bfloat16", torch.float32: None}
    blocks: tuple[dict[str, Any], ...] = ({}, {"bf16": {"enabled": "auto"}}, {"bf16": {}})
    for bf16, block in itertools.product((False, True), blocks):
        theirs = Theirs(copy.deepcopy(block))
        args = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", bf16=bf16)
        theirs.trainer_config_process(args)
        assert resolve(block, args).dtype == names[theirs.dtype()]


def test_a_mismatch_is_one_for_transformers_too() -> None:
    fixed = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 4,
        "gradient_clipping": 5.0,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2},
        },
    }
    args = arguments()
    args.world_size = 1
    theirs = Theirs(copy.deepcopy(fixed))
    theirs.trainer_config_process(args)
    text = problems(fixed, args)
    assert len(theirs.mismatches) == 9
    assert text.startswith("9 problems")
    for line in theirs.mismatches:
        key, _, argument = line.removeprefix("- ds ").partition(" vs hf ")
        assert f"zero {key.split('=')[0]}=" in text and f"vs TrainingArguments {argument.split('=')[0]}=" in text
    assert "zero train_micro_batch_size_per_gpu=4 vs TrainingArguments per_device_train_batch_size=8" in text
    assert 'Set gradient_clipping to "auto", or make the two equal.' in text


def test_values_are_compared_by_value() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "8",
        "gradient_accumulation_steps": 2.0,
        "gradient_clipping": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": "5e-5", "betas": ("0.9", 0.999), "weight_decay": "1e-2"}},
    }
    resolved = resolve(config, arguments(per_device_train_batch_size="8", learning_rate="5e-05"), world_size=3)
    assert resolved.train_batch_size == 48
    assert resolved.optimizer == {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "weight_decay": 0.01}}
    assert "zero gradient_accumulation_steps=8 vs" in problems({"gradient_accumulation_steps": "8"}, arguments())


def test_a_key_of_another_meaning_need_not_equal_the_argument() -> None:
    """Adafactor's eps are two numbers for what Adam has no name for; of Adam's the arguments have one."""
    own = {"type": "Adafactor", "params": {"lr": "auto", "eps": [1e-30, 1e-3]}}
    resolved = resolve({"optimizer": own}, arguments())
    assert resolved.optimizer == {"type": "Adafactor", "params": {"lr": 5e-5, "eps": [1e-30, 1e-3]}}
    assert "vs TrainingArguments adam_epsilon" in problems(
        {"optimizer": {"type": "AdamW", "params": {"eps": 1e-3}}}, arguments()
    )


def test_auto_find_batch_size_lets_the_arguments_win() -> None:
    config = batch_keys(64, 8, 2)
    args = arguments(auto_find_batch_size=True, per_device_train_batch_size=4)
    assert resolve(config, args, world_size=4).train_batch_size == 32
    assert "per_device_train_batch_size=4" in problems(config, arguments(per_device_train_batch_size=4), world_size=4)


def test_missing_keys_take_the_arguments() -> None:
    resolved = resolve({}, arguments(max_grad_norm=0.3), world_size=2)
    assert (resolved.train_batch_size, resolved.train_micro_batch_size_per_gpu) == (32, 8)
    assert resolved.gradient_clipping == 0.3 and resolved.zero_allow_untested_optimizer
    assert resolve({}, arguments(max_grad_norm=None)).gradient_clipping == 0.0
    assert not resolve({}).zero_allow_untested_optimizer


def test_clipping_without_arguments() -> None:
    assert resolve({}).gradient_clipping == 0.0
    assert resolve({"gradient_clipping": "auto"}).gradient_clipping == 1.0
    assert resolve({"gradient_clipping": 0.5}).gradient_clipping == 0.5


# The model

BUCKETS = {"stage": 3, **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.out = torch.nn.Linear(24, 10)
        self.big = torch.nn.Linear(512, 2)


def test_without_a_hidden_size_the_parameters_give_one() -> None:
    resolved = resolve({"zero_optimization": BUCKETS}, model=Net())
    assert (resolved.zero.reduce_bucket_size, resolved.zero.stage3_prefetch_bucket_size) == (576, 518)
    assert resolved.origins["zero_optimization.reduce_bucket_size"] == "auto (from parameters)"
    convolutions = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3), torch.nn.Conv2d(64, 64, 3), torch.nn.Conv2d(64, 64, 3)
    )
    assert resolve({"zero_optimization": BUCKETS}, model=convolutions).zero.reduce_bucket_size == 64 * 64


def test_without_a_model_or_parameters_the_defaults_stand() -> None:
    for model in (None, torch.nn.ReLU()):
        resolved = resolve({"zero_optimization": BUCKETS}, model=model)
        assert (resolved.zero.reduce_bucket_size, resolved.zero.stage3_prefetch_bucket_size) == (
            500_000_000,
            50_000_000,
        )
        assert resolved.origins["zero_optimization.reduce_bucket_size"] == "auto (default)"


def test_composite_configs_of_transformers_always_resolve() -> None:
    wanted = (
        (transformers.T5Config(d_model=32), 32),
        (transformers.GPT2Config(n_embd=48), 48),
        (transformers.MobileViTConfig(hidden_sizes=[16, 64, 24]), 64),
        (transformers.CLIPConfig(text_config={"hidden_size": 40}), 40),
        (transformers.Qwen2VLConfig(text_config={"hidden_size": 56}), 56),
        (transformers.LlavaConfig(text_config={"model_type": "llama", "hidden_size": 96}), 96),
    )
    for config, hidden in wanted:
        model = SimpleNamespace(config=config, parameters=lambda: iter([torch.empty(5, 7)]))
        assert resolve({"zero_optimization": BUCKETS}, model=model).zero.reduce_bucket_size == hidden**2, config
    odd = SimpleNamespace(config=SimpleNamespace(hidden_size=None), parameters=lambda: iter([torch.empty(5, 7)]))
    assert resolve({"zero_optimization": BUCKETS}, model=odd).zero.reduce_bucket_size == 49


def test_scheduler_numbers_without_arguments_or_steps() -> None:
    config = {"scheduler": copy.deepcopy(SCHEDULER)}
    known = _Resolver(parse(config), Surroundings(args=arguments(max_steps=40, warmup_steps=0.1)))
    known.run()
    params = known.values["scheduler"]["params"]
    assert params == {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-5, "warmup_num_steps": 4, "total_num_steps": 40}
    unknown = _Resolver(parse(config), Surroundings(args=arguments()))
    unknown.run()
    assert [one.key.rpartition(".")[2] for one in unknown.problems.found][:2] == [
        "warmup_num_steps",
        "total_num_steps",
    ]
    assert "number of training steps is not known" in unknown.problems.found[0].text


def test_the_guide_names_every_key_that_arguments_or_the_model_fill() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
    kinds = text.partition("## Three kinds of keys")[2].partition("## Keys that")[0]
    named = [rule.path for rule in RULES] + list(bucket_sizes(1, 3)) + ["checkpoint.use_node_local_storage"]
    assert not [path for path in named if f"`{path}`" not in kinds]
    shared = kinds.partition("| follow from others")[0]
    assert all(f"`{rule.path}`" in shared for rule in RULES if rule.must_match)
