"""Saves that are written while the training goes on: `{"checkpoint": {"async": true}}`.

[Note: A save in the background]
    1  main threads     agree on the folder, copy what they save into host memory (snapshot.py), and go on; what is on
                        a disk is kept there as it is, and not copied
    2  a thread each    writes this rank's file once all ranks have copied, and tells rank 0's thread what it wrote, or
                        why it could not
    3  rank 0's thread  commits the manifest and sets `latest`, or deletes the files; it tells the others which. Where
                        the nodes have folders of their own, a rank of each commits, step by step with all others
    4  main threads     learn with the vote of a step that all threads are through; then all raise what failed, in the
                        same step

Threads talk through the key-value store, so no collective of the training meets one of a save, and a checkpoint is
published without another step. At most one is in flight: the next save, a load and a teardown wait for it first. The
process does not end until the save is through, after an exception in the training too, nor by SIGTERM.

A rank may live and not answer: it was stopped, or its disk hangs. Who waits for it says so after `desync_timeout`, and
every minute from then on, while the training goes on. Where the main thread waits for the save, or the process ends,
the rank gives the save up, and all others do then. A rank whose own disk hangs leaves its thread behind.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from hf_zero.checkpoint.format import Manifest, SaveInfo
from hf_zero.checkpoint.snapshot import SnapshotMemory
from hf_zero.checkpoint.writer import (
    FileRecord,
    SliceState,
    abandon,
    build_manifest,
    follow_up,
    prepare_commit,
    publish,
)
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.process_end import Turn, end_with_python
from hf_zero.distributed.store_protocol import LostRankError, MessageBox
from hf_zero.errors import CheckpointError

logger = logging.getLogger(__name__)

_OUTCOME = "outcome"
_GIVEN_UP = "given up"  # by the first rank that does, and why
_SAY_EVERY_S = 60.0
_LOOK_EVERY_S = 0.5
_LATE_S = 10.0  # after which a thread hangs that should have given up: the store may be in a process that was stopped
# A commit has three phases, each over on all that commit before the next: what may fail comes before the first
# rename, and old files go after the last.
_PREPARE, _PUBLISH, _FOLLOW_UP = "prepare", "publish", "follow up"


@dataclass(frozen=True)
class Job:
    """The part that a rank has in one save.

    Args:
        write: Writes this rank's file; None where other ranks hold everything.
        beside: What those that commit write beside `zero/`; see [Note: Commit order].
        committers: By rank, who commits what it has written; rank 0 is one of them.
    """

    folder: Path
    info: SaveInfo
    write: Callable[[], FileRecord] | None
    beside: Mapping[Path, bytes]
    committers: Sequence[int]


class BackgroundSaves:
    """The saves of one engine, a VoteItem. All ranks must call each method but `when_published`."""

    def __init__(self, comm: Comm, *, pin: bool) -> None:
        self._memory = SnapshotMemory(comm.device, pin=pin)
        self._pin = pin
        self._sigterm = _TerminationWaits()
        self._comm = comm
        self._running: _Save | None = None
        self._all_through = False
        comm.add_vote_item(self)

    def prepare(self, nbytes: int) -> None:
        """Take memory for the first `copy` beside the training. Not of all ranks."""
        self._memory.prepare(nbytes)

    def copy(
        self, states: Sequence[SliceState], buffers: Mapping[str, torch.Tensor]
    ) -> tuple[list[SliceState], dict[str, torch.Tensor]]:
        """The same in host memory that stays until the next call. Not of all ranks; no save may be in flight."""
        return self._memory.copy(states, buffers)

    def start(self, job: Job) -> None:
        """Write in the background. The one before must be over: see `finish`."""
        if self._running is not None:
            raise AssertionError(f"{job.folder}: another save is in flight")
        self._all_through = False
        comm = self._comm
        self._running = _Save(job, comm, self._memory.release)
        end_with_python(self._running, Turn.SAVES)
        self._sigterm.wait_for(self._running)
        self._running.start()

    def own_value(self) -> float:
        return float(self._running is None or not self._running.is_through)

    def on_vote(self, total: float) -> None:
        self._all_through = total == 0

    def after_step(self) -> None:
        """Raise CheckpointError, on all ranks in the same step, if a save has failed."""
        if self._all_through:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight. Raises CheckpointError, on all ranks, if it has failed."""
        running, self._running = self._running, None
        self._all_through = False
        if running is not None:
            running.end_with_python()
            self._sigterm.restore()
            if running.is_alive():  # its copy is still being read
                self._memory = SnapshotMemory(self._comm.device, pin=self._pin)
            if running.problem:
                raise CheckpointError(running.problem)

    def when_published(self, call: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """Call `call` once the save in flight is published, now if it is, or `otherwise` once it has failed."""
        if self._running is None:
            call()
        else:
            self._running.when_over(call, otherwise or (lambda: None))

    def close(self) -> None:
        """End the saves of this engine; `finish` comes before."""
        self._comm.remove_vote_item(self)
        self._memory.free()


class _TerminationWaits:
    """Lets SIGTERM end this process after the save in flight, as it would have: by the signal.

    Only where it would end the process at once: who has a handler decides alone. The others' threads go on while this
    rank waits, so the save ends on all ranks, whichever of them get the signal. [Note: A save in the background]
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], None] | None = None

    def wait_for(self, save: _Save) -> None:
        """Let SIGTERM wait for `save` until `restore`. Python allows it in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return

        def handler(number: int, frame: FrameType | None) -> None:
            if save.ident is not None:  # else it was not started
                save.end_with_python()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        self._handler = handler
        signal.signal(signal.SIGTERM, handler)

    def restore(self) -> None:
        """The signal ends the process at once again, unless somebody has set another handler meanwhile."""
        handler, self._handler = self._handler, None
        if handler is not None and signal.getsignal(signal.SIGTERM) == handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Save(threading.Thread):
    """One rank's thread of one save."""

    def __init__(self, job: Job, comm: Comm, written: Callable[[], None]) -> None:
        super().__init__(name="hf_zero-save", daemon=True)
        self._job = job
        self._written = written  # called when this rank's copy has been read, or will not be
        self._box = comm.message_box()
        self._timeout_s = comm.timeout_s
        self._is_awaited = threading.Event()  # by the main thread
        self._is_left = False
        self._waits_since: float | None = None  # for others; None while it works itself
        self._rank = comm.rank
        self._ranks = range(comm.world_size)
        self._others = sorted(set(job.committers) - {0})  # beside rank 0, who commit
        self._may_be_published = False  # on another file system, with these files
        self._lock = threading.Lock()
        self._calls: list[tuple[Callable[[], None], Callable[[], None]]] = []  # what follows; if it fails
        self.problem = ""  # why it failed
        self.is_through = False

    def run(self) -> None:
        try:
            self.problem = self._save()
        except LostRankError as error:
            self.problem = f"{self._job.folder} was not saved: {error} while it was written"
            self._discard()
        except Exception as error:
            self.problem = f"{self._job.folder} was not saved: {_text(error)}"
        with self._lock:
            self.is_through = True
            calls = self._calls
        if self.problem:
            logger.error("%s", self.problem)
        try:
            for call, otherwise in calls:
                (otherwise if self.problem else call)()
        except Exception:  # nobody waits for it
            logger.exception("%s: what was to follow the save has failed", self._job.folder)

    def end_with_python(self) -> None:
        """Wait for its end, or leave it behind with `problem` set where this rank's disk or another rank hangs."""
        self._is_awaited.set()
        say_at = leave_at = time.monotonic() + self._timeout_s
        while self.is_alive() and not self._is_left:
            self.join(_LOOK_EVERY_S)
            now, waits_since = time.monotonic(), self._waits_since
            if now < leave_at:
                continue
            if waits_since is not None:
                if now > max(leave_at, waits_since + self._timeout_s) + _LATE_S:
                    self._leave(f"the key-value store has not answered for {now - waits_since:.0f} s")
            elif self._box is not None and self._box.has(_GIVEN_UP):
                self._leave(_reason(self._box))
            elif now > say_at:
                say_at += _SAY_EVERY_S
                logger.warning("rank %d: the save of %s still writes this rank's file", self._rank, self._job.folder)

    def _leave(self, problem: str) -> None:
        self._is_left = True
        self.problem = f"{self._job.folder} was not saved: {problem}"
        logger.error("%s", self.problem)

    def when_over(self, call: Callable[[], None], otherwise: Callable[[], None]) -> None:
        with self._lock:
            if not self.is_through:
                self._calls.append((call, otherwise))
                return
        (otherwise if self.problem else call)()

    def _save(self) -> str:
        """Save, and return why that failed, the same on all ranks, or nothing."""
        if self._box is None:
            record, problem = self._write()
            return self._commit([record], problem)
        self._wait_for_copies(self._box)
        record, problem = self._write()
        self._box.send(f"wrote/{self._rank}", pickle.dumps((record, problem)))
        if self._rank != 0:
            if self._rank in self._others:
                self._follow(self._box)
            outcome = self._receive(self._box, {_OUTCOME: 0}, "said whether it is saved")[0].decode()
            self._box.send(f"heard/{self._rank}", b"1")
            return outcome
        wrote = {f"wrote/{rank}": rank for rank in self._ranks}
        answers = map(pickle.loads, self._receive(self._box, wrote, "written their files"))
        records, problems = zip(*answers, strict=True)
        given_up = _reason(self._box) if self._box.has(_GIVEN_UP) else ""
        outcome = self._commit(records, "\n".join(filter(None, [*problems, given_up])))
        self._box.send(_OUTCOME, outcome.encode())
        self._wait_for_readers(self._box)
        return outcome

    def _wait_for_copies(self, box: MessageBox) -> None:
        """Wait until all ranks have copied: writing now would slow down copies that still block training."""
        try:
            box.send(f"copied/{self._rank}", b"1")
            self._receive(box, {f"copied/{rank}": rank for rank in self._ranks}, "copied what they save")
        except LostRankError:
            self._written()
            raise

    def _receive(
        self, box: MessageBox, subjects: Mapping[str, int], what: str, *, gives_up: bool = True
    ) -> list[bytes]:
        """Receive messages. `subjects` says which rank sends each, and `what` says what that rank has done then."""
        began = self._waits_since = time.monotonic()
        say_after = self._timeout_s

        def on_wait() -> None:
            nonlocal say_after
            waited = time.monotonic() - began
            if waited < self._timeout_s:
                return
            if gives_up and box.has(_GIVEN_UP):
                raise LostRankError(_reason(box))
            missing = sorted({rank for subject, rank in subjects.items() if not box.has(subject)})
            text = f"rank(s) {missing} have not {what} for {waited:.0f} s (stopped, or a disk that hangs)"
            if missing and self._is_awaited.is_set():
                if gives_up:
                    box.send(_GIVEN_UP, text.encode())
                raise LostRankError(text)
            if missing and waited >= say_after:
                say_after = waited + _SAY_EVERY_S
                logger.warning("rank %d: the save of %s waits: %s", self._rank, self._job.folder, text)

        received = box.receive(list(subjects), on_wait)
        self._waits_since = None
        return received

    def _write(self) -> tuple[FileRecord | None, str]:
        try:
            return None if self._job.write is None else self._job.write(), ""
        except Exception as error:
            return None, f"rank {self._rank}: {_text(error)}"
        finally:
            self._written()

    def _commit(self, records: Sequence[FileRecord | None], problem: str) -> str:
        """Rank 0's part; it leads those of the others that commit."""
        whole: Manifest | None = None
        if not problem:
            try:
                whole = build_manifest(self._job.info, [record for record in records if record is not None])
            except Exception as error:  # the others wait to hear of it, whatever it is
                problem = f"rank 0: {_text(error)}"
        for phase in (_PREPARE, _PUBLISH, _FOLLOW_UP):
            if self._box is not None and self._others:
                self._box.send(phase, pickle.dumps((whole, problem)))
            if problem or whole is None:
                self._discard()
                return f"{self._job.folder} was not saved in the background: {problem}"
            problems = [self._do(phase, whole)]
            if self._box is not None and self._others:
                followed = {f"{phase}/{rank}": rank for rank in self._others}
                problems += [one.decode() for one in self._receive(self._box, followed, f"answered {phase!r}")]
            problem = "\n".join(filter(None, problems))
        return f"{self._job.folder} was saved; then {problem}" if problem else ""

    def _follow(self, box: MessageBox) -> None:
        """The part of another rank that commits."""
        for phase in (_PREPARE, _PUBLISH, _FOLLOW_UP):
            whole, problem = pickle.loads(self._receive(box, {phase: 0}, f"said {phase!r}")[0])
            if problem:
                self._discard()
                return
            box.send(f"{phase}/{self._rank}", self._do(phase, whole).encode())

    def _do(self, phase: str, whole: Manifest) -> str:
        """One phase of a commit into this rank's file system; why it failed, or nothing."""
        folder, here = self._job.folder, self._job.committers
        try:
            if phase == _PREPARE:
                ranks = [rank for rank in range(whole.world_size) if here[rank] == self._rank]
                prepare_commit(folder, whole, ranks, self._job.beside)
            elif phase == _PUBLISH:
                self._may_be_published = bool(self._others)
                publish(folder)
                self._may_be_published = False  # it is, here: the manifest names its files
            else:
                follow_up(folder, whole, self._job.beside)
        except Exception as error:  # who leads waits to hear of it, whatever it is
            if phase == _FOLLOW_UP:
                self._discard()
            return f"rank {self._rank}: {_text(error)}"
        return ""

    def _discard(self) -> None:
        """Delete what was written, where this rank commits. A manifest somewhere may name it once one is published."""
        if self._rank in self._job.committers and not self._may_be_published:
            abandon(self._job.folder, self._job.beside)

    def _wait_for_readers(self, box: MessageBox) -> None:
        """The store may live in rank 0: it must not end before the others have read the outcome."""
        subjects = ("copied", "wrote", "heard")
        copied, wrote, heard = ([f"{subject}/{rank}" for rank in self._ranks] for subject in subjects)
        phases = (_PREPARE, _PUBLISH, _FOLLOW_UP) if self._others else ()
        led = [f"{phase}/{rank}" for phase in phases for rank in self._others]
        try:
            readers = dict(zip(heard[1:], self._ranks[1:], strict=True))
            self._receive(box, readers, "read that it is saved", gives_up=False)
            box.delete([*heard[1:], *copied, *wrote, *phases, *led, _OUTCOME])
        except LostRankError as error:
            logger.warning("%s was saved; then %s", self._job.folder, error)


def _reason(box: MessageBox) -> str:
    return box.receive([_GIVEN_UP], on_wait=lambda: None)[0].decode()


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
