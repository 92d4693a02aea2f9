"""The configurations that the document hands to `initialize` as a dict, by the names of its scripts."""

from __future__ import annotations

from typing import Any


def configuration(
    stage: int, *, batch: int = 16, accumulation: int = 1, lr: float = 3e-5, power: int = 32, hysteresis: int = 2
) -> dict[str, Any]:
    """Return one of its three dicts, which differ in these arguments."""
    schedule = {"total_num_steps": 300, "warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": 30}
    return {
        "train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "fp16": {
            "enabled": True,
            "initial_scale_power": power,
            "loss_scale_window": 1000,
            "hysteresis": hysteresis,
            "min_loss_scale": 1,
        },
        "zero_optimization": {
            "stage": stage,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
        },
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "steps_per_print": 9999999999,
    }


CONFIGS = {
    "zero_config": configuration(1),
    "zero_config.3.org": configuration(3),
    "zero_config.3": {
        **configuration(3, batch=32, accumulation=8, lr=1e-5, power=8, hysteresis=4),
        "gradient_clipping": 1.0,
    },
}
