"""Notices what was written to full parameters, and by which rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from hf_zero.errors import StateError
from hf_zero.sharding.flat_param import FlatParam

# Words of 8 bytes whose products with their weights are in memory at once.
_CHUNK = 1 << 17


class EditWatch:
    """Remembers full parameters and says later which of them this rank has written to.

    Args:
        by_value: Compare fingerprints of their bits, before and after: sees every change, and no write that changes
            nothing. Otherwise compare torch's counts of writes in place, which cost nothing and miss `param.data`.
    """

    def __init__(self, flats: Iterable[FlatParam], *, by_value: bool) -> None:
        self.flats = list(flats)
        self.by_value = by_value
        self._marks_of = _fingerprints if by_value else _versions
        self._marks = [self._marks_of(flat) for flat in self.flats]
        self._found = dict[str, int]()  # before others began to watch

    @contextlib.contextmanager
    def leaving_to(self, other: EditWatch) -> Iterator[None]:
        """Inside, writes to the flat parameters that both watch are for `other` to notice."""
        self._found = self.edited()
        try:
            yield
        finally:
            for number, flat in enumerate(self.flats):
                if flat in other.flats:
                    self._marks[number] = self._marks_of(flat)

    def edited(self) -> dict[str, int]:
        """The parameters that this rank has written to, each with what it is recognised by."""
        found = dict(self._found)
        for flat, old in zip(self.flats, self._marks, strict=True):
            new = self._marks_of(flat)
            for index, slot in enumerate(flat.layout.slots):
                if old[index] != new[index] or _is_replaced(flat, index):
                    found[slot.name] = new[index]
        return found

    def take_replaced(self) -> None:
        """`param.data = other` counts as an edit: bring the values to where the parameter lies, and it back to them.

        Raises StateError if the other tensor has another shape.
        """
        for flat in self.flats:
            for index, slot in enumerate(flat.layout.slots):
                param = flat.params[index]
                if _is_replaced(flat, index):
                    if param.shape != slot.shape:
                        raise StateError(
                            f"{slot.name} was given data of shape {tuple(param.shape)}; a sharded parameter keeps its "
                            f"shape {slot.shape}. Change shapes before the model is handed to hf_zero."
                        )
                    flat.full[slot.offset : slot.end].copy_(param.data.reshape(-1))
            flat.bind_views()


def _is_replaced(flat: FlatParam, index: int) -> bool:
    slot, param = flat.layout.slots[index], flat.params[index]
    place = flat.full[slot.offset : slot.end]
    return param.data_ptr() != place.data_ptr() or param.shape != slot.shape


def _versions(flat: FlatParam) -> list[int]:
    return [param._version for param in flat.params]


def _fingerprints(flat: FlatParam) -> list[int]:
    sums = [fingerprint(flat.full[slot.offset : slot.end]) for slot in flat.layout.slots]
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []


def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """A number, int64 0-dim, that another value anywhere in `flat` changes.

    1-D, contiguous, starting at a multiple of 8 bytes, as parameters in a flat parameter do.
    """
    raw = flat.detach().view(torch.uint8)
    end = raw.numel() // 8 * 8
    words = raw[:end].view(torch.int64)
    weights = torch.arange(1, 2 * max(min(_CHUNK, words.numel()), 8), 2, device=raw.device)
    total = (raw[end:] * weights[: raw.numel() - end]).sum()
    for number, chunk in enumerate(torch.split(words, _CHUNK)):
        total += (chunk * weights[: chunk.numel()]).sum() * (2 * number + 3)
    return total
