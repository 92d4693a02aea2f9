"""Progress bars: on a terminal and on one rank only, after two seconds, wherever work may take longer."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero import progress as progress_module
from hf_zero.engine.engine import engine_of
from hf_zero.extras.cli.main import main
from hf_zero.progress import progress
from tests.conversion.test_from_deepspeed import DATA
from tests.harness.ranks import run_ranks


def terminal() -> tuple[int, int]:
    """Both ends of one, which has a size as a real one has."""
    ends = os.openpty()
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    return ends


@contextmanager
def stderr_as(descriptors: tuple[int, int]) -> Iterator[list[str]]:
    """sys.stderr is the second of `descriptors`; after the block the list holds what came out of the first."""
    reads, writes = descriptors
    came, before = bytearray(), sys.stderr

    def read() -> None:
        while True:
            try:
                data = os.read(reads, 1 << 16)
            except OSError:  # what a terminal gives whose other end is closed
                return
            if not data:
                return
            came.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    text: list[str] = []
    try:
        with open(writes, "w", buffering=1) as stream:
            sys.stderr = stream
            yield text
    finally:
        sys.stderr = before
        reader.join()
        os.close(reads)
        text.append(came.decode())


def titles(text: str) -> list[str]:
    """Return the titles of the bars in it, in order."""
    return list(dict.fromkeys(re.findall(r"([A-Z][\w .-]+):\s+\d+(?:%\|| plans)", text.replace("\r", "\n"))))


def test_a_bar_appears_on_a_terminal_when_the_work_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress_module.DELAY_S == 2.0
    monkeypatch.setattr(progress_module, "DELAY_S", 0.15)
    seen = {}
    cases = {
        "long": (terminal, True, 0.2),
        "short": (terminal, True, 0.0),
        "other rank": (terminal, False, 0.2),
        "pipe": (os.pipe, True, 0.2),
    }
    for case, (opened, shown, seconds) in cases.items():
        with stderr_as(opened()) as text, progress("Reading it", 8000, shown=shown) as done:
            done(2000)
            time.sleep(seconds)
            done(4000)
        seen[case] = text[0]
    assert "Reading it:  75%" in seen["long"] and "6.00k/8.00k" in seen["long"] and "B/s" in seen["long"]
    assert seen["long"].rstrip(" ").endswith("\r"), "nothing is left behind"
    assert {case: text for case, text in seen.items() if case != "long"} == {"short": "", "other rank": "", "pipe": ""}


def test_without_a_terminal_there_is_no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "tqdm", None)
    with stderr_as(os.pipe()), progress("Nothing", 10) as done:
        done(10)


def work_on_both(folder: Path) -> list[list[str]]:
    """The titles of the bars of `work` on a terminal, and through a pipe."""
    progress_module.DELAY_S = 0
    return [titles(work(folder, on_terminal)) for on_terminal in (True, False)]


def work(folder: Path, on_terminal: bool) -> str:
    """Return what stderr gets from a load, a start, a save and a resume of a sharded model with states on a disk."""
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    with stderr_as(terminal() if on_terminal else os.pipe()) as text:
        hf_zero.enable({"zero_optimization": {"stage": 3}})
        model = GPT2LMHeadModel.from_pretrained(folder / "model")
        hf_zero.disable()
        assert engine_of(model) is not None
        linear = nn.Linear(8, 8)
        engine = hf_zero.initialize(model=linear, config=config)[0]
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        engine.save_checkpoint(folder / "run", tag="first")
        engine.load_checkpoint(folder / "run")
        engine.teardown()
    return text[0]


def test_loading_starting_saving_and_resuming_show_bars_on_rank_0(tmp_path: Path) -> None:
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    first, second = run_ranks(work_on_both, 2, tmp_path)
    assert first[0] == [
        "Partitioning parameters",
        "Loading weights",  # transformers' own
        "Reading shards",
        "Writing shards to disk",
        "Reserving optimizer states",
        "Saving first",
        "Loading first",
    ]
    assert (first[1], second) == ([], [[], []])


def test_conversions_and_estimates_show_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "DELAY_S", 0)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    GPT2Config(**sizes).save_pretrained(tmp_path / "model")
    came, ours = {}, str(tmp_path / "ours")
    commands = [
        ["convert", "from-deepspeed", str(DATA / "stage2"), ours],
        ["convert", "to-universal", ours, str(tmp_path / "theirs")],
        ["convert", "to-dcp", ours, str(tmp_path / "dcp")],
        ["convert", "from-dcp", str(tmp_path / "dcp"), str(tmp_path / "back")],
        ["estimate", str(tmp_path / "model"), "--gpu-memory", "8GB"],
    ]
    for command in commands:
        with stderr_as(terminal()) as text:
            assert main(command) == 0
        came[command[0] if command[0] == "estimate" else command[1]] = titles(text[0])
    assert came == {
        "from-deepspeed": ["Writing ours"],
        "to-universal": ["Writing global_step3_universal"],
        "to-dcp": ["Writing dcp"],
        "from-dcp": ["Writing back"],
        "estimate": ["Planning", "Trying micro-batches"],
    }
