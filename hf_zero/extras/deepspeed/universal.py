"""deepspeed.checkpoint.ds_to_universal's `main`: the checkpoint that another number of ranks, or another stage, loads.

Every checkpoint of hf_zero is one. Programs convert theirs all the same, and load the folder that this has written.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from hf_zero.checkpoint.format import manifest_path
from hf_zero.conversion.deepspeed import convert
from hf_zero.conversion.target import new_folder

# The key of what Megatron's programs give `save_checkpoint` in client_state, for this conversion.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"


class Arguments(Protocol):
    """The options of DeepSpeed's script that count here: its numbers of workers and its checks do not."""

    input_folder: str | Path
    output_folder: str | Path


def main(args: Arguments) -> None:
    """Copy the checkpoint of hf_zero in `input_folder` to `output_folder`, or convert one of DeepSpeed.

    Call on one rank.

    Raises:
        CheckpointError: `input_folder` holds no whole checkpoint, or `output_folder` exists.
    """
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not manifest_path(source).is_file():
        convert(source, target)
        return
    with new_folder(target) as beside:
        shutil.copytree(source, beside, dirs_exist_ok=True)
