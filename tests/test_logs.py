"""Levels of the log, and where it goes: each case is a program of its own, with a variable a Python of its own too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.scripts import run_script

Run = Callable[[str], tuple[list[str], list[str]]]

PROGRAM = """
import logging
import sys
import torch
import hf_zero
exec(sys.argv[1])
model = torch.nn.Linear(4, 4)
hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config={
    "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1})[0].teardown()
logging.getLogger("hf_zero.engine.engine").warning("a warning")
"""


@pytest.fixture
def run_here(tmp_path: Path) -> Run:
    """Run the program with a statement, in a process that has its imports; return its lines as `run` does."""

    def run(statement: str) -> tuple[list[str], list[str]]:
        script = tmp_path / "program.py"
        script.write_text(PROGRAM)
        ran = run_script(script, statement, folder=tmp_path, processes=1)
        assert ran.status == [0], ran.err
        return ran.out.splitlines(), ran.err.splitlines()

    return run


def run(**variables: str) -> tuple[list[str], list[str]]:
    """Return the lines of standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ""],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_without_a_call_the_log_has_warnings_and_that_zero_is_on() -> None:
    _, log = run()
    assert "[INFO] [hf_zero] hf_zero: ZeRO stage 2 over 1 rank" in log[0]
    assert all("[WARNING]" in line for line in log[1:]) and log[-1].endswith("[hf_zero] a warning")


@pytest.mark.parametrize("way", ["call", "variable"])
def test_info_shows_what_was_decided(way: str, run_here: Run) -> None:
    _, log = run_here("hf_zero.set_verbosity_info()") if way == "call" else run(HF_ZERO_VERBOSITY="info")
    keys = [line.split()[0] for line in log if " ..." in line]
    assert "zero_optimization.stage" in keys and "steps_per_print" in keys, log
    assert "zero_optimization.contiguous_gradients" not in keys and len(keys) < 10, keys


def test_debug_shows_every_key(run_here: Run) -> None:
    _, log = run_here("hf_zero.set_verbosity_debug()")
    keys = [line.split()[0] for line in log if " ..." in line]
    assert "zero_optimization.contiguous_gradients" in keys and len(keys) > 60


def test_error_shows_neither_warnings_nor_the_start() -> None:
    assert run(HF_ZERO_VERBOSITY="error")[1] == []


def test_a_wrong_level_is_named() -> None:
    _, log = run(HF_ZERO_VERBOSITY="loud")
    assert "HF_ZERO_VERBOSITY=loud is ignored: there is no level 'loud'" in log[0] and "debug, info, warning" in log[0]
    assert "ZeRO stage 2" in log[1]


@pytest.mark.parametrize("place", ["logging.basicConfig(format='mine %(message)s', level='INFO')", "package"])
def test_handlers_of_the_program_get_all_records_once(place: str, run_here: Run) -> None:
    on_package = (
        "handler = logging.StreamHandler(); handler.setFormatter(logging.Formatter('mine %(message)s'));"
        "logging.getLogger('hf_zero').addHandler(handler); hf_zero.set_verbosity_info()"
    )
    out, log = run_here(on_package if place == "package" else place)
    assert out == []
    assert [line for line in log if "[hf_zero]" in line] == []
    assert sum(line.startswith("mine hf_zero: ZeRO stage 2") for line in log) == 1
    assert sum(line == "mine a warning" for line in log) == 1
