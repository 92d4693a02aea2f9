"""Layers are split at the best places: against all splits that there are."""

from __future__ import annotations

import itertools
import random

import pytest

from hf_zero.errors import ConfigError
from hf_zero.extras.pipeline.layer_partition import matching_layers, split_balanced, split_uniform
from hf_zero.extras.pipeline.pipeline_section import partition_fault


def all_splits(num_layers: int, num_parts: int) -> list[list[int]]:
    inner = itertools.combinations(range(1, num_layers), num_parts - 1)
    return [[0, *bounds, num_layers] for bounds in inner]


def loads(weights: list[float], bounds: list[int]) -> list[float]:
    return [sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds)]


def test_no_split_has_a_lighter_heaviest_part() -> None:
    rng = random.Random(0)
    for _ in range(200):
        weights: list[float] = [rng.randint(0, 9) for _ in range(rng.randint(1, 8))]
        num_parts = rng.randint(1, len(weights))
        found = split_balanced(weights, num_parts)

        def cost(bounds: list[int]) -> tuple[float, float, int]:
            parts = loads(weights, bounds)  # noqa: B023
            squares = sum((stop - start) ** 2 for start, stop in itertools.pairwise(bounds))
            return max(parts), sum(part * part for part in parts), squares

        assert found in all_splits(len(weights), num_parts), "a part is empty"
        assert cost(found) == min(map(cost, all_splits(len(weights), num_parts)))


def test_equal_numbers_of_layers_go_to_the_first_parts_first() -> None:
    assert split_uniform(7, 3) == [0, 3, 5, 7]
    assert split_balanced([0] * 7, 3) in ([0, 3, 5, 7], [0, 2, 4, 7], [0, 2, 5, 7])


def test_a_pattern_takes_class_names_in_any_case() -> None:
    names = ["Embedding", "GPT2Block", "GPT2Block", "Linear"]
    assert matching_layers(names, "gpt2block") == [0, 1, 1, 0]
    with pytest.raises(ConfigError, match=r'"type:Bert" matches no layer.*Embedding, GPT2Block, Linear'):
        matching_layers(names, "Bert")
    assert "no regular expression" in (partition_fault("type:(") or "")
