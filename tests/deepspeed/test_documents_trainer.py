"""A Trainer script with transformers' own command line, as the launch lines of its DeepSpeed guide start it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.launches import write_script
from tests.harness.scripts import run_script

SCRIPT = """
    import os
    from dataclasses import dataclass
    from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, set_seed
    from hf_zero import Trainer, TrainingArguments

    @dataclass
    class ModelArguments:
        width: int = 16

    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(n_layer=1, n_embd=model_args.width, n_head=2, vocab_size=32, n_positions=8)
    rows = [[i % 32, (i + 1) % 32, (i + 2) % 32] for i in range(32)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(GPT2LMHeadModel(config), training_args, train_dataset=data)
    result = trainer.train()
    rank, world = training_args.process_index, training_args.world_size
    os.write(1, f"RESULT {rank} {world} {trainer.state.global_step} {result.training_loss}\\n".encode())
"""

CONFIG = {
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.mark.slow
def test_one_host_and_two(tmp_path: Path) -> None:
    """Two processes, and those that a hostfile of two hosts starts: the same ranks, the same loss.

    `test_two_hosts_of_a_hostfile` launches such a line, `test_two_agents_meet` has what its processes are given.
    """
    path = write_script(tmp_path, SCRIPT, "run_lm.py")
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    script: list[object] = [
        "--zero",
        "ds_config.json",
        "--output_dir",
        "out",
        "--max_steps",
        4,
        "--save_strategy",
        "no",
    ]
    script += ["--per_device_train_batch_size", 4, "--use_cpu", "True", "--report_to", "none", "--width", 24]
    here = run_script(path, *script, folder=tmp_path)
    assert here.status == [0, 0], here.err
    first_of_its_host = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1", "ACCELERATE_USE_CPU": "true"}
    two = run_script(path, "--local_rank=0", *script, folder=tmp_path, **first_of_its_host)
    assert two.status == [0, 0], two.err
    results = [
        sorted(text.split()[1:] for text in out.splitlines() if text.startswith("RESULT"))
        for out in (here.out, two.out)
    ]
    assert [row[:3] for row in results[0]] == [["0", "2", "4"], ["1", "2", "4"]]
    assert 2 < float(results[0][0][3]) < 4
    assert results[0] == results[1]
