"""Conditions between keys, refusals of what this release does not have yet, and notices of keys without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.keys import ROOT
from hf_zero.config.optimizer_checks import optimizer_notices, optimizer_problems, runs_in_torch
from hf_zero.config.optimizers import OTHER_OPTIMIZERS
from hf_zero.config.parse import look_up
from hf_zero.config.problems import Problems, show
from hf_zero.config.refusals import NO_EFFECT, NOT_YET
from hf_zero.config.schema import Block, Key, find

ZERO = "zero_optimization"
OFFLOADS = (f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer")
FORCE = "zero_force_ds_cpu_optimizer"
MOMENTS = "optimizer.params.fp32_optimizer_states"


def refusals(values: Mapping[str, Any], problems: Problems) -> list[str]:
    """Add a problem for each key that is on and not supported yet; return the blocks that are refused as a whole."""
    blocks = []
    for row in NOT_YET:
        value = look_up(values, row.path)
        if not row.on(value):
            continue
        if isinstance(find(ROOT, row.path), Block):
            blocks.append(row.path)
        problems.add(row.path, value, "not supported yet", row.remedy, shown=_switch(row.path, value))
    if look_up(values, "optimizer.type") in OTHER_OPTIMIZERS:
        blocks.append("optimizer.params")
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


def cross_problems(values: Mapping[str, Any], args: Any, problems: Problems) -> None:
    """Add the problems that show only when several keys, or the training arguments, are seen together."""
    _check_offload(values, problems)
    optimizer_problems(values, problems)
    if look_up(values, "gradient_allreduce_op") == "sum" and look_up(values, f"{ZERO}.stage") == 3:
        problems.add(
            "gradient_allreduce_op",
            "sum",
            "stage 3 has the mean only, as in DeepSpeed",
            'Set it to "mean" and multiply the loss by the number of ranks, or use stage 0, 1 or 2.',
        )
    optimizer = values.get("optimizer")
    if isinstance(optimizer, Mapping) and "type" not in optimizer and not _reported(problems, "optimizer"):
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


def _reported(problems: Problems, block: str) -> bool:
    return any(problem.key == block or problem.key.startswith(f"{block}.") for problem in problems.found)


def _check_offload(values: Mapping[str, Any], problems: Problems) -> None:
    stage = look_up(values, f"{ZERO}.stage")
    for block in OFFLOADS:
        device = look_up(values, f"{block}.device")
        if device == "nvme" and not look_up(values, f"{block}.nvme_path"):
            problems.add(
                f"{block}.nvme_path",
                look_up(values, f"{block}.nvme_path"),
                f'{block}.device is "nvme", which needs the folder to keep the files in',
                'Write "nvme_path": "/local_nvme" beside it, or set the device to "cpu" or "none".',
            )
    optimizer = look_up(values, f"{OFFLOADS[1]}.device")
    if optimizer not in (None, "none") and stage == 0:
        problems.add(
            f"{OFFLOADS[1]}.device",
            optimizer,
            "it needs stage 1, 2 or 3, but the stage is 0: nothing is sharded there",
            f"Set {ZERO}.stage to 1, 2 or 3, or remove offload_optimizer.",
        )
    offloaded = optimizer not in (None, "none")
    if look_up(values, MOMENTS) is False and not offloaded:
        problems.add(
            MOMENTS,
            False,
            "moments in 16 bits belong to the native Adam, which updates offloaded optimizer state only",
            f'Remove it, or set {OFFLOADS[1]}.device to "cpu" or "nvme".',
        )
    if look_up(values, f"{OFFLOADS[1]}.delayed_update") is True and not offloaded:
        problems.add(
            f"{OFFLOADS[1]}.delayed_update",
            True,
            "there is nothing to delay: the update runs on the device, not beside it",
            f'Remove it, or set {OFFLOADS[1]}.device to "cpu" or "nvme".',
        )
    by_torch = runs_in_torch(values)
    if optimizer == "cpu" and (by_torch or look_up(values, FORCE) is False):
        why = f"optimizer.type = {show(look_up(values, 'optimizer.type'))}" if by_torch else f"{FORCE} = false"
        for key, on in ((MOMENTS, False), (f"{OFFLOADS[1]}.delayed_update", True)):
            if look_up(values, key) is on:
                problems.add(
                    key,
                    on,
                    f"it belongs to the native Adam, and {why} leaves the update to torch",
                    'Remove it, or use "AdamW".' if by_torch else f"Remove it, or remove {FORCE}.",
                )
    ratio = look_up(values, f"{OFFLOADS[1]}.ratio")
    if isinstance(ratio, float) and ratio < 1.0 and stage != 3:
        problems.add(
            f"{OFFLOADS[1]}.ratio",
            ratio,
            f"a part of the optimizer can be offloaded at stage 3 only, but the stage is {stage}",
            f"Set {ZERO}.stage to 3, or remove the ratio.",
        )


def notices(given: Mapping[str, Any]) -> list[str]:
    """One line for each key the user gave that does nothing here, and for weights that will not be written."""
    lines = []
    offload, stage = f"{OFFLOADS[0]}.device", look_up(given, f"{ZERO}.stage") or 0
    if look_up(given, offload) not in (None, "none") and stage != 3:
        lines.append(
            f"{offload} = {show(look_up(given, offload))} has no effect: the stage is {stage}, and below stage 3 "
            "parameters stay whole on the device (offload_optimizer works at stages 1 to 3)"
        )
    for path, reason in NO_EFFECT.items():
        value = look_up(given, path)
        row = find(ROOT, path)
        default = row.default if isinstance(row, Key) else None
        if value not in (None, default, "auto", {}):
            lines.append(f"{path} = {show(value)} has no effect: {reason}")
    lines += optimizer_notices(given)
    gather = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    if look_up(given, gather) is False and look_up(given, f"{ZERO}.stage") == 3:
        lines.append(f"{gather} = false: checkpoints will have no model.safetensors; hf-zero consolidate makes it")
    return lines
