"""The ranks agree on where a checkpoint goes to or comes from, before anything is written or read.

All ranks must call what is here. What differs by rank is named, and raised on every rank: a tag from the clock, a
relative path in processes that stand in different folders, an option that one rank leaves out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.folders import chosen, holds_nothing, read_manifest, tagged
from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The folder that a checkpoint goes to."""

    root: Path
    tag: str  # "" where the checkpoint is `root` itself

    @property
    def folder(self) -> Path:
        return self.root / self.tag


def agree_on_target(
    comm: Comm,
    save_dir: str | Path | None,
    tag: str | int | None,
    default: str,
    options: dict[str, Any],
    tag_validation: str = "Fail",
) -> Target:
    """Agree on where to save. `default` is the tag where none is given; all ranks must pass the same `options`.

    `tag_validation`: of tags that differ, unless it is "Fail", that of rank 0 counts, with "Warn" after a warning.
    """

    def work() -> tuple[str, str, str, str]:
        root, name = tagged(save_dir, tag, default)
        return str(root), name, _described(root / name, options), _described(root, options)

    answers = comm.agree("save_checkpoint", work, CheckpointError)
    tags = [name for _, name, _, _ in answers]
    if len(set(tags)) > 1 and tag_validation != "Fail":
        refuse_differences("save_checkpoint", [text for _, _, _, text in answers], "nothing was written")
        if tag_validation == "Warn" and comm.rank == 0:
            logger.warning("save_checkpoint: the tag differs by rank: %s. That of rank 0 counts: %r", tags, tags[0])
        return Target(Path(answers[comm.rank][0]), tags[0])
    refuse_differences("save_checkpoint", [text for _, _, text, _ in answers], "nothing was written")
    root, name, _, _ = answers[comm.rank]
    return Target(Path(root), name)


def agree_on_source(
    comm: Comm,
    load_dir: str | Path | None,
    tag: str | int | None,
    options: dict[str, Any],
    *,
    node_local: bool = False,
) -> Path | None:
    """Agree on what to load; None if nothing was saved yet. Paths may differ by host, what is in them may not.

    `node_local`: a rank whose folder is empty takes what the others take from theirs.
    """
    if node_local:
        return _source_on_nodes(comm, load_dir, tag, options)

    def work() -> tuple[str, bool, str]:
        folder = chosen(load_dir, tag)
        empty = folder == Path(str(load_dir)) and holds_nothing(folder)
        return str(folder), empty, _described(None, options) + (f", {folder} holds no checkpoint" if empty else "")

    answers = comm.agree("load_checkpoint", work, CheckpointError)
    refuse_differences("load_checkpoint", [text for _, _, text in answers], "nothing was loaded")
    folder, empty, _ = answers[comm.rank]
    return None if empty else Path(folder)


def _source_on_nodes(
    comm: Comm, load_dir: str | Path | None, tag: str | int | None, options: dict[str, Any]
) -> Path | None:
    def work() -> tuple[str | None, str]:
        folder, root = chosen(load_dir, tag), Path(str(load_dir))
        if folder == root and holds_nothing(folder):
            return None, _described(None, options)
        return str(folder.relative_to(root) if folder.is_relative_to(root) else folder), _described(None, options)

    answers = comm.agree("load_checkpoint", work, CheckpointError)
    names = {name for name, _ in answers if name is not None}
    common = next(iter(names), None)
    if len(names) > 1 and tag in (None, ""):
        common = _newest_of_nodes(comm, Path(str(load_dir)), answers[comm.rank][0])
        if comm.rank == 0:
            said = ", ".join(name or "nothing there" for name, _ in answers)
            logger.warning("%s: `latest` differs by rank: %s. The newest is loaded: %s", load_dir, said, common)
    elif len(names) > 1:
        answers = [(name, f"{load_dir}, {name or 'nothing there'}, {text}") for name, text in answers]
    refuse_differences("load_checkpoint", [text for _, text in answers], "nothing was loaded")
    return None if common is None else Path(str(load_dir)) / common


def _newest_of_nodes(comm: Comm, root: Path, mine: str | None) -> str:
    """Return the newest of the checkpoints that `latest` names on the nodes.

    Nodes set it one by one, when all of them have published the checkpoint: a run that ends in between leaves it so.
    """

    def work() -> tuple[float, str]:
        return (0.0, "") if mine is None else (read_manifest(root / mine).saved_at, mine)

    return max(comm.agree("load_checkpoint", work, CheckpointError))[1]


def _described(folder: Path | None, options: dict[str, Any]) -> str:
    texts = [] if folder is None else [os.path.abspath(folder)]
    return ", ".join([*texts, *(f"{name}={value}" for name, value in options.items())])


def refuse_differences(what: str, texts: Sequence[str], outcome: str) -> None:
    """Raise CheckpointError unless `texts`, in rank order, are equal."""
    if len(set(texts)) < 2:
        return
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    lines = "\n".join(f"  rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items())
    raise CheckpointError(f"{what}: the ranks do not agree, and {outcome}:\n{lines}\nPass the same on every rank.")
