"""The update rule of offloaded states: native Adam on a thread of its own, beside the training.

[Note: When an update runs]
The numbers are those of the sequential order, whatever runs beside what:
  - At the step, jobs are submitted in the order in which the next forward needs their parameters. Parameters that are
    unsharded between uses are visible to everybody, so the step waits for them; a unit that is gathered on demand is
    waited for at its next gather, so its update runs beside the forward.
  - Where nothing clips and the states are on disk, an accumulator's job starts as soon as its gradient is complete, in
    backward. Its results go to other regions of the disk; the step takes them if what they were made from still holds
    (hyperparameters, no late gradient, no clipping by the caller), and otherwise undoes them and starts again.
  - A delayed update (Ren et al. 2021, ZeRO-Offload, section 5.3) runs beside the next forward and backward, with
    gradient memory of its own, and is published by the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_zero.config import ResolvedConfig
from hf_zero.native.library import library
from hf_zero.optim.offload.host_state import HostState, Hyper, UpdateJob
from hf_zero.optim.offload.param_writer import ParamWriter, make_writer, must_stage
from hf_zero.optim.offload.update_worker import UpdateWorker
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.update_rule import MOMENTS, UpdateRule
from hf_zero.progress import progress
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.storage import HostStore


@dataclass(frozen=True)
class HostAdamSettings:
    host: HostStore  # for parameters that wait to be published
    early: bool  # start in backward; only where nothing clips
    delay_from: int | None  # first step whose update is delayed; None: none is
    moments_dtype: torch.dtype | None  # None: the masters' type

    @classmethod
    def of(cls, config: ResolvedConfig, host: HostStore, *, clips: bool) -> HostAdamSettings:
        offload = config.zero.offload_optimizer
        return cls(
            host=host,
            early=not clips,
            delay_from=offload.delayed_update_start if offload.delayed_update else None,
            moments_dtype=torch.bfloat16 if config.moments_16bit else None,
        )

    def for_groups(self, groups: Sequence[Mapping[str, Any]]) -> HostAdamSettings:
        """These settings, unless the groups of a CPUAdam set what the configuration sets for torch's optimizers."""
        if any(group.get("fp32_optimizer_states") is False for group in groups):
            return replace(self, moments_dtype=torch.bfloat16)
        return self


class HostAdam(UpdateRule):
    """Native Adam for the flat parameters whose states are offloaded; `take_in` adds them.

    Args:
        device: That gradients come from and parameters go to.
    """

    def __init__(self, settings: HostAdamSettings, device: torch.device) -> None:
        library()  # a missing one raises here, not in the middle of the first step
        self._settings = settings
        self.worker: UpdateWorker = UpdateWorker(device)
        weakref.finalize(self, self.worker.end).atexit = False
        self._groups: dict[int, Mapping[str, Any]] = {}
        self.states: dict[GradAccumulator, HostState] = {}
        self._writers: dict[tuple[HostState, bool], ParamWriter] = {}
        self._early: dict[GradAccumulator, UpdateJob] = {}
        self._clipped_last = False
        self._delayed: list[UpdateJob] = []
        self._running: list[UpdateJob] = []
        self._is_waiting = False  # an update is delayed
        self._step = 0

    def take_in(self, owned: Sequence[tuple[OwnedSlice, Mapping[str, Any]]], order: Sequence[GradAccumulator]) -> None:
        """See UpdateRule.take_in."""
        by_accumulator: dict[GradAccumulator, list[OwnedSlice]] = {}
        for slice_, group in owned:
            self._groups[id(slice_)] = group
            by_accumulator.setdefault(slice_.acc, []).append(slice_)
        mine = [acc for acc in order if acc in by_accumulator]
        total = sum(acc.flat.layout.shard_numel for acc in mine)
        shown = any(acc.comm_rank == 0 for acc in mine)
        with progress("Reserving optimizer states", total, unit="elements", shown=shown) as done:
            for acc in mine:  # a disk may fill them with zeros
                self.states[acc] = HostState(acc, by_accumulator[acc], self._settings.moments_dtype)
                done(acc.flat.layout.shard_numel)

    def restart_at(self, step: int) -> None:
        """`step` updates have been made before, in another run."""
        self._step = step

    # ---------------------------------------------------------------- in backward
    def gradient_is_final(self, acc: GradAccumulator) -> None:
        """The gradient of `acc` is complete: start its update now if it can be undone. See [Note]."""
        state = self.states.get(acc)
        if state is None or not self._may_start_early(state) or acc in self._early:
            return
        job = self._make_job(state, [True] * len(state.owned), 1.0, staged=True)
        self._early[acc] = job
        self.worker.submit([job])

    def _may_start_early(self, state: HostState) -> bool:
        return (
            self._settings.early
            and not self._clipped_last
            and not self._is_delayed()
            and state.staging is not None
            and all(slice_.index in state.grads.seen for slice_ in state.owned)
        )

    def rollback(self) -> None:
        """The accumulation window is given up: undo what was started early."""
        jobs, self._early = list(self._early.values()), {}
        for job in jobs:
            job.rollback()

    # ---------------------------------------------------------------- the step
    def step(self, has_grad: Mapping[GradAccumulator, Sequence[bool]], factor: float) -> bool:
        """Start the updates of this step; return whether parameters change now: the same on all ranks.

        A rank may own nothing of a flat parameter, or of all, and still takes part in what follows from a change.

        Args:
            has_grad: By gradient accumulator: whether each of its parameters had a gradient on any rank.
            factor: Multiplies all gradients.
        """
        self._clipped_last = factor != 1.0
        delayed = self._is_delayed()
        published = self.finish()
        jobs = []
        for key, state in self.states.items():
            present = [has_grad[key][slice_.index] for slice_ in state.owned]
            job = self._take_early(key, present, factor)
            if job is None:
                job = self._make_job(state, present, factor, staged=delayed)
                self.worker.submit([job])
            job.commit()
            jobs.append(job)
        self._step += 1
        if delayed:
            self._delayed = jobs
            self._is_waiting = True
            return published
        self.worker.bring_forward(jobs)
        self._running = jobs
        for job in jobs:
            job.state.flat.update = job
        return True

    def _take_early(self, key: GradAccumulator, present: list[bool], factor: float) -> UpdateJob | None:
        job = self._early.pop(key, None)
        if job is None:
            return None
        if factor == 1.0 and job.gradient_is_unchanged and job.hypers == self._hypers(job.state, present):
            return job
        job.rollback()
        return None

    def _make_job(self, state: HostState, present: list[bool], factor: float, *, staged: bool) -> UpdateJob:
        delayed = self._is_delayed()
        writer, hypers = self._writer(state, staged=staged), self._hypers(state, present)
        return UpdateJob(state, hypers, factor, writer, staged=staged and not delayed, swap=delayed)

    def _hypers(self, state: HostState, present: list[bool]) -> list[Hyper | None]:
        return [
            Hyper.of(self._groups[id(slice_)]) if there else None
            for slice_, there in zip(state.owned, present, strict=True)
        ]

    def _writer(self, state: HostState, *, staged: bool) -> ParamWriter:
        staged = staged or must_stage(state.flat)
        key = (state, staged)
        if key not in self._writers:
            self._writers[key] = make_writer(state.flat, self._settings.host, staged=staged)
        return self._writers[key]

    def _is_delayed(self) -> bool:
        return self._settings.delay_from is not None and self._step >= self._settings.delay_from

    # ---------------------------------------------------------------- waiting
    @property
    def has_delayed(self) -> bool:
        """See UpdateRule.has_delayed."""
        return self._is_waiting

    def finish(self) -> bool:
        """Finish and publish everything that has been started by a step; return whether a delayed update was."""
        was_waiting, self._is_waiting = self._is_waiting, False
        jobs = [*self._running, *self._delayed]
        self._running, self._delayed = [], []
        for job in jobs:
            job.wait()
            if job.state.flat.update is job:
                job.state.flat.update = None
        return was_waiting

    # ---------------------------------------------------------------- state in and out
    def state_of(self, owned: OwnedSlice) -> dict[str, Any]:
        """The state of a slice by kind: the stored shard of each moment, and "step"; {} before its first update."""
        state, number = self._find(owned)
        if not state.steps[number]:
            return {}
        return {**dict(zip(MOMENTS, state.moments, strict=True)), "step": state.steps[number]}

    def load_run(self, owned: OwnedSlice, values: Mapping[str, Any]) -> None:
        """Set moments (1-D or the slice's shape) and step of a slice from torch's names; what is missing is zero."""
        state, number = self._find(owned)
        for kind, moment in zip(MOMENTS, state.moments, strict=True):
            value = values.get(kind)
            if value is None:
                value = torch.zeros(owned.slice.numel, dtype=moment.dtype, device="cpu")
            moment.write_slice(owned.slice, value.reshape(-1))
        state.steps[number] = int(values.get("step", 0))

    def _find(self, owned: OwnedSlice) -> tuple[HostState, int]:
        state = self.states[owned.acc]
        return state, state.owned.index(owned)

    def moment_bytes(self) -> int:
        return sum(moment.nbytes for state in self.states.values() for moment in state.moments)

    def close(self) -> None:
        self.worker.close()
        for state in self.states.values():
            state.drop()
        for writer in self._writers.values():
            writer.close_for_good()
        self._writers.clear()
