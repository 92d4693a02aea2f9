"""DeepSpeed's memory estimators under its names: its numbers, its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import estimate
from hf_zero.extras.estimate.deepspeed_formulas import count_parameters
from hf_zero.runtime.zero import stage3, stage_1_and_2
from tests.harness.launches import write_script
from tests.harness.scripts import run_script

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "estimators.json").read_text())  # see its "made_by"

# The table that transformers' documentation shows for T0_3B (an encoder and a decoder, tied embeddings).
T0_3B = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 1 GPU per node.
SW: Model with 2783M total params, 65M largest layer params.
  per CPU  |  per GPU |   Options
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1
   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
ONE_LINER = """\
from transformers import T5Config, T5Model
import torch
from hf_zero.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
config = T5Config(vocab_size=32128, d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_decoder_layers=24,
                  num_heads=32, feed_forward_proj="gated-gelu")
with torch.device("meta"):
    model = T5Model(config)
estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1)
"""


def test_numbers_are_deepspeeds() -> None:
    assert len(GOLDEN["zero2"]) == len(GOLDEN["zero3"]) == 200
    for given, want in GOLDEN["zero2"]:
        assert list(stage_1_and_2.estimate_zero2_model_states_mem_needs(**given)) == want, given
    for given, want in GOLDEN["zero3"]:
        assert list(stage3.estimate_zero3_model_states_mem_needs(**given)) == want, given


def test_tables_are_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    calls: dict[str, Any] = {
        "zero2": estimate.estimate_zero2_model_states_mem_needs_all_cold,
        "zero3": estimate.estimate_zero3_model_states_mem_needs_all_cold,
    }
    assert len(GOLDEN["tables"]) == 12
    for name, given, want in GOLDEN["tables"]:
        calls[name](**given)
        assert capsys.readouterr().out == want


def test_the_documented_table(capsys: pytest.CaptureFixture[str]) -> None:
    stage3.estimate_zero3_model_states_mem_needs_all_cold(2_783_959_040, 65_798_144)
    assert capsys.readouterr().out == T0_3B


@pytest.mark.slow
def test_the_documented_line_after_the_rename(tmp_path: Path) -> None:
    done = run_script(write_script(tmp_path, ONE_LINER), folder=tmp_path, processes=1)
    assert done.status == [0], done.err
    assert done.out == T0_3B


def test_stage_2_of_a_live_model(capsys: pytest.CaptureFixture[str]) -> None:
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 2000), num_gpus_per_node=4)
    live = capsys.readouterr().out
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(2_002_000, num_gpus_per_node=4)
    assert capsys.readouterr().out == live
    assert "4 GPUs per node" in live
    assert "2M total params" in live


def test_shared_parameters_count_once_on_meta_too() -> None:
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = nn.ModuleDict({"embed": nn.Embedding(7, 5), "head": nn.Linear(5, 7), "free": nn.Linear(5, 7)})
            model["head"].weight = model["embed"].weight
        assert count_parameters(model) == (7 * 5 + 7 + 5 * 7 + 7, 5 * 7 + 7)
