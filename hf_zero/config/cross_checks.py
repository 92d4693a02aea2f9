"""Contradictions between keys, and refusals of keys that are on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_zero.config.conditions import (
    ACTIVATIONS,
    BF16_MASTERS,
    BF16_STATES,
    FORCE,
    NATIVE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    STAGE,
    ZERO,
    has_bf16_masters,
    is_known,
    medium,
    runs_in_torch,
    updates_natively,
)
from hf_zero.config.conditions import PARAMS as _PARAMS
from hf_zero.config.keys import root, typed_blocks
from hf_zero.config.problems import Problems
from hf_zero.config.resolved import MAX_SCALE, MIN_SCALE
from hf_zero.config.schema import Alias, Block, Conflict, Get, either, look_up, show, walk

CONTIGUOUS, NUMBER_CHECKPOINTS = f"{ACTIVATIONS}.contiguous_memory_optimization", f"{ACTIVATIONS}.number_checkpoints"
_BUDGET = f"{ACTIVATIONS}.activation_memory"
MOMENTS = f"{_PARAMS}.fp32_optimizer_states"
_OFFLOAD = f"{OFFLOAD_OPTIMIZER}.device"
_PROF_OPS = "comms_logger.prof_ops"
GROUP = f"{ZERO}.sharding_group"
_DELAYED = f"{OFFLOAD_OPTIMIZER}.delayed_update"
# The collectives of an engine, by DeepSpeed's names.
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")


def refusals(values: Mapping[str, Any], problems: Problems) -> list[str]:
    """Add a problem for each key that is on and not supported yet; return the blocks that are refused as a whole."""
    blocks = []
    for path, entry in walk(root()):
        if isinstance(entry, Alias) or not entry.refused:
            continue
        value = look_up(values, path)
        if entry.is_on(value):
            blocks += [path] if isinstance(entry, Block) else []
            problems.add(path, value, "not supported yet", entry.refused, shown=_switch(path, value))
    for name, block in typed_blocks():
        kind = block.type_of(look_up(values, f"{name}.type"))
        blocks += [f"{name}.params"] if kind is not None and kind.refused else []
    return blocks


def _switch(path: str, value: Any) -> tuple[str, Any]:
    """Find the key that turns a block on, which says more than the whole block; a plain key is its own switch."""
    if not isinstance(value, Mapping):
        return path, value
    for name in ("enabled", "type"):
        if value.get(name) not in (None, False):
            return f"{path}.{name}", value[name]
    inner = (_switch(f"{path}.{name}", one) for name, one in value.items() if isinstance(one, Mapping))
    return next((found for found in inner if found[0].endswith(".enabled")), (path, value))


def cross_problems(get: Get, args: Any, problems: Problems) -> None:
    """Add the problems that show only when several keys, facts or the training arguments are seen together."""
    declared = [block.conflicts for block in root().keys.values() if isinstance(block, Block) and block.conflicts]
    for conflicts in (*_CONFLICTS, *declared):
        for key, wrong, remedy in conflicts(get):
            problems.add(key, get(key), wrong, remedy)
    for name, other in (("fsdp", "FSDP"), ("deepspeed", "DeepSpeed")):
        given = getattr(args, name, None)
        if given:
            problems.add_text(
                f"TrainingArguments.{name}",
                f"zero and TrainingArguments {name}={show(given)} are both given: expected one of them.",
                f"Remove {name}=, or train with {other} and remove zero=.",
            )


def _of_types(get: Get) -> Iterator[Conflict]:
    types = {"fp16.enabled": "float16", "bf16.enabled": "bfloat16", "amp.enabled": "amp"}
    on = {path: kind for path, kind in types.items() if get(path) is True}
    autocast = get("torch_autocast.enabled") is True
    if autocast:
        on["torch_autocast.enabled"] = get("torch_autocast.dtype") or "bfloat16"
    if len(set(on.values())) > 1:
        first, *others = on
        yield Conflict(
            first,
            f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} true as well, and there is one 16-bit type "
            "at a time",
            'Set one of them only; fp16 and bf16 may both be "auto": then fp16=True or bf16=True decides.',
        )
    if "amp.enabled" in on and get(STAGE):
        yield Conflict(
            "amp.enabled",
            f"amp goes with stage 0 only, as with DeepSpeed, but the stage is {get(STAGE)}",
            'Use "torch_autocast": {"enabled": true, "dtype": "fp16"}, which computes the same at every stage.',
        )
    if not _is_scale(get("amp.loss_scale")):
        yield Conflict(
            "amp.loss_scale", 'expected a number from 2 ** -24 to 2 ** 127, or "dynamic"', 'Write "dynamic".'
        )
    if autocast and get("torch_autocast.dtype") == "float32":
        yield Conflict("torch_autocast.dtype", "it is no 16-bit type", 'Write "bf16" or "fp16".')
    if 0 < get("fp16.loss_scale") < MIN_SCALE:
        yield Conflict("fp16.loss_scale", "expected 0 (dynamic) or at least 2 ** -24", "Write 0.")
    if "fp16.enabled" in on and not get("fp16.loss_scale"):
        if get("fp16.loss_scale_window") == 0:
            yield Conflict(
                "fp16.loss_scale_window", "a dynamic loss scale needs a window of 1 step at least", "Write 1000."
            )
        least, power = get("fp16.min_loss_scale"), get("fp16.initial_scale_power")
        if least == 0:
            yield Conflict(
                "fp16.min_loss_scale", "a dynamic loss scale needs a lower bound above 0", "Write 1, the default."
            )
        elif least > 2**power:
            yield Conflict(
                "fp16.min_loss_scale",
                f"it is above the first loss scale, 2 ** initial_scale_power = {2**power}",
                "Lower it, or raise fp16.initial_scale_power.",
            )


def _is_scale(value: Any) -> bool:
    """Apex takes a number, as a text too, or "dynamic"."""
    if value is None or value == "dynamic":
        return True
    try:
        return not isinstance(value, bool) and MIN_SCALE <= float(value) <= MAX_SCALE
    except (TypeError, ValueError, OverflowError):  # the last one: an integer of 400 digits
        return False


def _of_offload(get: Get) -> Iterator[Conflict]:
    for block in (OFFLOAD_PARAM, OFFLOAD_OPTIMIZER):
        if medium(get, block).needs_folder and not get(f"{block}.nvme_path"):
            yield Conflict(
                f"{block}.nvme_path",
                f"{block}.device is {show(get(f'{block}.device'))}, which needs the folder to keep the files in",
                'Write "nvme_path": "/local_nvme" beside it, or set the device to "cpu" or "none".',
            )
    if not medium(get, OFFLOAD_OPTIMIZER).is_device and get(STAGE) == 0:
        yield Conflict(
            _OFFLOAD,
            "it needs stage 1, 2 or 3, but the stage is 0: nothing is sharded there",
            f"Set {STAGE} to 1, 2 or 3, or remove offload_optimizer.",
        )
    ratio = get(f"{OFFLOAD_OPTIMIZER}.ratio")
    if isinstance(ratio, float) and ratio < 1.0 and get(STAGE) != 3:
        yield Conflict(
            f"{OFFLOAD_OPTIMIZER}.ratio",
            f"a part of the optimizer can be offloaded at stage 3 only, but the stage is {get(STAGE)}",
            f"Set {STAGE} to 3, or remove the ratio.",
        )


def _of_native_update(get: Get) -> Iterator[Conflict]:
    """16-bit moments and the delayed update belong to the native Adam, which updates offloaded states only."""
    wanted = [key for key, on in ((MOMENTS, False), (_DELAYED, True)) if get(key) is on]
    by_torch, where = runs_in_torch(get), medium(get, OFFLOAD_OPTIMIZER)
    for key in wanted:
        if where.is_device:
            yield Conflict(
                key,
                "moments in 16 bits belong to the native Adam, which updates offloaded optimizer state only"
                if key == MOMENTS
                else "there is nothing to delay: the update runs on the device, not beside it",
                f'Remove it, or set {_OFFLOAD} to "cpu" or "nvme".',
            )
        elif where.is_host and (by_torch or get(FORCE) is False):
            why, remedy = f"{FORCE} = false", f"Remove it, or remove {FORCE}."
            if by_torch and get("optimizer.type") in NATIVE:
                why, remedy = f"{_PARAMS}.torch_adam = true", "Remove one of them."
            elif by_torch:
                why, remedy = f"optimizer.type = {show(get('optimizer.type'))}", 'Remove it, or use "AdamW".'
            yield Conflict(key, f"it belongs to the native Adam, and {why} leaves the update to torch", remedy)


def _of_bf16_masters(get: Get) -> Iterator[Conflict]:
    """Masters in bf16 are the parameters, and torch's optimizers keep states in the type of what they update."""
    if get("bf16.enabled") is not True or get(BF16_MASTERS) is get(BF16_STATES) is not True:
        return
    if not has_bf16_masters(get):
        yield Conflict(
            BF16_STATES,
            "it goes with bf16_master_weights_and_grads only, as with DeepSpeed",
            f'Write "bf16_master_weights_and_grads": true beside it; {MOMENTS} = false keeps moments in 16 bits '
            "beside fp32 masters, where they are offloaded.",
        )
    elif updates_natively(get):
        yield Conflict(
            BF16_MASTERS,
            f"{_OFFLOAD} is {show(get(_OFFLOAD))}, and the native Adam has fp32 masters",
            f"Remove it, and write {MOMENTS} = false for moments in 16 bits; or remove offload_optimizer.",
        )
    elif get(BF16_STATES) is not True:
        yield Conflict(
            BF16_MASTERS,
            "bf16_optimizer_states is not true, and optimizers keep their states in the type of the masters",
            'Write "bf16_optimizer_states": true beside it, or remove it.',
        )


def _of_reduction(get: Get) -> Iterator[Conflict]:
    if get("gradient_allreduce_op") == "sum" and get(STAGE) == 3:
        yield Conflict(
            "gradient_allreduce_op",
            "stage 3 has the mean only, as in DeepSpeed",
            'Set it to "mean" and multiply the loss by the number of ranks, or use stage 0, 1 or 2.',
        )


def _of_groups(get: Get) -> Iterator[Conflict]:
    hybrid = f"{ZERO}.hybrid_shard"
    if get(hybrid) is True and get(GROUP) == "all":
        yield Conflict(hybrid, f'{GROUP} is "all", so that there is one group only', f'Set {GROUP} to "host".')
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if get(hybrid) is True and get(f"{ZERO}.{name}") is True:
            wrong = f"{ZERO}.{name} is true, and groups that have all shards send each other no 8-bit messages"
            yield Conflict(hybrid, wrong, "Remove one of them.")
    if get(GROUP) == "all":
        return
    if get(STAGE) == 0:
        yield Conflict(
            GROUP,
            "the stage is 0, and nothing is sharded there",
            f"Set {STAGE} to 1, 2 or 3, or remove it.",
        )
    for name, wrong in (
        ("msamp.enabled", "8-bit gradients go straight from each rank to all others"),
        ("reduce_scatter", "an all-reduce does not stay within groups"),
        ("allgather_partitions", "a broadcast does not stay within groups"),
    ):
        path = name if "." in name else f"{ZERO}.{name}"
        if get(path) is (name == "msamp.enabled"):
            yield Conflict(GROUP, f"{path} is {show(get(path))}, and {wrong}", "Remove one of them.")


def _of_quantized(get: Get) -> Iterator[Conflict]:
    for name, least, why in (
        ("zero_quantized_weights", 3, "parameters are gathered for a forward and a backward at stage 3 only"),
        ("zero_quantized_gradients", 1, "gradients are not sharded at stage 0"),
    ):
        path = f"{ZERO}.{name}"
        if get(path) is not True:
            continue
        if get(STAGE) < least:
            yield Conflict(path, f"the stage is {get(STAGE)}, and {why}", f"Set {STAGE} to {least}, or remove it.")
        if get("msamp.enabled") is True:
            yield Conflict(path, "msamp.enabled is true, whose gradients are in 8 bits anyway", "Remove one of them.")
        if name == "zero_quantized_gradients" and get(f"{ZERO}.reduce_scatter") is False:
            yield Conflict(path, f"{ZERO}.reduce_scatter is false, and an all-reduce is exact", "Remove one of them.")


def _of_fp8(get: Get) -> Iterator[Conflict]:
    if get("msamp.enabled") is not True:
        return
    for key in ("bf16.enabled", "amp.enabled", "torch_autocast.enabled"):
        if get(key) is True:
            yield Conflict(
                "msamp.enabled",
                f"{key} is true as well: FP8 layers take fp32 or fp16",
                f'Remove {key.partition(".")[0]}; "fp16": {{"enabled": true}} may stand beside msamp.',
            )
    for block in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM):
        if not medium(get, block).is_device:
            yield Conflict(
                "msamp.enabled",
                f"{block}.device is {show(get(f'{block}.device'))}, and 8-bit gradients and states stay on the device",
                f"Remove {block.partition('.')[2]}, or msamp.",
            )
    level, stage = get("msamp.opt_level"), get(STAGE)
    if stage == 3:
        yield Conflict(
            "msamp.enabled",
            "the stage is 3, and FP8 goes with stages 0, 1 and 2",
            f"Set {STAGE} to 2, or remove msamp.",
        )
    if stage == 0 and level == "O3":
        yield Conflict(
            "msamp.opt_level",
            "O3 is O2 with sharded states, but the stage is 0: nothing is sharded there",
            f'Set {STAGE} to 1 or 2, or write "O2".',
        )
    kind = get("optimizer.type")
    if level != "O1" and kind is not None and kind not in NATIVE:
        yield Conflict(
            "msamp.opt_level",
            f"the states of 8 and 16 bits are those of Adam and AdamW, and optimizer.type is {show(kind)}",
            'Use "AdamW", or "O1".',
        )
    if is_known(get, "@pipeline"):
        yield Conflict("msamp.enabled", "the model is a PipelineModule, which trains without FP8", "Remove msamp.")
    if kind == "OneBitAdam" and level == "O1":
        yield Conflict("optimizer.type", "it exchanges gradients in one bit, and msamp in eight", "Use one of them.")


def _of_accumulation(get: Get) -> Iterator[Conflict]:
    key = "managed_gradient_accumulation"
    if get(key) is False and is_known(get, "@pipeline"):
        yield Conflict(key, "the model is a PipelineModule, whose train_batch accumulates by itself", "Remove it.")


def _of_activations(get: Get) -> Iterator[Conflict]:
    """Yield the conflicts that DeepSpeed has too, and those with a budget."""
    if get(_BUDGET) is not None:
        for name in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
            if get(f"{ACTIVATIONS}.{name}") is True:
                yield Conflict(_BUDGET, f"{name} is true as well, and a budget decides that itself", f"Remove {name}.")
    if get(CONTIGUOUS) is not True:
        return
    if get(f"{ACTIVATIONS}.partition_activations") is not True:
        yield Conflict(
            CONTIGUOUS,
            "it goes with partition_activations only, as with DeepSpeed",
            'Write "partition_activations": true beside it (without a group that shares inputs, they stay whole), or '
            "remove it.",
        )
    if get(NUMBER_CHECKPOINTS) is None:
        yield Conflict(
            CONTIGUOUS,
            "it needs number_checkpoints, for which memory is kept",
            'Write "number_checkpoints": N beside it: how many checkpointed regions (layers) a forward has, or remove '
            "it.",
        )


def _of_comms_logger(get: Get) -> Iterator[Conflict]:
    unknown = [name for name in get(_PROF_OPS) or () if name not in COLLECTIVES]
    if unknown:
        yield Conflict(
            _PROF_OPS, f"no collective is called {either(unknown)}", f"There are: {', '.join(COLLECTIVES)}."
        )


_CONFLICTS = (
    _of_comms_logger,
    _of_types,
    _of_offload,
    _of_native_update,
    _of_bf16_masters,
    _of_reduction,
    _of_groups,
    _of_quantized,
    _of_fp8,
    _of_accumulation,
    _of_activations,
)
