"""The split of a sequence of layers into stages: bounds of contiguous parts, from the layers' weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from hf_zero.errors import ConfigError
from hf_zero.extras.pipeline.layer_table import LayerRow
from hf_zero.extras.pipeline.pipeline_section import Partition, partition_fault


def split_uniform(num_layers: int, num_parts: int) -> list[int]:
    """The bounds of parts with equal numbers of layers; the first parts have one more if it does not come out even."""
    size, longer = divmod(num_layers, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def split_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """The bounds of contiguous parts, none empty, whose heaviest is as light as can be.

    Among several such splits it takes the one whose loads have the smallest sum of squares, then the one whose numbers
    of layers do. It is dynamic programming (the linear partition problem: Skiena, The Algorithm Design Manual, 8.5) of
    len(weights)^2 * num_parts operations.

    Args:
        weights: Of each layer, at least 0.
        num_parts: At most as many as there are layers.
    """
    sums = list(itertools.accumulate(weights, initial=type(weights[0])(0)))
    limit = _lightest_maximum(sums, num_parts)
    num_layers = len(weights)
    # `best` and `starts` hold, for the first `stop` layers, the cost of the best split and where its last part begins.
    best: list[tuple[float, int] | None] = [(0, 0)] + [None] * num_layers
    starts: list[list[int]] = []
    for _ in range(num_parts):
        following: list[tuple[float, int] | None] = [None] * (num_layers + 1)
        start_of = [0] * (num_layers + 1)
        for stop in range(1, num_layers + 1):
            for start in range(stop - 1, -1, -1):
                load, before = sums[stop] - sums[start], best[start]
                if load > limit:
                    break
                if before is None:
                    continue
                cost = (before[0] + load * load, before[1] + (stop - start) ** 2)
                current = following[stop]
                if current is None or cost < current:
                    following[stop], start_of[stop] = cost, start
        best = following
        starts.append(start_of)
    bounds = [num_layers]
    for start_of in reversed(starts):
        bounds.append(start_of[bounds[-1]])
    return bounds[::-1]


def _lightest_maximum(sums: list[float], num_parts: int) -> float:
    """The load of the heaviest part in the best split; `sums` are those of the first 0, 1, ... layers."""
    num_layers = len(sums) - 1
    best = list(sums)  # of the first i layers in one part
    for part in range(2, num_parts + 1):
        best = [
            min((max(best[start], sums[stop] - sums[start]) for start in range(part - 1, stop)), default=sums[-1])
            for stop in range(num_layers + 1)
        ]
    return best[-1]


def matching_layers(names: Sequence[str], pattern: str) -> list[int]:
    """1 for each layer whose class name has `pattern` in it, whatever its case, else 0.

    Raises:
        ConfigError: No name has.
    """
    matches = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in names]
    if not any(matches):
        raise ConfigError(
            f'partition_method="type:{pattern}" matches no layer: their classes are '
            f"{', '.join(sorted(set(names)))}. Name one of them, or a part of its name."
        )
    return matches


def split_as_listed(counts: Sequence[int], num_layers: int, num_parts: int) -> list[int]:
    """The bounds of parts with the given numbers of layers.

    Raises:
        ConfigError: There are more or fewer numbers than parts, or they do not add up to all layers.
    """
    if len(counts) != num_parts or sum(counts) != num_layers:
        raise ConfigError(
            f"partition {list(counts)} has {len(counts)} parts, {sum(counts)} layers: expected {num_parts} numbers, "
            f"one for each stage and chunk, that add up to the {num_layers} layers."
        )
    return [0, *itertools.accumulate(counts)]


def split_layers(
    method: Partition, rows: Sequence[LayerRow], num_parts: int, measured: Callable[[], list[float]]
) -> list[int]:
    """The bounds of the parts by a partition_method: part i has the layers bounds[i] up to bounds[i + 1].

    Args:
        rows: Of the layers.
        measured: Seconds of each layer, equal on all ranks; called for "profile" only.
    Raises:
        ConfigError: There are fewer layers than parts, the method is unknown or matches nothing, a list does not fit.
    """
    if (fault := partition_fault(method)) is not None:
        raise ConfigError(f"partition_method={method!r}: {fault}.")
    if not isinstance(method, str):
        return split_as_listed(method, len(rows), num_parts)
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return split_uniform(len(rows), num_parts)
    if kind.lower() == "parameters":
        return split_balanced([row.num_trainable for row in rows], num_parts)
    if kind.lower() == "type":
        return split_balanced(matching_layers([row.class_name for row in rows], pattern), num_parts)
    return split_balanced(measured(), num_parts)
