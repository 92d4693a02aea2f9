"""Programs written for DeepSpeed, unchanged, and the libraries' own paths for it: `--as-deepspeed`, on two processes.

Ranks find what they look for at the start of their Python, in processes of their own or in a fork server of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.extras.launcher.node import free_port
from tests.harness.launches import bare_environment, launch, write_script
from tests.harness.scripts import run_script

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ON_CPU = {"ACCELERATE_USE_CPU": "true"}  # without a launcher that says so, accelerate takes one process

_MODEL = """
    import torch, transformers
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64)).save_pretrained("llama")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes, vocab_size=64, dropout_rate=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained("t5")
"""
_ROWS = "torch.randint(1, 64, (64, 12), generator=torch.Generator().manual_seed(1))"
TRAINER = f"""
    import torch
    from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

    args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained("llama")
    rows = [{{"input_ids": row, "labels": row}} for row in {_ROWS}]
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    trainer.save_model()
    print(trainer.is_deepspeed_enabled, trainer.accelerator.distributed_type, args.world_size)
"""
GENERATES = f"""
    import torch
    from transformers import AutoModelForSeq2SeqLM, HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments

    args, = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForSeq2SeqLM.from_pretrained("t5")
    rows = [{{"input_ids": row, "labels": row[:6]}} for row in {_ROWS}]
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    print(trainer.predict(rows[:9], max_length=8).predictions.tolist())
"""
# LLaMA-Factory looks at `generate`, and TRL prepares a reference model by itself.
LOOKS = f"""
    import torch
    from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
    from trl.models.utils import prepare_deepspeed

    args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model, reference = (AutoModelForCausalLM.from_pretrained("llama") for _ in range(2))
    assert "GenerationMixin.generate" in str(model.generate.__func__) and model.generate.__self__ is model
    trainer = Trainer(model=model, args=args)
    if trainer.is_deepspeed_enabled:
        reference = prepare_deepspeed(reference, trainer.accelerator)
    rows = {_ROWS}[:4]
    print(f"{{reference(input_ids=rows, labels=rows).loss:.6f}} {{model.generate(rows, max_length=16).tolist()}}")
"""
SFT = f"""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

    args, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
    torch.manual_seed(args.seed)  # TRL 1.2 makes adapters before the Trainer does so
    words = Tokenizer(WordLevel({{f"w{{index}}": index for index in range(64)}}, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    data = Dataset.from_dict({{"input_ids": {_ROWS}.tolist()}})
    SFTTrainer(
        model=model.model_name_or_path, args=args, train_dataset=data, processing_class=tokenizer,
        peft_config=get_peft_config(model),
    ).train()
"""
# TRL's trainers that generate take DeepSpeed's hooks away meanwhile, and put them back.
ROLLS_OUT = f"""
    import torch
    from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
    from trl.models.utils import unwrap_model_for_generation

    class RollingOut(Trainer):
        def training_step(self, model, *more):
            with unwrap_model_for_generation(model, self.accelerator) as whole:
                print(self.state.global_step, whole.generate(rows[:2], max_length=16, do_sample=False).tolist())
            return super().training_step(model, *more)

    args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    rows = {_ROWS}
    data = [{{"input_ids": row, "labels": row}} for row in rows]
    RollingOut(model=AutoModelForCausalLM.from_pretrained("llama"), args=args, train_dataset=data).train()
"""
# FlagEmbedding's way to save; its `_save` looks at no state dict.
SAVES = TRAINER.replace(
    "args, =",
    """class Saving(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.save_pretrained(output_dir, state_dict=state)

    args, =""",
).replace("trainer = Trainer(", "trainer = Saving(")
# ZeRO-Inference loads weights without gradients. Files of older savers hold tied weights twice, and where their values
# differ they stay apart.
INFERS = f"""
    import sys
    import deepspeed, safetensors.torch, torch, transformers
    from transformers.integrations import HfDeepSpeedConfig

    zero = {{"stage": 3, "stage3_param_persistence_threshold": 0}}
    config = {{"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}}
    for other in (False, True):
        name = f"twice-{{other}}"
        if "--make" in sys.argv:
            model = transformers.AutoModelForCausalLM.from_pretrained("llama", tie_word_embeddings=True)
            model.save_pretrained(name)
            state = safetensors.torch.load_file(f"{{name}}/model.safetensors")
            state["lm_head.weight"] = state["model.embed_tokens.weight"].roll(int(other), 0).clone()
            safetensors.torch.save_file(state, f"{{name}}/model.safetensors", metadata={{"format": "pt"}})
        kept = HfDeepSpeedConfig(config) if "--make" not in sys.argv else None
        with torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
            if kept is not None:
                model = deepspeed.initialize(model=model, config_params=config)[0].module
            tokens = model.generate({_ROWS}[:2], max_length=16, do_sample=False).tolist()
        line = f"{{model.lm_head.weight is model.model.embed_tokens.weight}} {{tokens}}"
        print(line + "\\n", end="")
"""
# transformers and PEFT gather what they resize or decompose; hf_zero has gathered it for them already.
PREPARES = f"""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

    args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained("llama")
    torch.manual_seed(1)
    model.resize_token_embeddings(70)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"], use_dora=True,
        init_lora_weights="pissa",
    )
    rows = [{{"input_ids": row, "labels": row}} for row in {_ROWS} + 6]
    trainer = Trainer(model=get_peft_model(model, config), args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
"""
# The new rows of the embedding stay frozen, and PEFT saves them all the same.
RESIZES = PREPARES.replace('"embed_tokens", "lm_head"', '"lm_head"')
# The choice between the file's optimizer and the script's is that of accelerate's own examples.
LOOP = f"""
    import torch, transformers
    from accelerate import Accelerator
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

    accelerator = Accelerator(gradient_accumulation_steps=2)
    plugin = accelerator.state.deepspeed_plugin
    dummies = plugin is not None and "optimizer" in plugin.deepspeed_config
    model = transformers.AutoModelForCausalLM.from_pretrained("llama")
    optimizer = (DummyOptim if dummies else torch.optim.AdamW)(model.parameters(), lr=1e-3, weight_decay=0.1)
    loader = torch.utils.data.DataLoader({_ROWS}, batch_size=4)
    if dummies:
        scheduler = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
    else:
        scheduler = transformers.get_constant_schedule(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean().item()
        if accelerator.sync_gradients:
            accelerator.print({{"loss": f"{{mean:.4f}}", "grad_norm": f"{{float(norm):.4f}}"}})
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    accelerator.load_state("state")
    state = accelerator.get_state_dict(model)
    whole = accelerator.unwrap_model(model)
    whole.save_pretrained("saved", is_main_process=accelerator.is_main_process, state_dict=state)
    print(accelerator.distributed_type, accelerator.num_processes, optimizer.param_groups[0]["lr"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, scripts that know DeepSpeed only, and a file for each stage."""
    folder = tmp_path_factory.mktemp("deepspeed")
    scripts = {"trainer": TRAINER, "generates": GENERATES, "sft": SFT, "looks": LOOKS, "loop": LOOP}
    for name, text in {
        **scripts,
        "rolls_out": ROLLS_OUT,
        "prepares": PREPARES,
        "resizes": RESIZES,
        "infers": INFERS,
        "saves": SAVES,
    }.items():
        write_script(folder, text, f"{name}.py")
    for stage in (2, 3):
        config = {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
        }
        (folder / f"ds{stage}.json").write_text(json.dumps(config))
    python(folder, write_script(folder, _MODEL, "models.py"))
    return folder


def python(folder: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    environment = bare_environment(**{"PYTHONPATH": str(ROOT), **ENVIRONMENT, **more})
    if library := os.environ.get("HF_ZERO_LIBRARY"):
        environment["HF_ZERO_LIBRARY"] = library
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def job(folder: Path, script: str, *arguments: object, stage: int = 0, save: str = "no") -> str:
    """Run `script` on two processes, at a stage of DeepSpeed or by DDP; return what the ranks have printed."""
    given = ["--output_dir", f"{Path(script).stem}-{stage}", "--max_steps", 4, "--save_steps", 2]
    given += ["--save_strategy", save, "--logging_steps", 1, "--report_to", "none", "--disable_tqdm", True]
    given += ["--learning_rate", 1e-2, "--per_device_train_batch_size", 4, *arguments]
    if stage:
        given += ["--deepspeed", f"ds{stage}.json"]
    ran = run_script(folder / script, *given, folder=folder, as_deepspeed=bool(stage), **({} if stage else ON_CPU))
    assert ran.status == [0, 0], f"{ran.out}\n{ran.err}"
    return ran.out


def numbers(printed: str) -> list[str]:
    """Return the losses and gradient norms, with the digits that were printed."""
    found = re.findall(r"'((?:eval_)?loss|grad_norm)': '([\d.]+)'", printed)
    assert len(found) >= 4, printed
    return [f"{name} {value}" for name, value in found]


# -------------------------------------------------------------------- what is found
def test_a_plain_import_changes_nothing(tmp_path: Path) -> None:
    text = """
        import importlib.util, sys
        before = [*sys.meta_path], [*sys.path], [*sys.path_hooks]
        import hf_zero, hf_zero.zero, hf_zero.utils
        assert before == ([*sys.meta_path], [*sys.path], [*sys.path_hooks])
        assert "deepspeed" not in sys.modules and "deepspeed" not in (importlib.util.find_spec("deepspeed"),)
        import torch
        assert not hasattr(torch.nn.Parameter, "ds_id")
    """
    python(tmp_path, write_script(tmp_path, text))


def test_a_program_finds_the_facade(tmp_path: Path) -> None:
    """The first line is the program's own; a package of that name is there too, and one line says which is used."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise AssertionError('the other one')")
    text = """
        import hf_zero; hf_zero.as_deepspeed()
        import importlib.metadata, importlib.util
        import deepspeed
        import deepspeed.comm as dist
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        import torch
        from transformers.integrations.deepspeed import is_deepspeed_available
        from accelerate.utils import DummyOptim, compare_versions
        hf_zero.as_deepspeed()

        assert importlib.metadata.version("deepspeed") == deepspeed.__version__
        assert "deepspeed" in importlib.metadata.packages_distributions()
        assert importlib.util.find_spec("deepspeed.ops.adam") is not None
        assert deepspeed.__file__.startswith(hf_zero.__path__[-1])
        assert is_deepspeed_available() and compare_versions("deepspeed", ">=", "0.18.2")
        model = torch.nn.Linear(4, 2)
        assert not hasattr(model.weight, "ds_id")
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )
        assert isinstance(engine, deepspeed.DeepSpeedEngine) and dist.get_world_size() == 1
        weight = model.weight
        assert (weight.ds_id, weight.ds_shape, weight.ds_numel) == (0, (2, 4), 8)
        assert weight.ds_status is ZeroParamStatus.AVAILABLE and weight.ds_tensor.numel() == 8
        whole = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
        assert torch.equal(torch.cat(engine.optimizer.fp32_partitioned_groups_flat), whole)
        assert not hasattr(engine.optimizer, "single_partition_of_fp32_groups")
        for name, instead in ("runtime.rollout", "TRL's trainers"), ("pt.deepspeed_utils", "deepspeed.runtime.utils"):
            try:
                importlib.import_module(f"deepspeed.{name}").anything()
            except NotImplementedError as error:
                assert instead in str(error), error
            else:
                raise AssertionError(name)
    """
    done = python(tmp_path, write_script(tmp_path, text))
    lines = [line for line in done.stderr.splitlines() if "import deepspeed" in line]
    assert len(lines) == 1 and str(tmp_path / "deepspeed") in lines[0], done.stderr


def test_too_late(tmp_path: Path) -> None:
    text = """
        import accelerate, hf_zero
        try:
            hf_zero.as_deepspeed()
        except hf_zero.StateError as error:
            assert "accelerate" in str(error) and "first line" in str(error), error
        else:
            raise AssertionError
    """
    python(tmp_path, write_script(tmp_path, text))


def test_children_find_it(tmp_path: Path) -> None:
    """Whatever the program starts by this Python finds it too; a sitecustomize of the environment still runs."""
    (tmp_path / "other").mkdir()
    write_script(tmp_path / "other", "import os\nos.environ['OTHER'] = 'ran'", "sitecustomize.py")
    child = "import os, sys, deepspeed; print(deepspeed.__version__, os.environ['OTHER'], 'torch' in sys.modules)"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)"
    write_script(tmp_path, text, "script.py")
    paths = os.pathsep.join([str(ROOT), str(tmp_path / "other")])
    done = python(tmp_path, "-m", "hf_zero.run", "--as-deepspeed", "script.py", PYTHONPATH=paths)
    assert re.fullmatch(r"0\.\d+\.\d+ ran False\n", done.stdout), done.stdout


def test_accelerate_without_deepspeed_is_as_without_the_facade(tmp_path: Path) -> None:
    """Two ranks would be two trainings that overwrite each other's files where it took them for one process each."""
    text = """
        import hf_zero; hf_zero.as_deepspeed()
        from accelerate import Accelerator
        print(Accelerator().distributed_type)
    """
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = python(tmp_path, write_script(tmp_path, text), **rank, **address, **ON_CPU)
    assert done.stdout == "DistributedType.MULTI_CPU\n"


# -------------------------------------------------------------------- the libraries' own paths
@pytest.mark.slow
def test_trainer(folder: Path) -> None:
    """Losses, norms and evaluation have DDP's digits, and a resumed run goes on with them; weights are whole."""
    wanted = numbers(job(folder, "trainer.py"))
    for stage in (2, 3):
        printed = job(folder, "trainer.py", stage=stage, save="steps")
        assert numbers(printed) == wanted
        assert "True DistributedType.DEEPSPEED 2" in printed
        saved = folder / f"trainer-{stage}"
        assert (saved / "model.safetensors").is_file()
        assert (saved / "checkpoint-2" / "global_step2" / "zero" / "manifest.json").is_file()
    resumed = job(folder, "trainer.py", "--resume_from_checkpoint", "trainer-3/checkpoint-2", stage=3)
    assert numbers(resumed) == wanted[4:]


@pytest.mark.slow
def test_a_trainer_that_saves_in_its_own_way(folder: Path) -> None:
    wanted = numbers(job(folder, "saves.py", save="steps"))
    assert numbers(job(folder, "saves.py", stage=3, save="steps")) == wanted
    for name in ("checkpoint-2", "."):
        found, saved = (load_file(folder / f"saves-{stage}" / name / "model.safetensors") for stage in (3, 0))
        torch.testing.assert_close(found, saved, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_predict_with_generate(folder: Path) -> None:
    wanted = job(folder, "generates.py", "--predict_with_generate", True)
    printed = job(folder, "generates.py", "--predict_with_generate", True, stage=3)
    assert numbers(printed) == numbers(wanted)
    tokens = [max(re.findall(r"\[\[.*\]\]", text), key=len) for text in (wanted, printed)]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_sft(adapters: bool, folder: Path) -> None:
    """TRL's chunked loss reads the head's weight by itself, and asks for `ds_status`."""
    given: list[Any] = ["--model_name_or_path", "llama", "--bf16", False, "--gradient_checkpointing", False]
    given += ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"] if adapters else []
    assert numbers(job(folder, "sft.py", *given, stage=3)) == numbers(job(folder, "sft.py", *given))


@pytest.mark.slow
def test_generating_between_steps(folder: Path) -> None:
    wanted, printed = job(folder, "rolls_out.py"), job(folder, "rolls_out.py", stage=3)
    assert numbers(printed) == numbers(wanted)
    tokens = [sorted(re.findall(r"\d \[\[.*\]\]", text)) for text in (wanted, printed)]
    assert len(tokens[0]) == 8 and tokens[0] == tokens[1]


@pytest.mark.slow
def test_inference_loads_tied_weights_that_are_stored_twice(folder: Path) -> None:
    wanted = run_script(folder / "infers.py", "--make", folder=folder, processes=1, as_deepspeed=True)
    ran = launch(folder, "--as-deepspeed", "--num_gpus", 2, "infers.py", timeout=120, **ENVIRONMENT)
    assert (wanted.status, ran.status) == ([0], 0), f"{wanted.err}\n{ran.err}"
    lines = wanted.out.splitlines()
    assert [line[:6] for line in lines] == ["True [", "False "] and lines[0][5:] != lines[1][6:], wanted.out
    assert sorted(ran.out.splitlines()) == sorted(lines * 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepares", "resizes"])
def test_weights_that_libraries_change_first(name: str, folder: Path) -> None:
    assert numbers(job(folder, f"{name}.py", stage=3)) == numbers(job(folder, f"{name}.py"))
    found, saved = (load_file(folder / f"{name}-{stage}" / "adapter_model.safetensors") for stage in (3, 0))
    torch.testing.assert_close(found, saved, rtol=1e-4, atol=1e-6)
    assert saved["base_model.model.model.embed_tokens.weight"].shape[0] == 70


@pytest.mark.slow
def test_what_libraries_look_at(folder: Path) -> None:
    wanted = set(re.findall(r"\d\.\d{6} \[\[.*", job(folder, "looks.py")))
    assert len(wanted) == 1
    for stage in (2, 3):
        assert set(re.findall(r"\d\.\d{6} \[\[.*", job(folder, "looks.py", stage=stage))) == wanted


_YAML = """
    compute_environment: LOCAL_MACHINE
    distributed_type: DEEPSPEED
    machine_rank: 0
    main_process_port: 0
    num_machines: 1
    num_processes: 2
    deepspeed_config:
"""
_KEYS = """\
      gradient_accumulation_steps: 2
      gradient_clipping: 1.0
      offload_optimizer_device: none
      offload_param_device: none
      zero3_init_flag: true
      zero3_save_16bit_model: true
      zero_stage: 3
    mixed_precision: 'no'
"""


@pytest.mark.slow
def test_accelerate_launch(folder: Path) -> None:
    """The yaml has the keys themselves, or names a file whose blocks DummyOptim and DummyScheduler stand for."""
    wanted = run_script(folder / "loop.py", folder=folder, **ON_CPU)
    assert wanted.status == [0, 0], wanted.err
    weights = load_file(folder / "saved" / "model.safetensors")
    config = json.loads((folder / "ds2.json").read_text())
    rates = {"warmup_min_lr": 1e-3, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    config["scheduler"] = {"type": "WarmupDecayLR", "params": rates}
    (folder / "blocks.json").write_text(json.dumps(config))
    for keys in (_KEYS, "      deepspeed_config_file: blocks.json\n"):
        yaml = write_script(folder, _YAML + keys, "deepspeed.yaml")
        line = ["-m", "hf_zero.run", "--as-deepspeed", "-m", "accelerate.commands.launch", "--config_file", yaml]
        printed = python(folder, *line, "loop.py").stdout
        assert "DistributedType.DEEPSPEED 2" in printed, printed
        saved = load_file(folder / "saved" / "model.safetensors")
        if keys == _KEYS:
            assert numbers(printed) == numbers(wanted.out)
            torch.testing.assert_close(saved, weights, atol=1e-5, rtol=0)
        else:  # the rates of the blocks' schedule differ after the warm-up
            assert numbers(printed)[:4] == numbers(wanted.out)[:4] and saved.keys() == weights.keys()
