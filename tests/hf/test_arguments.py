"""Arguments with `zero`: parsing, checks, pickling; and what enable and disable do to transformers and accelerate."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers import HfArgumentParser

import hf_zero
from hf_zero.errors import ConfigError, StateError
from hf_zero.hf import enable as enabling
from hf_zero.hf.accelerator.optimizer import ZeroAcceleratedOptimizer
from hf_zero.hf.accelerator.plugin import ZeroAcceleratorMixin, ZeroPlugin
from hf_zero.hf.enable import all_functions, disable, enable
from hf_zero.hf.patching import ACTIVATION, PatchPoint, check_functions
from hf_zero.hf.trainer.arguments import Seq2SeqTrainingArguments, TrainingArguments, zero_arguments
from hf_zero.hf.trainer.trainer import Trainer, ZeroTrainerMixin
from tests.harness.launches import bare_environment
from tests.harness.scripts import Ran, run_script

ROOT = Path(__file__).parents[2]
ZERO2: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}


def _methods() -> dict[tuple[Any, str], Any]:
    """Return what every patch point is now."""
    points = [one for one in all_functions() if isinstance(one, PatchPoint)]
    return {(point.owner, point.name): point.owner.__dict__[point.name] for point in points}


STOCK = _methods()


@pytest.fixture(autouse=True)
def _nothing_stays_active() -> Iterator[None]:
    yield
    disable()


def make(folder: Path, cls: Any = TrainingArguments, **kwargs: Any) -> Any:
    return cls(output_dir=str(folder), use_cpu=True, report_to=[], **kwargs)


class TinyModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        out = self.linear(x)
        return {"loss": out.square().mean(), "logits": out}


# -------------------------------------------------------------------- arguments
@pytest.mark.parametrize("form", ["dict", "json", "path", "Path"])
def test_zero_takes_dict_json_and_path(tmp_path: Path, form: str) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(ZERO2))
    given = {"dict": ZERO2, "json": json.dumps(ZERO2), "path": str(file), "Path": file}[form]
    args = make(tmp_path, zero=given)
    assert args.zero_config.stage == 2
    assert ACTIVATION.config is args.zero_config


def test_a_dict_is_not_changed(tmp_path: Path) -> None:
    before = copy.deepcopy(ZERO2)
    make(tmp_path, zero=ZERO2)
    assert before == ZERO2


def test_without_zero_nothing_happens(tmp_path: Path) -> None:
    args = make(tmp_path)
    assert args.zero_config is None and ACTIVATION.config is None
    assert _methods() == STOCK


@pytest.mark.parametrize("value", ["file", "inline"])
def test_command_line(tmp_path: Path, value: str) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(ZERO2))
    zero = str(file) if value == "file" else json.dumps(ZERO2)
    parser = HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", "--zero", zero]
    )
    assert args.zero == zero and args.zero_config.stage == 2
    assert "--zero" in parser.format_help()


def test_parse_dict_and_to_dict_round_trip(tmp_path: Path) -> None:
    args = make(tmp_path, zero=ZERO2, learning_rate=3e-4)
    as_dict = args.to_dict()
    assert as_dict["zero"] == ZERO2
    json.loads(args.to_json_string())
    (again,) = HfArgumentParser(TrainingArguments).parse_dict(
        {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "zero": as_dict["zero"]}
    )
    assert again.zero == args.zero


def test_all_problems_in_one_error(tmp_path: Path) -> None:
    wrong = {
        "zero_optimization": {
            "stage": 3,
            "stage3_prefech_bucket_size": 5,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
    }
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, zero=wrong, gradient_accumulation_steps=2, save_only_model=True)
    text = str(caught.value)
    for part in ("stage3_prefetch_bucket_size", "gradient_accumulation_steps", "bf16", "save_only_model"):
        assert part in text
    assert ACTIVATION.config is None


@pytest.mark.parametrize(
    ("arguments", "config", "names"),
    [
        ({"max_grad_norm": 0.5}, {**ZERO2, "gradient_clipping": 1.0}, "gradient_clipping"),
        ({"fsdp": "full_shard"}, ZERO2, "fsdp"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, ZERO2, "deepspeed"),
        ({"bf16_full_eval": True}, ZERO2, "bf16_full_eval"),
        (
            {"save_only_model": True},
            {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}},
            "save_only_model",
        ),
    ],
)
def test_contradictions_are_named(
    tmp_path: Path, arguments: dict[str, Any], config: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        make(tmp_path, zero=config, **arguments)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        make(tmp_path, zero=str(tmp_path / "nowhere.json"))


# -------------------------------------------------------------------- classes and pickles
def test_zero_arguments_is_one_class_per_base() -> None:
    trl = pytest.importorskip("trl")
    assert zero_arguments(trl.SFTConfig) is zero_arguments(trl.SFTConfig)
    assert issubclass(zero_arguments(trl.SFTConfig), trl.SFTConfig)
    assert zero_arguments(transformers.TrainingArguments) is TrainingArguments
    assert zero_arguments(transformers.Seq2SeqTrainingArguments) is Seq2SeqTrainingArguments
    assert zero_arguments(TrainingArguments) is TrainingArguments


# transformers is imported once; each file is loaded by a fork of its own, which has nothing of hf_zero.
LOAD = """
import os, sys, torch, transformers.trainer_seq2seq
for path in sys.argv[1:]:
    if not os.fork():
        assert not [name for name in sys.modules if name.split(".")[0] in ("hf_zero", "trl")]
        args = torch.load(path, weights_only=False)
        print(type(args).__name__, args.learning_rate, args.zero_config.stage, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, path
"""


def saved_class(kind: str) -> Any:
    if kind == "sft":
        return zero_arguments(pytest.importorskip("trl").SFTConfig)
    return TrainingArguments if kind == "plain" else Seq2SeqTrainingArguments


@pytest.mark.slow
def test_training_args_bin_loads_in_a_fresh_process(tmp_path: Path) -> None:
    kinds = ["plain", "seq2seq", "sft"]
    for kind in kinds:
        save_arguments(tmp_path, kind)
    files = [str(tmp_path / kind / "training_args.bin") for kind in kinds]
    command = [sys.executable, "-c", LOAD, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{saved_class(kind).__name__} 0.0007 2" for kind in kinds]


def save_arguments(folder: Path, kind: str) -> None:
    """Save them as Trainer does, and check which classes the file names."""
    cls, folder = saved_class(kind), folder / kind
    args = make(folder, cls, zero=ZERO2, learning_rate=7e-4)
    folder.mkdir(exist_ok=True)
    torch.save(args, folder / "training_args.bin")
    assert copy.copy(args).learning_rate == 7e-4 and type(copy.copy(args)) is cls
    with zipfile.ZipFile(folder / "training_args.bin") as archive:
        pickled = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    named = {text for op, text, _ in pickletools.genops(pickled) if op.name == "GLOBAL" and text.startswith("hf_zero")}
    public = "Seq2SeqTrainingArguments" if kind == "seq2seq" else "TrainingArguments"
    assert named == {f"hf_zero {public}"}, "files name where a class is exported, not where it lies today"


def test_copies_keep_class_and_values(tmp_path: Path) -> None:
    args = make(tmp_path, zero=ZERO2, learning_rate=7e-4)
    for twin in (copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert type(twin) is TrainingArguments
        assert twin.learning_rate == 7e-4 and twin.zero_config.stage == 2


# -------------------------------------------------------------------- enable, disable, patch_points
def test_enable_is_idempotent_and_disable_restores_exactly() -> None:
    enable(ZERO2)
    once = _methods()
    enable(ZERO3)
    assert _methods() == once, "a second call must not patch again"
    assert all(once[key] is not STOCK[key] for key in STOCK)
    config = ACTIVATION.config
    assert config is not None and config.stage == 3
    disable()
    after = _methods()
    assert all(after[key] is STOCK[key] for key in STOCK)
    assert ACTIVATION.config is None
    disable()


def test_a_later_patch_by_others_survives() -> None:
    enable(ZERO2)
    ours = transformers.Trainer.__dict__["save_model"]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    try:
        transformers.Trainer.save_model = theirs
        disable()
        assert transformers.Trainer.__dict__["save_model"] is theirs
    finally:
        transformers.Trainer.save_model = STOCK[transformers.Trainer, "save_model"]


def test_a_renamed_seam_is_named_with_the_version() -> None:
    gone = PatchPoint(transformers.Trainer, "_save_everything", ("output_dir",), lambda original: original)
    changed = PatchPoint(transformers.Trainer, "_save", ("folder",), lambda original: original)
    with pytest.raises(ConfigError) as caught:
        check_functions([gone, changed])
    text = str(caught.value)
    assert "Trainer._save_everything is missing" in text
    assert "Trainer._save takes (output_dir" in text
    assert transformers.__version__ in text and accelerate.__version__ in text


def test_seams_of_the_installed_versions_fit() -> None:
    check_functions(all_functions())


def test_a_seam_that_does_not_fit_leaves_nothing_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [*all_functions(), PatchPoint(transformers.Trainer, "_gone", (), lambda original: original)]
    monkeypatch.setattr(enabling, "all_functions", lambda: broken)
    with pytest.raises(ConfigError, match="_gone"):
        enable(ZERO2)
    assert _methods() == STOCK and ACTIVATION.config is None


# -------------------------------------------------------------------- who takes which configuration
def trainer_of(cls: Any, args: Any) -> Any:
    return cls(model=TinyModel(), args=args, train_dataset=[{"x": torch.ones(4)}] * 4)


def test_accelerators_and_trainers_under_enable(tmp_path: Path) -> None:
    enable(ZERO2)
    assert isinstance(accelerate.Accelerator(cpu=True), ZeroAcceleratorMixin)
    trainer = trainer_of(transformers.Trainer, make(tmp_path, transformers.TrainingArguments))
    assert isinstance(trainer.accelerator, ZeroAcceleratorMixin)
    assert trainer.accelerator.zero_plugin.config is ACTIVATION.config
    disable()
    assert not isinstance(accelerate.Accelerator(cpu=True), ZeroAcceleratorMixin)
    trainer = trainer_of(transformers.Trainer, make(tmp_path, transformers.TrainingArguments))
    assert not isinstance(trainer.accelerator, ZeroAcceleratorMixin)


def test_arguments_with_zero_reach_every_trainer(tmp_path: Path) -> None:
    """A stock Trainer given our arguments must not train without ZeRO."""
    args = make(tmp_path, zero=ZERO2)
    for cls in (Trainer, transformers.Trainer, type("Mixed", (ZeroTrainerMixin, transformers.Trainer), {})):
        trainer = trainer_of(cls, args)
        assert isinstance(trainer.accelerator, ZeroAcceleratorMixin)
        assert trainer.accelerator.zero_plugin.config is args.zero_config
    # ... and only those: the arguments decide, not what was active last.
    plain = trainer_of(transformers.Trainer, make(tmp_path, transformers.TrainingArguments))
    assert not isinstance(plain.accelerator, ZeroAcceleratorMixin)
    assert not isinstance(accelerate.Accelerator(cpu=True), ZeroAcceleratorMixin)


def test_own_trainer_without_zero_is_the_stock_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(Trainer, make(tmp_path))
    assert type(trainer.accelerator) is accelerate.Accelerator


def test_problems_of_a_trainer_under_enable(tmp_path: Path) -> None:
    enable({**ZERO3, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0})
    args = make(tmp_path, transformers.TrainingArguments, max_grad_norm=0.5)
    with pytest.raises(ConfigError) as caught:
        trainer_of(transformers.Trainer, args)
    assert "max_grad_norm" in str(caught.value) and "gradient_accumulation_steps" in str(caught.value)


def test_device_map_and_quantized_models_at_stage_3(tmp_path: Path) -> None:
    model = TinyModel()
    model.hf_device_map = {"": "cpu"}
    model.is_quantized = True
    args = make(tmp_path, zero=ZERO3)
    with pytest.raises(ConfigError) as caught:
        Trainer(model=model, args=args, train_dataset=[{"x": torch.ones(4)}])
    assert "device_map" in str(caught.value) and "quantized" in str(caught.value)


@pytest.fixture
def _no_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TrainingArguments writes these into the environment, and accelerate keeps its plugin for the process."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "set")  # so that it goes again
        monkeypatch.delenv(name)
    yield
    accelerate.state.AcceleratorState._reset_state()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_compiled_with_cuda_graphs(mode: str, tmp_path: Path, _no_dynamo: None) -> None:
    """Their addresses of weights are fixed, and at stage 3 weights move."""
    with pytest.raises(ConfigError, match="records CUDA graphs"):
        make(tmp_path, zero=ZERO3, torch_compile_mode=mode)
    make(tmp_path, zero=ZERO2, torch_compile_mode=mode)
    make(tmp_path, zero=ZERO3, torch_compile_mode="max-autotune-no-cudagraphs")
    accelerator = accelerate.Accelerator(
        cpu=True, dynamo_plugin=accelerate.utils.TorchDynamoPlugin(backend="inductor", mode=mode)
    )
    with pytest.raises(ConfigError, match="records CUDA graphs"):
        ZeroPlugin({**ZERO3, "train_micro_batch_size_per_gpu": 2}).attach(accelerator)
    model = TinyModel()
    keys = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=keys)[0]
    with pytest.raises(ConfigError, match=r"records CUDA graphs[\s\S]*max-autotune-no-cudagraphs"):
        engine.compile(mode=mode)
    engine.compile(backend="eager")
    engine.teardown()


# -------------------------------------------------------------------- the plugin
def test_attach_changes_the_accelerator_in_place() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    assert ZeroPlugin(ZERO2).attach(accelerator) is accelerator
    assert isinstance(accelerator, ZeroAcceleratorMixin) and isinstance(accelerator, accelerate.Accelerator)
    assert type(accelerator).__name__ == "ZeroAccelerator"
    assert type(accelerator) is type(ZeroPlugin(ZERO3).attach(accelerate.Accelerator(cpu=True)))


def test_engine_cast_replaces_autocast() -> None:
    """bf16 in the configuration: the engine casts. Only in the Accelerator: autocast over fp32, as accelerate does."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.native_amp
    ZeroPlugin({**ZERO2, "bf16": {"enabled": "auto"}}).attach(accelerator)
    assert not accelerator.native_amp
    other = accelerate.Accelerator(cpu=True)
    ZeroPlugin(ZERO2).attach(other)
    assert other.native_amp
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_attach_after_prepare_raises() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(StateError, match="attach"):
        ZeroPlugin(ZERO2).attach(accelerator)


def test_accumulation_must_agree() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        ZeroPlugin({**ZERO2, "gradient_accumulation_steps": 4}).attach(accelerator)
    ZeroPlugin({**ZERO2, "gradient_accumulation_steps": "auto"}).attach(accelerator)


def test_optimizer_of_an_unknown_model_raises() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    ZeroPlugin(ZERO2).attach(accelerator)
    with pytest.raises(StateError, match="prepared model"):
        accelerator.prepare(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))


def test_optimizer_state_is_not_handed_out() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    ZeroPlugin(ZERO2).attach(accelerator)
    model = torch.nn.Linear(2, 2)
    optimizer, model = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert isinstance(optimizer, ZeroAcceleratedOptimizer)
    with pytest.raises(StateError, match="save_checkpoint"):
        optimizer.state_dict()


# -------------------------------------------------------------------- python -m hf_zero.run
SCRIPT = """
import sys
import accelerate
import helper_beside_the_script
print(type(accelerate.Accelerator(cpu=True)).__name__, sys.argv[1:], __name__, helper_beside_the_script.NAME)
"""


def run(folder: Path, *arguments: str) -> Ran:
    script = Path(hf_zero.__file__).with_name("run.py")
    return run_script(script, *arguments, folder=folder, processes=1, instead=bare_environment())


@pytest.mark.slow
def test_run_becomes_the_script(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper_beside_the_script.py").write_text("NAME = 'helper'\n")
    done = run(tmp_path, "--zero", json.dumps(ZERO2), "scripts/train.py", "--zero", "x", "-m", "y")
    assert done.status == [0], done.err
    assert done.out.strip() == "ZeroAccelerator ['--zero', 'x', '-m', 'y'] __main__ helper"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--zero", '{"zero_optimisation": {}}', "train.py"), "zero_optimization"),
        pytest.param(("--zero", "{}", "nowhere.py"), "nowhere.py", marks=pytest.mark.slow),
        pytest.param(("--zero", "{}"), "script", marks=pytest.mark.slow),
        pytest.param(("train.py",), "--zero", marks=pytest.mark.slow),
    ],
)
def test_run_says_what_is_wrong_in_one_go(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    done = run(tmp_path, *arguments)
    assert done.status == [2]
    assert says in done.err and "Traceback" not in done.err and "ran" not in done.out


def test_the_registry_holds_the_configuration_strongly(tmp_path: Path) -> None:
    make(tmp_path, zero=ZERO3)  # the arguments themselves are dropped at once
    assert ACTIVATION.config is not None and ACTIVATION.config.stage == 3
