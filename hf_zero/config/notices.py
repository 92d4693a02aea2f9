"""The lines about a configuration at the start and of `hf-zero config`: keys without effect, and every value."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hf_zero.config.conditions import OFFLOAD_OPTIMIZER, STAGE, ZERO, Unknown, medium, runs_in_torch
from hf_zero.config.keys import root, typed_blocks
from hf_zero.config.resolved import FILE, ResolvedConfig
from hf_zero.config.schema import AUTO, Block, Entry, Get, Key, find, show

TITLE = "hf_zero configuration:"
_GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"


def notices(given: Mapping[str, Any], get: Get) -> list[str]:
    """One line for the keys that do nothing here for the same reason, and for what differs from DeepSpeed.

    Args:
        given: Dotted path -> what the user gave, "auto" included.
        get: The resolved value at a dotted path, or a fact of the run; raises Unknown for what is not known.
    """
    silent: dict[str, list[str]] = {}
    for path, value in given.items():
        if (why := _without_effect(path, value, given, get)) is not None:
            silent.setdefault(why, []).append(f"{path} = {show(value)}")
    lines = [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}" for why, keys in silent.items()
    ]
    return [*lines, *_differences(given, get)]


def run_notices(config: ResolvedConfig, facts: Mapping[str, Any]) -> list[str]:
    """The lines of `notices` that follow from facts of the run, beside `config.notices`."""
    origins = {path: origin for path, origin in config.origins.items() if origin == FILE or origin.startswith(AUTO)}
    given = {path: config.settings[path] if origin == FILE else AUTO for path, origin in origins.items()}
    return [line for line in notices(given, getter(config.settings.get, facts)) if line not in config.notices]


def getter(value: Callable[[str], Any], facts: Mapping[str, Any], unknown: Collection[str] = ()) -> Get:
    """The resolved value at a path, or a fact; a fact that is not in `facts` and a path in `unknown` raise Unknown."""

    def get(path: str) -> Any:
        if path in unknown or (path.startswith("@") and path not in facts):
            raise Unknown(path)
        return facts[path] if path in facts else value(path)

    return get


def _without_effect(path: str, value: Any, given: Mapping[str, Any], get: Get) -> str | None:
    """The reason why the value that was given at a path changes nothing; None if it may change something."""
    entries = list(_entries_on(path))
    if entries and isinstance(entries[-1], Key) and value in (None, AUTO, entries[-1].default):
        return None
    for entry in entries:
        if isinstance(entry, Key | Block) and entry.no_effect:
            return entry.no_effect
    if not entries or not isinstance(entries[-1], Key):
        return None
    for when in entries[-1].when:
        try:
            holds = when.holds(get)
        except Unknown:
            continue
        if not holds:
            return when.otherwise.format(stage=get(STAGE) or 0)
    block, _, name = path.rpartition(".")
    switch = find(root(), f"{block}.enabled") if block and name != "enabled" else None
    if isinstance(switch, Key) and switch.default is False and f"{block}.enabled" not in given:
        try:
            return None if get(f"{block}.enabled") else f"{block}.enabled is not given"
        except Unknown:
            return None
    return None


def _entries_on(path: str) -> Iterator[Entry]:
    """The blocks around a path, then its own entry, as far as they are known."""
    names = path.split(".")
    for depth in range(len(names)):
        entry = find(root(), ".".join(names[: depth + 1]))
        if entry is not None:
            yield entry


def _differences(given: Mapping[str, Any], get: Get) -> Iterator[str]:
    """Yield a line for each key whose effect is another one than its name or DeepSpeed promises."""
    for block, entries in typed_blocks():
        one = entries.type_of(given.get(f"{block}.type"))
        for name in sorted(one.not_taken) if one is not None else ():
            if given.get(f"{block}.params.{name}") is True:
                yield f"{block}.params.{name} = true has no effect: {given[f'{block}.type']} has one way to run"
    kind = given.get("optimizer.type")
    if kind is not None and runs_in_torch(get) and medium(given.get, OFFLOAD_OPTIMIZER).is_host:
        yield f"optimizer.type = {kind} has no native update: torch runs it on the host"
    if given.get(_GATHER) is False and get(STAGE) == 3:
        yield f"{_GATHER} = false: checkpoints will have no model.safetensors; hf-zero consolidate makes it"
    if given.get("amp.opt_level") == "O3" and given.get("amp.enabled") is not False:
        yield "amp.opt_level = O3 keeps fp32 masters and batch norms, as O2 does; losses are not scaled by default"


def start_text(config: ResolvedConfig, *, changed: bool = False) -> str:
    """A line `key ..... value [origin]` for each resolved key, then `json = ...` with what the user gave.

    With `changed`, keys that have their default are left out.
    """
    lines = [f"  {line}" for line in config.describe(changed=changed).splitlines()]
    given = json.dumps(config.public_raw, indent=4, default=str)
    return "\n".join([f"{TITLE} ({config.source})", *lines, f"  json = {given}"])
