"""Every key of DeepSpeed's schema is known, and what becomes of each is decided: none is silently ignored.

tests/golden/deepspeed_keys.json was written by tests/golden/deepspeed_keys.py from an installed DeepSpeed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.config.keys import NOTHING_TO_DO, OBEYED, OTHER_NAME, REFUSED, root, status, statuses
from hf_zero.config.schema import (
    Alias,
    Block,
    Choice,
    Count,
    DType,
    Flag,
    Key,
    Real,
    Reals,
    Text,
    Texts,
    find,
    put,
    walk,
)

HERE = Path(__file__).parents[1]
DEEPSPEED: dict[str, dict[str, Any]] = json.loads((HERE / "golden" / "deepspeed_keys.json").read_text())["keys"]

# Defaults that differ, and why.
OTHER_DEFAULTS = {
    "checkpoint.tag_validation": "the same choice in the letters of DeepSpeed's documents",
    "compile.passes": "an empty list says the same",
    "data_types.keep_in_fp32_modules": "buffers always keep their dtype",
    "fp16.auto_cast": "floating inputs are always cast, and false gets a notice",
    "timers.throughput.enabled": "None: on where steps_per_print prints lines",
    "gradient_clipping": "off unless asked for, as DeepSpeed's documents have it; accelerate and Trainer say 1.0",
    "optimizer.legacy_fusion": "DeepSpeed's constant is false, which it names None where the block is missing",
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
    "sequence_parallel_size": "one rank per sequence says the same",
    "steps_per_print": "0 and None are both never",
    "zero_optimization.stage3_max_reuse_distance": "1e9 would keep small models whole from forward to backward",
    "torch_autocast.lower_precision_safe_modules": "an empty list says the same",
    "zero_optimization.leaf_module.classes": "units are whole layers, so the experts need no list",
    "zero_optimization.offload_optimizer.pipeline_read": "the staging pool bounds the memory either way",
    "zero_optimization.offload_optimizer.pipeline_write": "the staging pool bounds the memory either way",
    "zero_optimization.overlap_comm": "DeepSpeed's default follows the stage; here overlap costs no buffers",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "None tells a missing key from false",
    "tensor_parallel.autotp_size": "0 and 1 are both off: programs write either",
}

# The kinds of rows that take what DeepSpeed's types take.
KINDS: dict[str, set[type[Key]]] = {
    "bool": {Flag},
    "int": {Count, Real},
    "float": {Real, Reals},
    "str": {Text, Choice, DType, Texts},
    "list": {Texts, Reals},
    "dtype": {DType},
    "ZeroStageEnum": {Count},
    "OffloadDeviceEnum": {Choice},
    "Path": {Text},
    "tuple": {Reals},
}


def row_of(path: str) -> Key | Alias | Block | None:
    """The row of a key, or the block around it that takes names unchecked."""
    row = find(root(), path)
    while row is None and "." in path:
        path = path.rpartition(".")[0]
        above = find(root(), path)
        row = above if isinstance(above, Block) and above.free else None
    return row


def test_the_golden_list_is_whole() -> None:
    assert len(DEEPSPEED) > 280
    for path in ("train_batch_size", "fp16.hysteresis", "zero_optimization.sub_group_size", "aio.use_gds", "nebula"):
        assert path in DEEPSPEED
    assert sum(bool(row.get("deprecated")) for row in DEEPSPEED.values()) >= 4
    assert sum(bool(row.get("removed")) for row in DEEPSPEED.values()) >= 14


def test_every_key_of_deepspeed_is_known() -> None:
    assert not [path for path in DEEPSPEED if row_of(path) is None]


def test_no_key_of_deepspeed_is_taken_for_a_misspelt_one() -> None:
    """A refused block lets names pass unchecked, unless they are nearly the name of its switch."""
    unchecked = [path for path in DEEPSPEED if find(root(), path) is None]
    assert len(unchecked) > 80
    for path in unchecked:
        config: dict[str, Any] = {}
        put(config, path, 1)
        assert ZeroConfig.load(config).get(path) == 1, path


def test_defaults_that_differ_are_those_with_a_reason() -> None:
    other = set()
    for path, theirs in DEEPSPEED.items():
        ours = find(root(), path)
        if isinstance(ours, Key) and not theirs.get("removed"):
            default = list(ours.default) if isinstance(ours.default, tuple) else ours.default
            if default != theirs["default"]:
                other.add(path)
    assert other == set(OTHER_DEFAULTS)


def test_types_are_those_of_deepspeed() -> None:
    checked = 0
    for path, theirs in DEEPSPEED.items():
        ours = find(root(), path)
        if not isinstance(ours, Key):
            continue
        names = set(re.findall(r"\w+", theirs["type"])) & set(KINDS)
        if names:
            checked += 1
            kind = type(ours)
            assert kind is Key or any(kind in KINDS[name] for name in names), (path, theirs["type"], kind)
    assert checked > 120


def test_values_of_deepspeed_fit() -> None:
    """A value that DeepSpeed takes as its default is no mistake here."""
    for path, theirs in DEEPSPEED.items():
        ours = find(root(), path)
        if isinstance(ours, Key) and theirs["default"] is not None and not theirs.get("removed"):
            if ours.auto and theirs["default"] == "auto":
                continue
            ours.check(theirs["default"])


@pytest.mark.parametrize("path", [path for path, row in DEEPSPEED.items() if row.get("deprecated")])
def test_deprecated_names_map_with_a_warning(path: str) -> None:
    row = find(root(), path)
    assert isinstance(row, Alias), path
    block, _, name = path.rpartition(".")
    config = ZeroConfig.load({block: {"stage": 3, name: True}})
    resolved = config.resolve()
    assert any(line == f"{path} is another name of {row.target}" for line in resolved.notices)
    want = row.convert[True] if row.convert else True
    assert resolved.settings[row.target] == want and resolved.origins[row.target] == "file"


def test_other_names_are_one_key() -> None:
    """DeepSpeed takes these fields under two names; both give the value, and both at once are a mistake."""
    pairs = [(path, row["other_name"]) for path, row in DEEPSPEED.items() if "other_name" in row]
    assert len(pairs) >= 10
    for path, other in pairs:
        beside = f"{path.rpartition('.')[0]}.{other}"
        one, two = find(root(), path), find(root(), beside)
        if not (isinstance(one, Alias) or isinstance(two, Alias)):
            # "tp" and "tensor_parallel" inside tensor_parallel: the block is refused when either is on.
            assert path.startswith("tensor_parallel."), (path, other)
            continue
        target = next(row.target for row in (one, two) if isinstance(row, Alias))
        assert target in (path, beside)


def test_the_status_of_each_key() -> None:
    counts: dict[str, int] = {}
    for path, decided in statuses():
        counts[decided.verdict] = counts.get(decided.verdict, 0) + 1
        assert decided.reason or decided.verdict == OBEYED, path
    assert set(counts) <= {OBEYED, NOTHING_TO_DO, REFUSED, OTHER_NAME}
    assert counts[OBEYED] > 60 and counts[OTHER_NAME] > 10
    for path, row in walk(root()):
        if isinstance(row, Alias):
            continue
        assert not (row.refused and row.no_effect), path
        if row.refused:
            assert status(row).verdict == (OBEYED if isinstance(row, Choice) and row.offered else REFUSED)
        elif row.no_effect:
            assert status(row).verdict == NOTHING_TO_DO
    named = {path for path, _ in statuses()}
    for path in DEEPSPEED:
        # The key itself, the block that decides for all that is inside it, or what is inside.
        assert any(path == one or path.startswith(f"{one}.") or one.startswith(f"{path}.") for one in named), path


def test_no_key_is_written_twice() -> None:
    paths = [path for path, _ in walk(root())]
    assert len(paths) == len(set(paths)) > 300
