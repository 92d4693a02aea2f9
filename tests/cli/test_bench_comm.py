"""`hf-zero bench comm` measures, in the words of `hf-zero estimate`, and one process alone is refused."""

from __future__ import annotations

import contextlib
import io
import json
import re
import unittest.mock

import pytest
import torch.distributed as dist

from hf_zero.extras.cli.main import main
from tests.harness.ranks import run_ranks


def measured(*words: str) -> str:
    """Return what a rank of two hosts prints, each of which is half of the ranks."""
    out = io.StringIO()

    def host_name() -> str:
        return str(2 * dist.get_rank() // dist.get_world_size())

    with (
        contextlib.redirect_stdout(out),
        unittest.mock.patch("hf_zero.distributed.rank_groups.host_name", host_name),
        unittest.mock.patch("hf_zero.distributed.comm.host_name", host_name),
    ):
        assert main(["bench", "comm", "--size", "64kB", *words]) == 0
    return out.getvalue()


def test_hosts_of_several_ranks() -> None:
    first, *others = run_ranks(measured, 4, "--json")
    assert others == ["", "", ""]
    found = json.loads(first)
    assert (found.pop("ranks"), found.pop("hosts"), found.pop("backend")) == (4, 2, "gloo")
    assert sorted(found) == ["decode", "latency_us", "link", "network"] and all(value > 0 for value in found.values())


def test_hosts_of_one_rank_print_options_of_estimate() -> None:
    last = run_ranks(measured, 2)[0].splitlines()[-1]
    assert re.fullmatch(
        r"hf-zero estimate MODEL \.\.\. --network [\d.]+[kMG]B/s --decode [\d.]+[kMG]B/s --latency \d+", last
    )


def test_one_process_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm"]) == 2
    assert "start one for each rank" in capsys.readouterr().err
