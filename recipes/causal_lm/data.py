"""Text for this recipe, tokenized and packed into blocks of equal length.

The default text is on every machine that has Python: the functions of the standard library, as signature and
docstring. Other sources: Debian's fortunes, a text file, or a dataset id of the Hugging Face hub.

Deterministic: every rank, and every run with the same Python and the same arguments, gets the same blocks.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

FORTUNES = Path("/usr/share/games/fortunes")
SEED = 0
EVAL_SHARE = 10  # one document in EVAL_SHARE is kept for evaluation
NOT_LIBRARY = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "ensurepip"]
)


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of `length` token ids; the labels are the ids, as causal language models shift them themselves."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids  # int64 [num_blocks, length]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def load_blocks(
    name: str, tokenizer: Any, *, config: str | None, text_column: str, length: int, num_train: int, num_eval: int
) -> tuple[Blocks, Blocks]:
    """Training and evaluation blocks from the text source `name`; at most `num_train` and `num_eval` of them.

    Args:
        name: "stdlib", "fortunes", a text file (documents apart by blank lines), or a dataset id of the hub.
        config: Configuration of a hub dataset, such as "wikitext-2-raw-v1".
        text_column: Column of a hub dataset that holds the text.
    """
    blocks = []
    for part, most in (("train", num_train), ("eval", num_eval)):
        packed = pack(_documents(name, part, config, text_column), tokenizer, length, most)
        if most and not len(packed):
            raise SystemExit(f"--dataset {name}: its {part} text is shorter than one block of {length} tokens.")
        blocks.append(packed)
    return blocks[0], blocks[1]


def pack(documents: Iterable[str], tokenizer: Any, length: int, most: int) -> Blocks:
    """Documents behind one another, each closed by the end-of-text token, cut into at most `most` blocks."""
    ids: list[int] = []
    for document in documents:
        if len(ids) >= most * length:
            break
        ids.extend(tokenizer(document, add_special_tokens=False)["input_ids"])
        ids.append(tokenizer.eos_token_id)
    num_blocks = min(len(ids) // length, most)
    return Blocks(torch.tensor(ids[: num_blocks * length], dtype=torch.long).view(num_blocks, length))


def _documents(name: str, part: str, config: str | None, text_column: str) -> Iterator[str]:
    if name == "stdlib":
        return stdlib_functions(part)
    if name == "fortunes":
        return _split(_fortunes(), part)
    if Path(name).is_file():
        return _split(Path(name).read_text(encoding="utf-8").split("\n\n"), part)
    return _hub(name, part, config, text_column)


def stdlib_functions(part: str) -> Iterator[str]:
    """The standard library's functions, each as its signature and docstring; whole files go to one part."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if not NOT_LIBRARY & set(file.relative_to(root).parts)]
    random.Random(SEED).shuffle(files)
    for file in files:
        if _part_of(str(file.relative_to(root))) != part:
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    body = textwrap.indent(f'"""{docstring}"""', "    ")
                    yield f"def {node.name}({ast.unparse(node.args)}):\n{body}\n"


def _fortunes() -> list[str]:
    if not FORTUNES.is_dir():
        raise SystemExit(f"--dataset fortunes: {FORTUNES} is not there. Debian: apt-get install fortunes")
    entries = []
    for file in sorted(FORTUNES.iterdir()):
        if file.is_file() and not file.is_symlink() and not file.suffix:
            entries += file.read_text(encoding="utf-8", errors="replace").split("\n%\n")
    random.Random(SEED).shuffle(entries)
    return entries


def _hub(name: str, part: str, config: str | None, text_column: str) -> Iterator[str]:
    from datasets import load_dataset  # only here: a slow import that the packaged text does not need

    splits = load_dataset(name, config)
    if "train" not in splits or text_column not in splits["train"].column_names:
        raise SystemExit(
            f"--dataset {name}: no split 'train' with a column {text_column!r}; it has "
            + ", ".join(f"{split} {rows.column_names}" for split, rows in splits.items())
        )
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    if held_out is None:
        return _split((row[text_column] for row in splits["train"]), part)
    return (row[text_column] for row in splits["train" if part == "train" else held_out] if row[text_column].strip())


def _split(documents: Iterable[str], part: str) -> Iterator[str]:
    return (document for document in documents if document.strip() and _part_of(document) == part)


def _part_of(key: str) -> str:
    # crc32, not hash(): the same on every rank and in every run.
    return "eval" if zlib.crc32(key.encode()) % EVAL_SHARE == 0 else "train"
