"""The rows of DeepSpeed's data efficiency and compression blocks.

hf_zero leaves both to other tools, but a misspelt key in them is found all the same.
"""

from __future__ import annotations

from hf_zero.config.schema import Block, Entry, Key, choice, count, flag, free, integer, real, text


def _list() -> Key:
    return Key(kind="list")


_SCHEDULE_CONFIG = {
    "total_curriculum_step": count(),
    "difficulty_step": count(),
    "root_degree": count(),
    "difficulty": _list(),
    "max_step": _list(),
}
CURRICULUM = Block(
    keys={
        "enabled": flag(False),
        "curriculum_type": text("seqlen"),
        "min_difficulty": count(),
        "max_difficulty": count(),
        "schedule_type": text(),
        "schedule_config": Block(keys=_SCHEDULE_CONFIG),
    }
)

DATA_SAMPLING = Block(
    keys={
        "enabled": flag(False),
        "num_epochs": count(1000),
        "num_workers": count(0),
        "pin_memory": flag(False),
        "curriculum_learning": Block(
            keys={"enabled": flag(False), "data_cluster_path": text(), "curriculum_metrics": free()},
        ),
        "dynamic_batching": Block(
            keys={
                "enabled": flag(False),
                "metrics_path": text(),
                "lr_scaling_method": choice("linear", "linear", "sqrt", "none"),
                "min_batch_size": count(1),
                "max_batch_size": count(),
                "sequence_picking_order": choice("dataloader", "random", "seqlen", "dataloader"),
                "max_tokens": count(),
                "verbose": flag(False),
            }
        ),
    }
)

RANDOM_LTD = Block(
    keys={
        "enabled": flag(False),
        "total_layer_num": count(),
        "random_ltd_layer_num": count(),
        "random_ltd_layer_id": _list(),
        "model_mask_name": text(),
        "model_type": text(),
        "micro_batch_size": count(),
        "global_batch_size": count(),
        "hidden_state_order": text(),
        "random_ltd_schedule": Block(
            keys={
                "min_value": count(),
                "max_value": count(),
                "schedule_type": text(),
                "schedule_config": Block(keys={"require_steps": count(), "seq_per_step": count()}),
            }
        ),
        "layer_token_lr_schedule": Block(
            keys={
                "enabled": flag(False),
                "total_layer_tokens": count(),
                "warmup_type": text(),
                "warmup_layer_tokens": count(),
            }
        ),
    }
)

DATA_EFFICIENCY = Block(
    keys={
        "enabled": flag(False),
        "seed": integer(1234),
        "data_sampling": DATA_SAMPLING,
        "data_routing": Block(keys={"enabled": flag(False), "random_ltd": RANDOM_LTD}),
    }
)

_MIXED = Block(keys={"enabled": flag(False), "quantize_change_ratio": real(0.001)})


def _technique(**shared: Entry) -> Block:
    """A compression technique: what all its groups share, and groups under names of the user's own."""
    keys: dict[str, Entry] = {
        "enabled": flag(False),
        "schedule_offset": count(),
        "schedule_offset_end": count(),
        **shared,
    }
    return Block(keys={"shared_parameters": Block(keys=keys), "different_groups": free()})


COMPRESSION = Block(
    keys={
        "layer_reduction": Block(
            keys={
                "enabled": flag(False),
                "keep_number_layer": count(),
                "module_name_prefix": text(),
                "teacher_layer": _list(),
                "other_module_name": _list(),
            }
        ),
        "weight_quantization": _technique(
            quantizer_kernel=flag(False),
            quantize_groups=count(),
            quantize_verbose=flag(False),
            quantization_type=text(),
            quantize_weight_in_forward=flag(False),
            rounding=text(),
            fp16_mixed_quantize=_MIXED,
        ),
        "activation_quantization": _technique(quantization_type=text(), range_calibration=text()),
        "sparse_pruning": _technique(
            method=text(),
            schedule_offset_stride=count(),
            dense_ratio=real(),
            block_pattern=text(),
            excluded_modules=_list(),
        ),
        "row_pruning": _technique(method=text()),
        "head_pruning": _technique(method=text(), num_heads=count()),
        "channel_pruning": _technique(method=text()),
    }
)

QUANTIZE_TRAINING = Block(
    keys={
        "enabled": flag(True),
        "quantize_verbose": flag(False),
        "quantizer_kernel": flag(False),
        "quantize_type": text(),
        "quantize_algo": free(),
        "quantize_bits": Block(keys={"start_bits": count(), "target_bits": count()}),
        "quantize_schedule": Block(keys={"quantize_period": count(), "schedule_offset": count()}),
        "quantize_groups": count(),
        "fp16_mixed_quantize": _MIXED,
        "quantize_eigenvalue": flag(False),
        "eigenvalue": free(),
    }
)

WEIGHT_QUANTIZATION = Block(
    keys={
        "enabled": flag(True),
        "num_bits": count(8),
        "q_type": text("symmetric"),
        "q_groups": count(1),
        "quantized_initialization": free(),
        "post_init_quant": free(),
    },
)

DATA: dict[str, Entry] = {
    "curriculum_learning": CURRICULUM,
    "data_efficiency": DATA_EFFICIENCY,
    "compression_training": COMPRESSION,
    "quantize_training": QUANTIZE_TRAINING,
    "weight_quantization": WEIGHT_QUANTIZATION,
}
