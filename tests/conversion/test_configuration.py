"""Configurations of DeepSpeed and accelerate mean the same after their conversion, and every key has its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin

from hf_zero.config import ZeroConfig
from hf_zero.conversion.configuration import convert_config
from hf_zero.errors import ConfigError
from hf_zero.extras.cli.main import main
from tests.config.test_config_corpus import FILES, arguments_for

LAUNCH = {"compute_environment": "LOCAL_MACHINE", "num_machines": 2, "num_processes": 8, "mixed_precision": "bf16"}
OF_DEEPSPEED = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_stage": 3,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "nvme",
    "offload_param_nvme_path": "/fast",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "deepspeed_multinode_launcher": "standard",
}


def file_of(folder: Path, kind: str, **block: Any) -> Path:
    key = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}[kind]
    elsewhere = ("mixed_precision", "use_cpu", "tpu_env", "fp8_config", "typo")
    top = {name: block.pop(name) for name in elsewhere if name in block}
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**LAUNCH, "distributed_type": kind, key: block, **top}))
    return path


def test_public_configurations_resolve_to_the_same_or_are_refused_alike() -> None:
    converted = 0
    for path in FILES:
        try:
            wanted = ZeroConfig.load(path)
        except ConfigError as error:
            with pytest.raises(ConfigError) as raised:
                convert_config(path)
            assert str(raised.value).splitlines()[0] == str(error).splitlines()[0]
            continue
        if wanted.check():
            with pytest.raises(ConfigError, match=r"not supported yet|unknown key|needs number_checkpoints"):
                convert_config(path)
            continue
        found = convert_config(path)
        args = arguments_for(wanted.raw)
        again = ZeroConfig.load(found.values)
        assert len(again.problems(args)) == len(wanted.problems(args)), path
        if not again.problems(args):
            mine, theirs = (config.resolve(args).settings for config in (again, wanted))
            ignored = [line.split()[1] for line in found.lines if line.startswith("ignored: ")]
            differing = [key for key in theirs if key not in mine or theirs[key] != mine[key]]
            assert mine.keys() <= theirs.keys(), path
            assert all(any(f"{key}.".startswith(f"{one}.") for one in ignored) for key in differing), path
        json.dumps(found.values)
        assert {line.partition(":")[0] for line in found.lines} <= {"taken", "changed", "ignored"}
        converted += 1
    assert converted >= 45


def test_each_key_of_deepspeeds_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": "2", "cpu_offload": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8}
    rest = {"_comment": "mine", "curriculum_learning": {"enabled": False}, "steps_per_print": None}
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": zero | {"stage": 2}, **rest}))
    found = convert_config(path)
    assert [line.partition(" = ")[0] for line in found.lines] == [
        "taken: train_batch_size",
        "taken: zero_optimization.stage",
        "changed: zero_optimization.cpu_offload",
        "ignored: zero_optimization.contiguous_gradients",
        "taken: zero_optimization.reduce_bucket_size",
        "ignored: _comment",
        "ignored: curriculum_learning",
        "ignored: steps_per_print",
    ]
    assert 'offload_optimizer.device = "cpu"' in found.lines[2]
    wanted = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 500_000_000}
    assert found.values == {"train_batch_size": 8, "zero_optimization": wanted}


def test_accelerates_keys_become_what_its_own_plugin_makes_of_them(tmp_path: Path) -> None:
    source = file_of(tmp_path, "DEEPSPEED", **OF_DEEPSPEED)
    assert main(["convert", "config", str(source), str(tmp_path / "zero.json")]) == 0
    mine = json.loads((tmp_path / "zero.json").read_text())
    others = ("zero3_init_flag", "deepspeed_multinode_launcher")
    plugin: Any = DeepSpeedPlugin(**{key: value for key, value in OF_DEEPSPEED.items() if key not in others})
    own = {key: value for key, value in plugin.deepspeed_config.items() if key != "steps_per_print"}
    own["zero_optimization"]["offload_optimizer"].pop("nvme_path")  # None
    precision = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}  # as the launch file says
    assert mine == ZeroConfig.load(own | precision).values
    launch: Any = ClusterConfig.from_yaml_file(str(tmp_path / "zero.yaml"))
    assert (launch.distributed_type, launch.num_processes, launch.mixed_precision) == ("MULTI_GPU", 8, "bf16")
    assert launch.deepspeed_config == {}


def test_a_configuration_file_that_accelerate_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "train_batch_size": 8}')
    source = file_of(tmp_path, "DEEPSPEED", deepspeed_config_file="ds.json", zero_stage=3, use_cpu=True)
    assert main(["convert", "config", str(source)]) == 0
    printed = capsys.readouterr().out
    assert "ignored: deepspeed_config.zero_stage = 3: deepspeed_config_file has it" in printed
    assert "taken: zero_optimization.stage = 1" in printed
    assert "which is MULTI_CPU in the launch file" in printed
    assert not list(tmp_path.glob("*zero*"))


@pytest.mark.parametrize(
    ("block", "stage", "offloads"),
    [
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": True}, 3, True),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, 2, False),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE"}, 3, False),
        ({"fsdp_sharding_strategy": 2, "fsdp_offload_params": False}, 2, False),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 0, False),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, 3, False),
        ({"fsdp_sharding_strategy": 5}, 2, False),
    ],
)
def test_fsdp_is_a_stage(block: dict[str, Any], stage: int, offloads: bool, tmp_path: Path) -> None:
    found = convert_config(file_of(tmp_path, "FSDP", **block))
    zero = found.values["zero_optimization"]
    assert zero["stage"] == stage
    is_hybrid = block.get("fsdp_sharding_strategy") in ("HYBRID_SHARD", 5)
    assert (zero.get("sharding_group"), zero.get("hybrid_shard")) == (("host", True) if is_hybrid else (None, None))
    assert ("offload_param" in zero, "offload_optimizer" in zero) == (offloads, offloads)
    assert all(any(key in line for line in found.lines) for key in block)


@pytest.mark.parametrize("value", [True, False])
def test_offloaded_activations_of_fsdp_are_taken(value: bool, tmp_path: Path) -> None:
    found = convert_config(file_of(tmp_path, "FSDP", fsdp_version=2, fsdp_activation_checkpointing_offload=value))
    assert found.values["activation_checkpointing"] == {"cpu_checkpointing": value}


@pytest.mark.parametrize(
    ("kind", "block", "said"),
    [
        ("FSDP", {"fsdp_sharding_strategy": "HYBRID"}, "HYBRID': expected one of FULL_SHARD, SHARD_GRAD_OP"),
        ("FSDP", {"fsdp_new": 1, "mixed_precision": "fp8"}, "(?s)mixed_precision = 'fp8'.*fsdp_new = 1"),
        ("DEEPSPEED", {"deepspeed_config_file": "nowhere.json"}, "there is no such file"),
        ("DEEPSPEED", {"zero_stag": 3}, "zero_stag = 3: hf_zero knows no such key"),
        ("DEEPSPEED", {"zero_stage": 7}, "zero_optimization.stage = 7"),
        ("DEEPSPEED", {"zero_stage": 3, "offload_param_device": "nvme"}, "nvme_path"),
        ("DEEPSPEED", {"fp8_config": {"backend": "TE"}, "tpu_env": ["a"], "typo": 1}, "(?s)fp8_config.*tpu_env.*typo"),
    ],
)
def test_what_cannot_be_meant_is_an_error(kind: str, block: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        convert_config(file_of(tmp_path, kind, **block))


@pytest.mark.parametrize(
    "text", ["", "- a", "a: [", "distributed_type: MULTI_GPU", "!!python/object/apply:os.getcwd []"]
)
def test_other_files(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert main(["convert", "config", str(path), str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().err.startswith("hf-zero convert config: error: ")
    assert [one.name for one in tmp_path.iterdir()] == ["x.yaml"]


def test_a_missing_file_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    assert main(["convert", "config", str(path)]) == 1
    said = f"hf-zero convert config: error: cannot read {path}: No such file or directory. Name a yaml or JSON file.\n"
    assert capsys.readouterr().err == said


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = file_of(tmp_path, "DEEPSPEED", zero_stage=2)
    before = source.read_text()
    for target in ("accelerate.json", "accelerate.yaml", "new.yaml"):
        assert main(["convert", "config", str(source), str(tmp_path / target)]) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["accelerate.yaml"]
    assert source.read_text() == before
