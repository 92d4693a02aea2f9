"""What only shows when several keys are seen together: contradictions, and refusals of keys that are on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hf_zero.config.conditions import (
    ACTIVATIONS,
    FORCE,
    NATIVE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    STAGE,
    Get,
    is_known,
    runs_in_torch,
)
from hf_zero.config.conditions import PARAMS as _PARAMS
from hf_zero.config.keys import ROOT
from hf_zero.config.optimizers import OTHER_OPTIMIZERS
from hf_zero.config.precision import MAX_SCALE, MIN_SCALE
from hf_zero.config.problems import Problems, either, show
from hf_zero.config.schema import Alias, Block, look_up, walk

CONTIGUOUS, NUMBER_CHECKPOINTS = f"{ACTIVATIONS}.contiguous_memory_optimization", f"{ACTIVATIONS}.number_checkpoints"
_BUDGET = f"{ACTIVATIONS}.activation_memory"
_ON_DISK = f"{ACTIVATIONS}.nvme_path"
MOMENTS = f"{_PARAMS}.fp32_optimizer_states"
_OFFLOAD = f"{OFFLOAD_OPTIMIZER}.device"
_PROF_OPS = "comms_logger.prof_ops"
_PIPELINE = "pipeline"
PARTITIONS = 'expected "parameters", "uniform", "type:REGEX" (of class names) or "profile"'
_DELAYED = f"{OFFLOAD_OPTIMIZER}.delayed_update"
# Of an engine, by DeepSpeed's names.
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")
# What torch's Adam has and Adam without bias correction has not.
_NOT_UNCORRECTED = ("torch_adam", "amsgrad", "maximize", "capturable")


class Conflict(NamedTuple):
    """The value of `key` does not go with others."""

    key: str
    wrong: str
    remedy: str


def refusals(values: Mapping[str, Any], problems: Problems) -> list[str]:
    """Add a problem for each key that is on and not supported yet; return the blocks that are refused as a whole."""
    blocks = []
    for path, row in walk(ROOT):
        if isinstance(row, Alias) or not row.refused:
            continue
        value = look_up(values, path)
        if row.is_on(value):
            blocks += [path] if isinstance(row, Block) else []
            problems.add(path, value, "not supported yet", row.refused, shown=_switch(path, value))
    if look_up(values, "optimizer.type") in OTHER_OPTIMIZERS:
        blocks.append(_PARAMS)
    return blocks


def _switch(path: str, value: Any) -> tuple[str, Any]:
    """What turns a block on, which says more than the whole block; a plain key is its own switch."""
    if not isinstance(value, Mapping):
        return path, value
    for name in ("enabled", "type"):
        if value.get(name) not in (None, False):
            return f"{path}.{name}", value[name]
    inner = (_switch(f"{path}.{name}", one) for name, one in value.items() if isinstance(one, Mapping))
    return next((found for found in inner if found[0].endswith(".enabled")), (path, value))


def cross_problems(get: Get, args: Any, problems: Problems) -> None:
    """Add the problems that show only when several keys, facts or the training arguments are seen together."""
    for conflicts in _CONFLICTS:
        for key, wrong, remedy in conflicts(get):
            problems.add(key, get(key), wrong, remedy)
    optimizer = get("optimizer")
    if isinstance(optimizer, Mapping) and "type" not in optimizer and not problems.has("optimizer"):
        problems.add(
            "optimizer", optimizer, "the type is missing", 'Write "type": "AdamW" in it, or remove the block.'
        )
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
        if get(f"{block}.device") == "nvme" and not get(f"{block}.nvme_path"):
            yield Conflict(
                f"{block}.nvme_path",
                f'{block}.device is "nvme", which needs the folder to keep the files in',
                'Write "nvme_path": "/local_nvme" beside it, or set the device to "cpu" or "none".',
            )
    if _is_offloaded(get) and get(STAGE) == 0:
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


def _is_offloaded(get: Get) -> bool:
    return get(_OFFLOAD) not in (None, "none")


def _of_native_update(get: Get) -> Iterator[Conflict]:
    """16-bit moments and the delayed update belong to the native Adam, which updates offloaded states only."""
    wanted = [key for key, on in ((MOMENTS, False), (_DELAYED, True)) if get(key) is on]
    by_torch = runs_in_torch(get)
    for key in wanted:
        if not _is_offloaded(get):
            yield Conflict(
                key,
                "moments in 16 bits belong to the native Adam, which updates offloaded optimizer state only"
                if key == MOMENTS
                else "there is nothing to delay: the update runs on the device, not beside it",
                f'Remove it, or set {_OFFLOAD} to "cpu" or "nvme".',
            )
        elif get(_OFFLOAD) == "cpu" and (by_torch or get(FORCE) is False):
            why, remedy = f"{FORCE} = false", f"Remove it, or remove {FORCE}."
            if by_torch and get("optimizer.type") in NATIVE:
                why, remedy = f"{_PARAMS}.torch_adam = true", "Remove one of them."
            elif by_torch:
                why, remedy = f"optimizer.type = {show(get('optimizer.type'))}", 'Remove it, or use "AdamW".'
            yield Conflict(key, f"it belongs to the native Adam, and {why} leaves the update to torch", remedy)


def _of_optimizer(get: Get) -> Iterator[Conflict]:
    kind = get("optimizer.type")
    decoupled, mode = (get(f"{_PARAMS}.{name}") for name in ("decoupled_weight_decay", "adam_w_mode"))
    if kind == "Adam" and None not in (decoupled, mode) and decoupled is not mode:
        yield Conflict(
            f"{_PARAMS}.decoupled_weight_decay",
            f"adam_w_mode = {show(mode)} says the opposite of it",
            "Remove one of them.",
        )
    if kind in NATIVE and get(f"{_PARAMS}.torch_adam") is True and get(_OFFLOAD) == "nvme":
        yield Conflict(
            f"{_PARAMS}.torch_adam",
            f'it does not go with {_OFFLOAD} = "nvme": what is on disk is updated by native code',
            'Remove it, or offload to "cpu".',
        )
    if kind in NATIVE and get(f"{_PARAMS}.bias_correction") is False:
        for name in _NOT_UNCORRECTED:
            if get(f"{_PARAMS}.{name}") is True:
                yield Conflict(
                    f"{_PARAMS}.{name}", "it does not go with bias_correction = false", "Remove one of them."
                )
    yield from _of_torch_arguments(get)
    if kind == "Lamb" and _is_offloaded(get):
        yield Conflict(
            "optimizer.type",
            f'Lamb does not go with {_OFFLOAD} = "{get(_OFFLOAD)}": its update needs norms over all ranks',
            'Remove offload_optimizer, or use "AdamW".',
        )
    if kind not in (None, *NATIVE, *OTHER_OPTIMIZERS, "Lamb", "OneBitAdam") and get(_OFFLOAD) == "nvme":
        yield Conflict(
            "optimizer.type",
            f'it does not go with {_OFFLOAD} = "nvme": what is on disk is updated by native code, which is Adam\'s',
            'Use "AdamW", or offload to "cpu".',
        )
    if kind == "OneBitAdam" and get(STAGE) not in (None, 0):
        yield Conflict(
            "optimizer.type",
            f"it does not go with ZeRO ({STAGE} = {get(STAGE)}): it compresses momenta of unsharded parameters",
            'Set the stage to 0, or use "AdamW".',
        )
    if kind in ("Lamb", "OneBitAdam") and get(f"{_PARAMS}.amsgrad") is True:
        yield Conflict(f"{_PARAMS}.amsgrad", f"{kind} does not have it", "Remove it.")
    if kind == "OneBitAdam" and get(f"{_PARAMS}.eps_inside_sqrt") is True:
        yield Conflict(f"{_PARAMS}.eps_inside_sqrt", "OneBitAdam adds eps to the square root", "Remove it.")


def _of_torch_arguments(get: Get) -> Iterator[Conflict]:
    """What torch's classes refuse when they are made."""
    if get(f"{_PARAMS}.fused") is True and get(f"{_PARAMS}.foreach") is True:
        yield Conflict(f"{_PARAMS}.foreach", "it does not go with fused = true", "Remove one of them.")
    if get(f"{_PARAMS}.nesterov") is True and (not get(f"{_PARAMS}.momentum") or get(f"{_PARAMS}.dampening")):
        yield Conflict(f"{_PARAMS}.nesterov", "it needs a momentum above 0 and no dampening", "Remove it.")
    etas = get(f"{_PARAMS}.etas")
    if etas is not None and not 0 < etas[0] < 1 < etas[1]:
        yield Conflict(
            f"{_PARAMS}.etas", "expected a factor between 0 and 1, and one above 1", "Write [0.5, 1.2], the default."
        )


def _of_reduction(get: Get) -> Iterator[Conflict]:
    if get("gradient_allreduce_op") != "sum":
        return
    if get("optimizer.type") == "OneBitAdam":
        yield Conflict(
            "gradient_allreduce_op", "OneBitAdam exchanges means of momenta", 'Set it to "mean", or use "AdamW".'
        )
    if get(STAGE) == 3:
        yield Conflict(
            "gradient_allreduce_op",
            "stage 3 has the mean only, as in DeepSpeed",
            'Set it to "mean" and multiply the loss by the number of ranks, or use stage 0, 1 or 2.',
        )


def partition_fault(method: str) -> str | None:
    """What is wrong with a partition_method; None where nothing is."""
    kind, _, pattern = method.partition(":")
    if kind.lower() == "type" and pattern:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return f"{pattern!r} is no regular expression: {error}"
    elif kind.lower() not in ("uniform", "parameters", "profile") or pattern:
        return f"no method has this name: {PARTITIONS}"
    return None


def _of_pipeline(get: Get) -> Iterator[Conflict]:
    """What stages cannot do. With a PipelineModule, its own settings are those of the block."""
    schedule, chunks = get(f"{_PIPELINE}.schedule"), get(f"{_PIPELINE}.virtual_stages")
    partition = get(f"{_PIPELINE}.partition")
    if partition != "best" and (fault := partition_fault(partition)) is not None:
        yield Conflict(f"{_PIPELINE}.partition", fault, 'Correct it, or write "best", the module\'s own.')
    if schedule == "interleaved" and chunks < 2:
        yield Conflict(
            f"{_PIPELINE}.schedule",
            "it needs pipeline.virtual_stages of 2 or more",
            'Write "virtual_stages": 2 beside it, or use "1f1b".',
        )
    if schedule == "zero_bubble" and chunks > 1:
        yield Conflict(
            f"{_PIPELINE}.schedule",
            f"it goes with pipeline.virtual_stages 1, not {chunks}",
            'Remove virtual_stages, or use "interleaved".',
        )
    if (get(f"{_PIPELINE}.stages") or 1) == 1 and not is_known(get, "@pipeline"):
        return
    if get(STAGE) > 1:
        yield Conflict(
            STAGE,
            "a pipeline takes 0 or 1. Several micro-batches are in a stage at once, and each of their backwards would "
            "have to reduce gradients (stage 2) or gather parameters (stage 3) again, which costs more than the "
            "memory is worth",
            "Set it to 0 or 1, and add stages to the pipeline where memory is short.",
        )
    if get("flops_profiler.enabled") is True:
        yield Conflict("flops_profiler.enabled", "it counts one model in one process", "Turn it off for a pipeline.")


def _of_activations(get: Get) -> Iterator[Conflict]:
    """As DeepSpeed demands it, and what a budget decides."""
    if get(_BUDGET) is not None:
        for name in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
            if get(f"{ACTIVATIONS}.{name}") is True:
                yield Conflict(_BUDGET, f"{name} is true as well, and a budget decides that itself", f"Remove {name}.")
    if get(_ON_DISK) is not None:
        for name in ("cpu_checkpointing", "contiguous_memory_optimization"):
            if get(f"{ACTIVATIONS}.{name}") is True:
                yield Conflict(_ON_DISK, f"{name} is true as well, which is another place for them", f"Remove {name}.")
        if get(_BUDGET) is not None:
            yield Conflict(_ON_DISK, "a budget keeps inputs in memory", "Remove nvme_path, or activation_memory.")
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
    _of_optimizer,
    _of_reduction,
    _of_activations,
    _of_pipeline,
)
