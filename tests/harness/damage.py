"""Damage to the files of a checkpoint folder, one at a time, and whether it is found."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_zero.extras.cli.main import main


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@contextlib.contextmanager
def _changed(path: Path, change: Callable[[bytearray], bytearray]) -> Iterator[None]:
    """The file with other bytes, and afterwards as it was."""
    whole = path.read_bytes()
    path.write_bytes(change(bytearray(whole)))
    try:
        yield
    finally:
        path.write_bytes(whole)


def verified(folder: Path) -> str:
    """Return what `hf-zero inspect --verify` says on stderr; "" where it finds nothing."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["inspect", str(folder), "--verify"])
    if (status != 0) != bool(err.getvalue()):
        raise AssertionError(f"exit status {status}, and on stderr: {err.getvalue()!r}")
    return err.getvalue()


def unseen_flips(folder: Path, flips: int, seed: int) -> list[str]:
    """Flip `flips` bits, one at a time, in all files in turn; returns those that verification did not name."""
    chance, files = random.Random(seed), files_of(folder)
    unseen = []
    for number in range(flips):
        path = files[number % len(files)]
        at, bit = chance.randrange(path.stat().st_size), chance.randrange(8)

        def flip(data: bytearray, at: int = at, bit: int = bit) -> bytearray:
            data[at] ^= 1 << bit
            return data

        with _changed(path, flip):
            said = verified(folder)
        if str(path) not in said:
            unseen.append(f"{path}, byte {at}, bit {bit}: {said.strip() or 'nothing was said'}")
    return unseen


def unseen_cuts(folder: Path, seed: int, find: Callable[[], str]) -> list[str]:
    """Cut each file short, one at a time; returns those that `find`, a load's text, does not name."""
    chance = random.Random(seed)
    unseen = []
    for path in files_of(folder):
        for length in (0, chance.randrange(path.stat().st_size), path.stat().st_size - 1):
            with _changed(path, lambda data, length=length: data[:length]):  # type: ignore[misc]
                said = find()
            if path.name not in said:
                unseen.append(f"{path}, cut to {length} bytes: {said.strip() or 'nothing was said'}")
    return unseen
