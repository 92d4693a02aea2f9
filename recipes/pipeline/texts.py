"""Paragraphs of text, as bytes, in batches of similar length: another shape in every step."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from recipes.causal_lm.data import stdlib_functions

VOCABULARY = 257  # the bytes of UTF-8, and one token behind a text
END = 256
PADDING = -100  # in labels

Micro = tuple[torch.Tensor, torch.Tensor]


class Bytes:
    """A tokenizer whose tokens are the bytes of a text."""

    eos_token_id = END

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def batches(number: int, micros: int, samples: int, longest: int) -> list[list[Micro]]:
    """`number` batches of `micros` micro-batches (ids, labels) of `samples` texts, the longest texts first.

    The texts are the functions of Python's standard library: signatures and docstrings. The same on every rank.
    """
    wanted = number * micros * samples
    texts = [text.encode()[: longest - 1] for text in itertools.islice(stdlib_functions("train"), wanted)]
    texts.sort(key=len, reverse=True)
    rows = [torch.tensor([*text, END]) for text in texts]
    made = [_padded(rows[start : start + samples]) for start in range(0, wanted, samples)]
    return [made[start : start + micros] for start in range(0, len(made), micros)]


def _padded(rows: list[torch.Tensor]) -> Micro:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END)
    lengths = torch.tensor([len(row) for row in rows])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], PADDING)
    return ids, labels
