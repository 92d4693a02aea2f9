"""Writes tests/golden/estimators.json: what DeepSpeed's memory estimators say for 200 random inputs.

    python tests/golden/estimators.py > tests/golden/estimators.json     # in an environment with DeepSpeed

The file in the repository was made with DeepSpeed 0.19.8. Each row is [arguments, result] for a function; `tables` are
the printed tables of a few of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import random

import deepspeed
from deepspeed.runtime.zero import stage3, stage_1_and_2


def main() -> None:
    rng = random.Random(0)
    zero2, zero3, tables = [], [], []
    for number in range(200):
        total = int(10 ** rng.uniform(3, 12))
        largest = rng.randint(1, total)
        shape = {"num_gpus_per_node": rng.randint(1, 16), "num_nodes": rng.randint(1, 64)}
        factor = {"additional_buffer_factor": rng.choice([1.0, 1.25, 1.5, 2.0])}
        two = {"total_params": total, **shape, "cpu_offload": rng.random() < 0.5, **factor}
        zero2.append([two, stage_1_and_2.estimate_zero2_model_states_mem_needs(**two)])
        three = {
            **two,
            "largest_layer_params": largest,
            "cpu_offload_params": rng.random() < 0.5,
            "zero_init": rng.random() < 0.5,
        }
        zero3.append([three, stage3.estimate_zero3_model_states_mem_needs(**three)])
        if number < 6:
            for name, call, arguments in (
                ("zero2", stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold, {}),
                ("zero3", stage3.estimate_zero3_model_states_mem_needs_all_cold, {"largest_layer_params": largest}),
            ):
                given = {"total_params": total, **arguments, **shape, **factor}
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    call(**given)
                # From Python 3.11 on, its enum prints with its class; its documentation has what came before.
                text = out.getvalue().replace("OffloadDeviceEnum.cpu", "cpu ")
                tables.append([name, given, text])
    made = {"deepspeed": deepspeed.__version__, "made_by": "tests/golden/estimators.py"}
    print(json.dumps({**made, "zero2": zero2, "zero3": zero3, "tables": tables}, separators=(",", ":")))


if __name__ == "__main__":
    main()
