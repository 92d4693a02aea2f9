"""Files of a checkpoint that lie on other nodes: opened here, and read through the ranks that see them.

[Note: Rounds]
A rank's load reads what it needs when it needs it, and knows nothing of other nodes. Beside it a thread takes part in
rounds: every rank says what its load waits for, if anything, and the ranks that see those files send the bytes, in
one exchange that all ranks take part in. The rounds end when the loads of all ranks have ended, well or not. So no
rank waits for a message that another does not send, whatever each of them reads, and in which order. Checksums are
compared where the bytes arrive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from hf_zero.checkpoint.agreement import refuse_differences
from hf_zero.checkpoint.folders import offering, read_manifest
from hf_zero.checkpoint.format import ConsolidateError, Manifest, check_sizes, manifest_path, zero_folder
from hf_zero.checkpoint.rank_reader import MAX_OPEN_FILES, SafetensorsFile
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError

_CHUNK_BYTES = 1 << 20  # of one request
_REQUESTS_IN_A_ROUND = 16  # that one rank answers at most: what they hold in memory together
_PATIENCE_S = 0.02  # that a round waits for the load of this rank to ask for something
_WHAT = "pieces of checkpoint files"
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_GOOD, _BAD = 0, 1  # the last byte of an answer
_T = TypeVar("_T")


@dataclass
class _Request:
    rank: int  # whose file
    offset: int
    view: memoryview  # to be filled
    error: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)


class FileExchange:
    """Brings bytes of rank files to ranks that do not see them. See [Note: Rounds].

    Args:
        seers: By rank file, the ranks of this run that see it; at least one.
    """

    def __init__(self, comm: Comm, paths: Sequence[Path], seers: Sequence[Sequence[int]]) -> None:
        self._comm = comm
        self._seers = seers
        self._paths = paths
        self._files: dict[int, SafetensorsFile] = {}  # that this rank has read for others
        self._asked: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()  # None: the load has ended
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_needed = any(len(ranks) < comm.world_size for ranks in seers)
        self._round = 0

    def run(self, work: Callable[[], _T]) -> _T:
        """Do `work`, which reads files that others see. All ranks must call; returns and raises what `work` does."""
        if not self._is_needed:
            return work()
        self._thread = threading.Thread(target=self._take_part, name="hf_zero file exchange", daemon=True)
        self._thread.start()
        try:
            return work()
        finally:
            self._asked.put(None)
            self._thread.join()
            for file in self._files.values():
                file.close()
            if self._failure is not None:
                raise self._failure

    def fetch(self, rank: int, view: memoryview, offset: int) -> None:
        """Fill `view` from a byte of the file of `rank` on. Called inside the work that `run` does."""
        assert self._thread is not None
        for start in range(0, len(view), _CHUNK_BYTES):
            request = _Request(rank, offset + start, view[start : start + _CHUNK_BYTES])
            self._asked.put(request)
            while not request.is_over.wait(1.0):
                if not self._thread.is_alive():
                    raise ConsolidateError(f"{self.place_of(rank)} cannot be read: {self._failure}")
            if request.error:
                raise ConsolidateError(request.error)

    def place_of(self, rank: int) -> str:
        """Say where this rank's bytes of that file come from, for messages."""
        return f"{self._paths[rank]} on the node of rank {self._owner(rank, self._comm.rank)}"

    # ---------------------------------------------------------------- in the thread
    def _take_part(self) -> None:
        own: _Request | None = None
        has_ended = False
        try:
            while True:
                if own is None and not has_ended:
                    try:
                        own = self._asked.get(timeout=_PATIENCE_S)
                        has_ended = own is None
                    except queue.Empty:
                        pass
                mine = None if own is None else (own.rank, own.offset, len(own.view))
                everyone = self._comm.all_gather_object((has_ended, mine), _WHAT)
                if all(ended for ended, _ in everyone):
                    return
                if self._answer([request for _, request in everyone], own):
                    own = None
        except BaseException as error:  # raised where the load runs
            self._failure = error

    def _answer(self, wanted: Sequence[tuple[int, int, int] | None], own: _Request | None) -> bool:
        """Do one round; returns whether `own` is over. All ranks give the same `wanted`, by rank."""
        size, me = self._comm.world_size, self._comm.rank
        self._round += 1
        taken: dict[int, int] = {}  # rank -> requests that it answers in this round
        parts, sizes = [_NOTHING] * size, [0] * size
        owner_of_mine = -1
        for turn in range(size):
            asking = (turn + self._round) % size  # not always the same ones first
            request = wanted[asking]
            if request is None:
                continue
            rank, offset, nbytes = request
            owner = self._owner(rank, asking)
            taken[owner] = taken.get(owner, 0) + 1
            if taken[owner] > _REQUESTS_IN_A_ROUND:
                continue
            if owner == me:
                parts[asking] = self._read(rank, offset, nbytes)
            if asking == me:
                sizes[owner], owner_of_mine = nbytes + 1, owner
        if not taken:
            return False
        answers = self._comm.exchange_bytes(parts, sizes, _WHAT)
        if own is None or owner_of_mine < 0:
            return False
        answer = answers[owner_of_mine].numpy().data
        own.view[:] = answer[:-1]
        if answer[-1] != _GOOD:
            own.error = f"{self.place_of(own.rank)} could not be read there: {bytes(answer[:-1]).decode().strip()}"
        own.is_over.set()
        return True

    def _owner(self, rank: int, asking: int) -> int:
        """Return the rank that sends pieces of the file of `rank` to `asking`: not the same one to all."""
        return self._seers[rank][asking % len(self._seers[rank])]

    def _read(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes, and one that says whether they are there; else the reason."""
        answer = torch.zeros(nbytes + 1, dtype=torch.uint8, device="cpu")
        view = answer.numpy().data
        try:
            if rank not in self._files and len(self._files) >= MAX_OPEN_FILES:
                for file in self._files.values():
                    file.close()
            self._files.setdefault(rank, SafetensorsFile(self._paths[rank])).read(view[:-1], offset)
        except (OSError, ValueError) as error:
            view[:-1] = str(error).encode("ascii", "replace")[:nbytes].ljust(nbytes)
            view[-1] = _BAD
        return answer


class _FileElsewhere(SafetensorsFile):
    """A rank file that other ranks see, read like one that is here."""

    def __init__(self, exchange: FileExchange, rank: int, size: int) -> None:
        super().__init__(Path(exchange.place_of(rank)))
        self._exchange = exchange
        self._rank = rank
        self._size = size  # as the ranks that see it have found

    def read(self, view: memoryview, offset: int, end: int = 0) -> None:
        self._exchange.fetch(self._rank, view, offset)

    def size(self) -> int:
        return self._size


# -------------------------------------------------------------------- who has what
def open_on_nodes(comm: Comm, folder: Path) -> tuple[CheckpointReader, FileExchange, list[int]]:
    """Open a checkpoint of which each node may have a part; with it, the files whose headers this rank is to check.

    All ranks must call.

    Raises:
        CheckpointError: On every rank: no node has the manifest or one of the files, the nodes have different
            checkpoints, or a file is damaged.
    """
    manifest = _same_manifest(comm, folder)
    paths = [zero_folder(folder) / file.name for file in manifest.files]

    def present() -> list[int] | None:
        here = [rank for rank, path in enumerate(paths) if path.exists()]
        with offering(folder):
            check_sizes(folder, [manifest.files[rank] for rank in here])
        return here if len(here) < len(paths) else None  # most often all are there, and the list would be long

    seen = comm.agree("checkpoint", present, CheckpointError)
    by_rank = [set(range(len(paths)) if here is None else here) for here in seen]
    seers = [[rank for rank, here in enumerate(by_rank) if one in here] for one in range(len(paths))]
    _refuse_missing(folder, manifest, [one for one, ranks in enumerate(seers) if not ranks])
    exchange = FileExchange(comm, paths, seers)
    elsewhere = {
        one: _FileElsewhere(exchange, one, manifest.files[one].size)
        for one in range(len(paths))
        if comm.rank not in seers[one]
    }
    mine = [one for one, ranks in enumerate(seers) if ranks[one % len(ranks)] == comm.rank]
    return CheckpointReader(folder, manifest, elsewhere), exchange, mine


def _same_manifest(comm: Comm, folder: Path) -> Manifest:
    """The manifest on this node, or that of another one where there is none here."""

    def look() -> Manifest | None:
        return read_manifest(folder) if manifest_path(folder).exists() else None

    looked: list[Manifest | None] = []

    def identity() -> str | None:
        looked.append(look())
        return None if looked[0] is None else looked[0].identity

    found = comm.agree("checkpoint", identity, CheckpointError)
    holders = [rank for rank, one in enumerate(found) if one is not None]
    if not holders:
        # Reading the manifest says what is wrong.
        comm.agree("checkpoint", (lambda: bool(read_manifest(folder))) if comm.rank == 0 else None, CheckpointError)
    here = looked[0]
    mine = f"{folder}, {found[holders[0]] if here is None else here.identity}"
    refuse_differences("load_checkpoint", comm.all_gather_object(mine, "load_checkpoint"), _MIXED)
    if len(holders) == comm.world_size:
        assert here is not None
        return here
    shown = here if comm.rank == holders[0] else None
    given: Manifest = comm.all_gather_object(shown, "checkpoint manifest")[holders[0]]
    return given


_MIXED = (
    "nothing was loaded. If a save was interrupted, delete zero/manifest.json on the nodes with the older save: the "
    "newer one has all its files"
)


def _refuse_missing(folder: Path, manifest: Manifest, missing: Sequence[int]) -> None:
    if missing:
        hosts = manifest.hosts
        names = [
            f"{manifest.files[one].name}{f' (written on {hosts[one]})' if one < len(hosts) else ''}" for one in missing
        ]
        raise CheckpointError(
            f"{folder} is not complete: no node of this run has {', '.join(names)}. Start the run with the nodes that "
            f"have them, or copy them into {zero_folder(folder)} of any node of this run."
        )
