"""Finds the live parameter or buffer that a stored tensor is for, as transformers' loader does."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


class Match(NamedTuple):
    name: str  # the live name, or one that the model does not have
    pattern: str | None  # of the conversion that makes the live tensor from stored ones; None: it is the stored one


def match_stored(
    model: nn.Module, stored: Iterable[str], mapping: Sequence[Any], live: Mapping[str, Any]
) -> dict[str, Match]:
    """Return what every stored name is for, in the order in which transformers reads them.

    Args:
        mapping: WeightRenamings and WeightConverters. Matching leaves marks in them, so it is done with copies.
        live: The model's state dict, or anything with its names.
    """
    mapping = copy.deepcopy(list(mapping))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = getattr(model, "base_model_prefix", None)
    known: Any = live
    matched = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in live and key in live:  # it should not have been renamed
            name, pattern = rename_source_key(key, [], [], prefix, known)
        matched[key] = Match(name, pattern)
    return matched
