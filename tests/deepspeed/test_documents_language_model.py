"""Scripts for a GPT-2 as tutorials on ZeRO write them, `deepspeed` replaced by `hf_zero`, by their launch lines."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, set_seed

from recipes.engine_loop.configs import configuration
from tests.harness.launches import fake_transports, finish, launch, processes_naming, start, write_script
from tests.harness.scripts import run_script

STEPS = 6
MODEL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 64}
MODEL |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # what is compared must not be random

# A model with random weights, text as bytes instead of a tokenizer's ids, and a loader that every rank has alike.
GPT2 = f"""
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(**{MODEL!r}))
"""
# The same calls of a model of torch alone, where the launch line is what is tested: transformers takes 3 s to import.
BIGRAMS = """
import torch
from types import SimpleNamespace

class Bigrams(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)

    def forward(self, input_ids, attention_mask, labels):
        scores = self.head(self.embedding(input_ids[:, :-1]))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten()))

torch.manual_seed(0)
model = Bigrams()
"""

DATA = f"""
from torch.optim import Adam
from torch.utils.data import DataLoader
import torch, hf_zero
import torch.distributed as dist

def tokens(texts):
    return torch.tensor([list(text.encode().ljust(48)) for text in texts])

texts = [f"sample {{i}}: the answer to question {{i * i}} is {{i % 7}}" for i in range({8 * STEPS})]
data_loader = DataLoader(texts, batch_size=8)
"""
COMMON = GPT2 + DATA

BY_FILE = """
from argparse import ArgumentParser

parser = ArgumentParser()
parser.add_argument("--deepspeed_config", default="zero.json", type=str)
parser.add_argument("--local_rank", default=0, type=int)
args = parser.parse_args()
optimizer = Adam(model.parameters(), lr=1e-3, weight_decay=3e-7)
engine, optimizer, _, scheduler = hf_zero.initialize(args=args, model=model, optimizer=optimizer)
"""

BY_DICT = """
optimizer = Adam(model.parameters(), lr=1e-3, weight_decay=3e-7)
engine, optimizer, _, scheduler = hf_zero.initialize(optimizer=optimizer, model=model, config=CONFIG)
"""

LOOP = """
model.train()
for i, data in enumerate(data_loader):
    ids = tokens(data).to(engine.device)
    loss = engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    engine.backward(loss)
    FAIL
    engine.step()
    if dist.get_rank() == 0:
        print(f"step:{i}, loss:{loss.item():.6f}")
"""


def config(stage: int) -> dict[str, object]:
    """The document's dict without what it says of schedules and fp16."""
    return {key: value for key, value in configuration(stage).items() if key not in ("scheduler", "fp16")}


def losses_of(text: str) -> list[float]:
    return [float(line.split("loss:")[1]) for line in text.splitlines() if "loss:" in line]


def plain_losses(source: str = GPT2) -> list[float]:
    """The same training by one process and torch alone."""
    made: dict[str, Any] = {}
    exec(source, made)
    model = made["model"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=3e-7)
    losses = []
    for step in range(STEPS):
        texts = [f"sample {i}: the answer to question {i * i} is {i % 7}" for i in range(8 * step, 8 * step + 8)]
        ids = torch.tensor([list(text.encode().ljust(48)) for text in texts])
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - (0.2 if source == GPT2 else 0.01)
    return losses


@pytest.mark.slow
def test_configuration_in_a_file(tmp_path: Path) -> None:
    script = write_script(tmp_path, COMMON + BY_FILE + LOOP.replace("FAIL", "pass"), "zero_args.py")
    (tmp_path / "dp_config.json").write_text(json.dumps(config(1)))
    job = run_script(script, "--deepspeed_config=dp_config.json", folder=tmp_path)
    assert job.status == [0, 0], job.err
    assert losses_of(job.out) == pytest.approx(plain_losses(), abs=2e-5)


@pytest.mark.slow
def test_configuration_in_the_script(tmp_path: Path) -> None:
    text = f"CONFIG = {config(3)!r}\n" + COMMON + LOCAL_RANK + BY_DICT + LOOP.replace("FAIL", "pass")
    script = write_script(tmp_path, text)
    for processes in (1, 2):
        job = run_script(script, "--local_rank={rank}", folder=tmp_path, processes=processes)
        assert job.status == [0] * processes, job.err
        assert losses_of(job.out) == pytest.approx(plain_losses(), abs=2e-5)


LOCAL_RANK = """
import sys
assert sys.argv[1:] and sys.argv[1].startswith("--local_rank="), sys.argv  # a script may leave it unread
"""


@pytest.mark.nightly
def test_two_hosts_of_a_hostfile(tmp_path: Path) -> None:
    write_script(tmp_path, BIGRAMS + DATA + BY_FILE + LOOP.replace("FAIL", "pass"), "zero_args.py")
    (tmp_path / "zero.json").write_text(json.dumps(config(2)))
    (tmp_path / "hostfile").write_text("hostname1 slots=8\nhostname2 slots=8\n")
    line = ["--num_gpus", 1, "--num_nodes", 2, "--hostfile", "hostfile", "--master_addr", "127.0.0.1"]
    more = fake_transports(tmp_path / "bin")
    job = launch(tmp_path, *line, "--master_port=19901", "zero_args.py", "--deepspeed_config", "zero.json", **more)
    assert job.status == 0, job.err
    assert losses_of(job.out) == pytest.approx(plain_losses(BIGRAMS), abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_rank_that_raises_ends_the_job(hosts: int, tmp_path: Path) -> None:
    """The other rank waits for it in a collective then."""
    fail = """if i == 3 and dist.get_rank() == 1: open("failed", "w"), 1 / 0"""
    script = write_script(tmp_path, BIGRAMS + DATA + BY_FILE + LOOP.replace("FAIL", fail))
    (tmp_path / "zero.json").write_text(json.dumps(config(3)))
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    line: list[object] = ["--num_gpus=2"] if hosts == 1 else ["-H", "hosts", "--master_addr", "127.0.0.1"]
    job = start(tmp_path, *line, "--master_port", 19910 + hosts, script, **fake_transports(tmp_path / "bin"))
    done = finish(job)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 30
    assert done.status == 1 and "ZeroDivisionError" in done.err
    assert "rank 1 failed on" in done.err
    assert processes_naming(str(script)) == []
    assert len(losses_of(done.out)) in (3, 4)


INFERENCE = """
    import os
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM
    import hf_zero

    world_size = int(os.getenv("WORLD_SIZE", "1"))
    hf_zero.init_distributed()
    config = AutoConfig.from_pretrained("t0")
    ds_config = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": config.d_model * config.d_model,
            "stage3_prefetch_bucket_size": int(0.9 * config.d_model * config.d_model),
            "stage3_param_persistence_threshold": 10 * config.d_model,
        },
        "steps_per_print": 2000,
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }
    dschf = hf_zero.HfZeroConfig(ds_config)
    model = AutoModelForSeq2SeqLM.from_pretrained("t0")
    engine = hf_zero.initialize(model=model, config_params=ds_config)[0]
    engine.module.eval()
    rank = torch.distributed.get_rank()
    inputs = torch.tensor(INPUTS[rank], device=engine.device)
    with torch.no_grad():
        outputs = engine.module.generate(inputs, synced_gpus=True, max_new_tokens=5)
    os.write(1, f"rank{rank}: {outputs[0].tolist()}\\n".encode())
"""


INPUTS = [[[3, 4, 5, 6]], [[9, 8, 7, 1]]]


@pytest.mark.slow
def test_inference_with_an_input_per_rank(tmp_path: Path) -> None:
    """Every rank has the text that plain transformers writes for its input."""
    set_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, decoder_start_token_id=0, tie_word_embeddings=False, initializer_factor=3.0)
    plain = T5ForConditionalGeneration(config).eval()
    plain.save_pretrained(tmp_path / "t0")
    texts = [plain.generate(torch.tensor(ids), max_new_tokens=5)[0].tolist() for ids in INPUTS]
    assert texts[0] != texts[1], "vacuous: the input does not matter"
    script = write_script(tmp_path, f"INPUTS = {INPUTS!r}\n" + textwrap.dedent(INFERENCE), "t0.py")
    for processes in (1, 2):
        job = run_script(script, folder=tmp_path, processes=processes)
        assert job.status == [0] * processes, job.err
        lines = sorted(line for line in job.out.splitlines() if line.startswith("rank"))
        assert lines == [f"rank{rank}: {texts[rank]}" for rank in range(processes)]


FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
SCHEDULE = {"total_num_steps": 300, "warmup_min_lr": 5e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 2}


@pytest.mark.slow
def test_fp16_and_a_schedule_in_the_configuration(tmp_path: Path) -> None:
    """The optimizer is the script's, the schedule the configuration's; the first loss scales are too high."""
    facts = "scale:{optimizer.cur_scale:g}, skipped:{engine.skipped_steps}, lr:{engine.get_lr()[0]:.8f}"
    show = f'dist.get_rank() or print(f"{facts}")'
    script = write_script(tmp_path, COMMON + BY_FILE + LOOP.replace("FAIL", show), "zero_args.py")
    mixed = {"fp16": FP16, "scheduler": {"type": "WarmupDecayLR", "params": SCHEDULE}}
    (tmp_path / "zero.json").write_text(json.dumps({**config(1), **mixed}))
    job = run_script(script, folder=tmp_path)
    assert job.status == [0, 0], job.err
    start = "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 262144, "
    assert (
        start + "but hysteresis is 2. Reducing hysteresis to 1" in job.err and start + "reducing to 131072" in job.err
    )
    last = next(line for line in reversed(job.out.splitlines()) if "scale:" in line)
    scale, skipped, rate = (float(part.split(":")[1]) for part in last.split(","))
    assert 2 <= skipped < STEPS - 2 and scale == 2.0 ** (19 - skipped)
    assert 0 < rate <= 1e-3 and losses_of(job.out)[-1] < losses_of(job.out)[int(skipped)] - 1e-3


@pytest.mark.slow
def test_a_loss_scale_that_cannot_go_lower_ends_all_ranks(tmp_path: Path) -> None:
    broken = LOOP.replace("engine.backward(loss)", 'engine.backward(loss * float("inf"))').replace("FAIL", "pass")
    script = write_script(tmp_path, COMMON + BY_FILE + broken, "zero_args.py")
    block = {**FP16, "initial_scale_power": 2, "hysteresis": 1}
    (tmp_path / "zero.json").write_text(json.dumps({**config(2), "fp16": block}))
    job = run_script(script, folder=tmp_path)
    assert job.status == [1, 1]
    text = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    assert text in job.err and "on rank 0:" in job.err and "on rank 1:" in job.err
    assert len(losses_of(job.out)) == 2
