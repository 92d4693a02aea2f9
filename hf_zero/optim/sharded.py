"""The user's torch optimizer, updating shards."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.work import SharedCall
from hf_zero.errors import StateError
from hf_zero.optim.direct_steps import DirectSteps
from hf_zero.optim.loss_scaler import LossScaler, StepGuard
from hf_zero.optim.offload.host_adam import HostAdam, HostAdamSettings
from hf_zero.optim.offload.update_worker import UpdateWorker
from hf_zero.optim.param_groups import OwnedSlice, ShardedGroups
from hf_zero.optim.registry import check_capturable, check_group, check_native, check_optimizer, needs_closure
from hf_zero.optim.scaled_adam import ScaledAdam
from hf_zero.optim.state_access import (
    assemble,
    changed_state,
    check_kind,
    full_state,
    joined_state,
    read_state,
    write_state,
)
from hf_zero.optim.step_ballot import StepFacts, clip_coefficient, hold_ballot
from hf_zero.optim.update_rule import UpdateRule
from hf_zero.optim.updates.elementwise import drop_gradients, give_gradients
from hf_zero.optim.updates.whole_params import make_owners, make_update
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_index import ParamPlace
from hf_zero.sharding.shard import ShardTensor
from hf_zero.sharding.unit import gather_resident

logger = logging.getLogger(__name__)


class ShardedOptimizer(torch.optim.Optimizer):
    """Keeps the user's optimizer object and points its param groups at this rank's master shards.

    Schedulers, callbacks and logging that hold the user's optimizer or its `param_groups` go on working: the groups
    are the same dicts in the same list; only what is under "params" changes.

    Args:
        optimizer: Built over the model's own parameters. State it already has is sharded.
        reducer: Holds the gradient accumulators of all trainable parameters.
        clip: `gradient_clipping`; 0 means the caller clips, or nobody.
        offload: How offloaded states are updated natively.
        guard: Decides which steps are left out.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        param_grads: ParamGrads,
        reducer: GradReducer,
        comm: Comm,
        params: OnDemandParams,
        *,
        clip: float,
        allow_untested: bool | None,
        offload: HostAdamSettings,
        guard: StepGuard,
        after_step: Callable[[], None],
    ) -> None:
        # Not calling super().__init__: the state and the groups are the inner optimizer's own.
        sharded = any(acc.flat.layout.world_size > 1 for acc in reducer.accumulators)
        check_optimizer(optimizer, sharded=sharded, allow_untested=allow_untested, device=comm.device)
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if sharded and any(hooks) and comm.rank == 0:
            logger.warning("the step hooks of the optimizer see ranges of elements (1-D) and not parameters")
        self._is_sharded = sharded
        self._needs_closure = needs_closure(optimizer)
        self._is_on_host = any(
            comm.computes_on_host or not acc.flat.placement.master.is_on_device for acc in reducer.accumulators
        )
        if self._is_on_host:
            check_capturable(optimizer, optimizer.param_groups)
        self.optimizer = optimizer
        self._direct = DirectSteps(optimizer)
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks  # they see this rank's shards
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._reducer = reducer
        self._param_grads = param_grads
        self._comm = comm
        self._params = params
        self._clip = clip
        self.guard = guard
        self._after_step = after_step
        self._facts: StepFacts | None = None
        # The norm of all gradients from that of this model's: other ranks may hold other parts of it.
        self.norm_of_all: Callable[[float], float] = lambda norm: norm
        self._factor = 1.0  # what clipping multiplies natively updated gradients with, in the update itself
        self.attached: dict[str, dict[FlatParam, ShardTensor]] = {}  # kind -> shards that checkpoints hold too
        self.suspended = ""  # why there can be neither a step nor a checkpoint now
        self.away = ""  # why there is no state to be read either; see engine/offloaded_states.py
        self.last_norm: float | None = None
        self._native_flats: list[FlatParam] = []  # in the order of their updates; the same on all ranks
        self._offload = offload.for_groups(optimizer.param_groups)
        owners = make_owners(optimizer, comm, sharded=sharded)
        self._groups = ShardedGroups(optimizer, owners)
        self.owned = self._groups.take(
            reducer.accumulators
        )  # what this rank updates, in the order of the param groups
        self._groups.refuse_strangers()
        self.strategy = make_update(optimizer, reducer, comm, owners)
        self._native: UpdateRule | None = None
        self._update_natively(self.owned, reducer.accumulators)

    # ---------------------------------------------------------------- the optimizer's face
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state; a checkpoint that loads anywhere is engine.save_checkpoint's."""
        self.check_here("state_dict")
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_here("load_state_dict")
        self.optimizer.load_state_dict(state_dict)
        self.strategy.restart()

    def train(self) -> None:
        """Let an optimizer that has weights for training and others for evaluation (schedule-free) exchange them.

        All ranks must call. Others have nothing to do.
        """
        self._exchange_weights("train")

    def eval(self) -> None:
        """See `train`."""
        self._exchange_weights("eval")

    def _exchange_weights(self, mode: str) -> None:
        exchange = getattr(self.optimizer, mode, None)
        if exchange is None:
            return
        self._comm.note_call(f"optimizer.{mode}")
        before = [group.get("train_mode") for group in self.param_groups]
        self._wait_for_masters()
        exchange()
        if None in before or before != [group["train_mode"] for group in self.param_groups]:
            with torch.no_grad():
                self._publish(native_too=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more of the model's parameters: those that are frozen now join once they require gradients.

        All ranks must call, alike.
        """
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        held = [acc for acc in self._reducer.accumulators if any(acc.flat is flat for flat in self._native_flats)]
        late = {param for acc in held for param in acc.flat.params}
        if any(param in late for param in params):
            raise StateError(
                "add_param_group: these share a flat parameter with others whose offloaded update has begun.\n"
                "Give the optimizer all trainable parameters from the start, or freeze the new ones until they join."
            )
        self._comm.note_call("add_param_group")
        check_group(self.optimizer, param_group, params)
        if self._is_on_host:
            check_capturable(self.optimizer, [param_group])
        self.optimizer.add_param_group({**param_group, "params": []})
        self._groups.wait_for(self.optimizer.param_groups[-1], params)
        self.take_in([acc for acc in self._reducer.accumulators if acc not in held])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this accumulation window. All ranks must call."""
        with self._comm.shared_call(SharedCall.DROP):
            self._param_grads.discard()
        self._facts, self._factor = None, 1.0

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the mean gradient so that its L2 norm is at most `max_norm`; return the norm before.

        All ranks must call. `inf` only measures. Follows torch.nn.utils.clip_grad_norm_.
        """
        with self._comm.shared_call(SharedCall.CLIP, max_norm):
            facts = self._facts_of_step(f"step with gradients clipped to {max_norm:g}")
        if (factor := clip_coefficient(facts.norm, max_norm)) != 1.0:
            self._factor *= factor
            for acc in self._reducer.accumulators:
                if not acc.flat.placement.native:
                    acc.scale(factor)
            self._facts = dataclasses.replace(facts, norm=facts.norm * factor)
        return facts.norm

    def reduce_gradients(self) -> None:
        """Reduce what backwards have left in this window; more may be accumulated after it. All ranks must call."""
        self._ballot(closes=False, purpose="reduction of gradients")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters from the mean gradient, bring parameters up to date, start a new accumulation window.

        All ranks must call. A parameter that had no gradient on any rank is left alone, as torch does.

        Args:
            closure: At stage 0, what the optimizer calls to evaluate the loss, as in torch: it forgets the gradients,
                runs forward and backward, and returns this rank's loss.
        Returns:
            What the optimizer returns where there is a closure: of losses, which are means over ranks.
        """
        self.check_active("a step")
        for acc in self._reducer.accumulators:
            acc.flat.check_views()
        if closure is not None:
            return self._step_with(closure)
        if self._needs_closure:
            raise StateError(
                f"{type(self.optimizer).__name__} evaluates the loss itself: call step(closure) of the optimizer that "
                "hf_zero.initialize returned.\nThe closure forgets the gradients, runs forward and backward, and "
                "returns the loss."
            )
        with self._comm.shared_call(SharedCall.UPDATE):
            self._update()

    def _update(self) -> None:
        facts = self._facts_of_step()
        if self._clip > 0:
            self.clip_grad_norm(self._clip)
        if not self.guard.admits(facts.norm, self._comm):
            self.finish_updates()  # a delayed update takes effect one step late, whatever becomes of that step
            self.rollback_early()
            self._forget_window()
            self._after_step()
            return
        has_grad = {acc: facts.has_grad[i] for i, acc in enumerate(self._reducer.accumulators)}
        changed = False
        if self._native is not None:
            with self._comm.stop_together():
                changed = self._native.step(has_grad, self._factor)
        self._wait_for_masters()
        with self._direct.allowed():
            self.strategy.update(self.owned, has_grad)
        self._publish(native_too=changed)
        self._forget_window()
        self._after_step()

    def _refuse_nan_weights(self) -> None:
        """Raise StateError on all ranks if weights were no numbers before the first step. All ranks must call.

        A number that has been computed from a sharded parameter without asking torch, in C++ say, is NaN.
        """
        self.rollback_early()  # on a disk an update that has begun in backward holds the masters
        flats = dict.fromkeys([*(acc.flat for acc in self._reducer.accumulators), *self._params.flats])
        mine = [
            name
            for flat in flats
            for name, slice_ in flat.slices.items()
            if flat.best.read_slice(slice_).isnan().any()
        ]
        found = list(dict.fromkeys(itertools.chain(*self._comm.all_gather_object(mine, "weights that are NaN"))))
        if found:
            raise StateError(
                f"the gradient of the first step is NaN, because {len(found)} parameter(s) hold NaN: "
                f"{', '.join(found[:5])}.\nIf they were computed from sharded parameters, which have no values "
                "between uses, compute them inside `with hf_zero.gathered_params(model):`, on all ranks."
            )

    def _wait_for_masters(self) -> None:
        """Wait until gradients are on the host and nobody reads the masters, which the optimizer writes next."""
        for acc in self._reducer.accumulators:
            if not acc.flat.placement.native:
                acc.wait_for_copies()
            acc.flat.best.wait_for_readers()  # where masters are the shard that gathers take from

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if self._is_sharded:
            raise StateError(
                "a closure cannot be used at stages 1-3, where a rank holds only a range of elements: call backward, "
                "then step(), or use stage 0"
            )
        if self._native is not None:
            raise StateError(
                "a closure cannot be used with msamp O2 and O3, whose states the optimizer itself does not hold: call "
                'backward, then step(), or set msamp.opt_level to "O1"'
            )
        if self.guard.skips:
            raise StateError("a closure cannot be used with fp16, which leaves steps out: use bf16 or fp32")
        held = [master for one in self.owned for master in one.masters]

        def take_gradients() -> None:
            facts = self._facts_of_step()
            if self._clip > 0:
                self.clip_grad_norm(self._clip)
            has_grad = dict(zip(self._reducer.accumulators, facts.has_grad, strict=True))
            self._wait_for_masters()
            drop_gradients(self.owned)
            give_gradients([one for one in self.owned if has_grad[one.acc][one.index]])

        def evaluate() -> Any:
            with torch.no_grad():
                self._publish(native_too=False)
                if all(master.grad is None for master in held):  # forgotten by the optimizer itself
                    self.zero_grad()
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                take_gradients()
                total = self._comm.vote(torch.tensor([float(loss)], dtype=torch.float64, device="cpu"), "a loss")
                mean = total.item() / self._comm.world_size
                return loss.new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

        if not all(acc.is_empty for acc in self._reducer.accumulators):  # of a backward before the step
            take_gradients()
        with self._direct.allowed():
            result = self.optimizer.step(evaluate)
        drop_gradients(self.owned)
        self._publish(native_too=False)
        self._forget_window()
        self._after_step()
        return result

    def _forget_window(self) -> None:
        self._param_grads.clear()
        self._facts, self._factor = None, 1.0

    def gradient_is_final(self, acc: GradAccumulator) -> None:
        """Take note, in the last backward before the step, that the gradient of `acc` is complete."""
        if self._native is not None and self._clip <= 0:
            self._native.gradient_is_final(acc)

    def rollback_early(self) -> None:
        """Undo updates that began in backward and hold their states: the step makes them again. No communication."""
        if self._native is not None:
            self._native.rollback()

    def finish_updates(self) -> None:
        """Let updates that run beside the training, delayed ones too, be over and seen. All ranks must call."""
        self._comm.note_call("finish_updates")
        if self._native is not None:
            with self._comm.stop_together():
                self._native.rollback()
                changed = self._native.finish()
            if changed:
                gather_resident(self._native_flats)

    @property
    def is_updating(self) -> bool:
        """Whether a step has begun: ranks have agreed on the gradient, and the accumulation window is not over."""
        return self._facts is not None

    def check_active(self, what: str) -> None:
        """Raise StateError while something else stands where the weights are."""
        if self.suspended or self.away:
            raise StateError(f"rank {self._comm.run_rank}: {what} is not possible {self.suspended or self.away}")

    def check_here(self, what: str) -> None:
        """Raise StateError while states and gradients are elsewhere."""
        if self.away:
            self.check_active(what)

    @property
    def overflow(self) -> bool:
        """Whether the last step was left out, on all ranks, because its gradient was not finite."""
        return self.guard.overflow

    @property
    def cur_scale(self) -> float:
        """The factor of losses now; 1.0 without fp16."""
        return self.loss_scaler.cur_scale

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale and the rule by which it changes."""
        return self.guard.scaler

    def needs_scaler(self) -> bool:
        """Whether losses are scaled, as fp16 needs it."""
        return self.guard.scales

    @property
    def has_delayed_update(self) -> bool:
        """Whether an update waits to be published by the next step, or by `finish_updates`."""
        return self._native is not None and self._native.has_delayed

    @property
    def update_worker(self) -> UpdateWorker | None:
        """The thread of native updates of offloaded states; None where nothing is updated natively."""
        return None if self._native is None else self._native.worker

    def close(self) -> None:
        self.suspended = "after its engine has left the model"
        self._direct.remove()
        if self._native is not None:
            self._native.close()

    # ---------------------------------------------------------------- gradients and state of one parameter
    @torch.no_grad()
    def full_grad(self, place: ParamPlace) -> torch.Tensor | None:
        """See access.full_grad. More may be accumulated after it."""
        grads, factor = self._gradient_of(place) or (None, 1.0)
        if grads is None:
            return None
        return assemble(place, self._comm, lambda slice_: grads.read_slice(slice_) * factor, grads.dtype)

    @torch.no_grad()
    def local_grad(self, place: ParamPlace) -> torch.Tensor | None:
        """The part of a gradient that this rank owns, as the step will use it, 1-D; see access.local_grad."""
        found, slice_ = self._gradient_of(place), place.slice
        return None if found is None or slice_ is None else found[0].read_slice(slice_) * found[1]

    @torch.no_grad()
    def set_grad(self, place: ParamPlace, values: torch.Tensor | None) -> None:
        """Let the step use these values, 1-D, for the elements that this rank owns. All ranks must call.

        Raises StateError for a parameter without gradient memory.
        """
        grads = next((one for one in self._reducer.accumulators if one.flat is place.flat), None)
        if grads is None:
            raise StateError(f"{place.slot.name} is frozen: it has no gradient")
        self._facts_of_step()
        self.rollback_early()  # it has used the old values
        for native in (one for one in self._reducer.accumulators if one.flat.placement.native):
            native.scale(self._factor)
        self._factor = 1.0
        if (slice_ := place.slice) is not None and values is not None:
            grads.write_slice(slice_, values)
        grads.seen.add(place.index)
        self._facts = None  # the norm has changed: the step holds its ballot again

    @torch.no_grad()
    def full_state(self, place: ParamPlace, kind: str) -> torch.Tensor | None:
        """See access.full_optimizer_state."""
        if kind == "master" and (master := place.flat.master) is not None:
            return assemble(place, self._comm, master.read_slice, master.dtype)
        read = self.strategy.reader_of(place)
        return read(kind) if read else full_state(place, kind, self._comm, self._state_of(place))

    @torch.no_grad()
    def local_state(self, place: ParamPlace, kind: str) -> torch.Tensor | None:
        """The part of a state that this rank owns, 1-D, or 0-dim if it is a number; None if it owns nothing."""
        slice_ = place.slice
        if slice_ is not None and kind == "master" and place.flat.master is not None:
            return place.flat.master.read_slice(slice_)
        mine = self._state_of(place)
        return None if slice_ is None or not mine else read_state(place, kind, mine, slice_)

    @torch.no_grad()
    def set_state(self, place: ParamPlace, kind: str, values: torch.Tensor | None, *, number: bool) -> None:
        """Set what this rank owns of a state: 1-D, or 0-dim where it is a `number`. All ranks must call.

        Raises StateError on all ranks; see check_kind.
        """
        owned, mine = self._owned_of(place), self._state_of(place)
        check_kind(place, kind, self._comm, mine, number=number)
        if owned is None or values is None or not mine:
            return
        if owned.native:
            self.load_native_state(owned, changed_state(mine, kind, owned.slice, values))
        else:
            write_state([self.state[master] for master in owned.masters], kind, values)

    def _state_of(self, place: ParamPlace) -> dict[str, Any] | None:
        """This rank's state of a parameter by kind; {} before the first update, None if it owns nothing of it."""
        self.strategy.check_sharded(place)
        self.check_here("access to the optimizer's state")
        if (owned := self._owned_of(place)) is None:
            return None
        mine = self.native_state(owned)
        return mine if mine is not None else joined_state([self.state.get(master, {}) for master in owned.masters])

    def _owned_of(self, place: ParamPlace) -> OwnedSlice | None:
        return next((one for one in self.owned if one.is_at(place)), None)

    def _gradient_of(self, place: ParamPlace) -> tuple[GradAccumulator, float] | None:
        """(where the gradient of this step is, what clipping multiplies it with); None if no rank has one."""
        facts = self._facts or self._ballot(closes=False)
        for number, grads in enumerate(self._reducer.accumulators):
            if grads.flat is place.flat and facts.has_grad[number][place.index]:
                return (
                    grads,
                    self._factor if grads.flat.placement.native else 1.0,
                )  # else the gradient itself was scaled
        return None

    # ---------------------------------------------------------------- inside
    @torch.no_grad()
    def _facts_of_step(self, purpose: str = "step") -> StepFacts:
        if self._param_grads.collect_all() or self._facts is None:
            facts = self._ballot(purpose=purpose)
            self._facts = dataclasses.replace(facts, norm=self.norm_of_all(facts.norm))
            if self.last_norm is None and math.isnan(self._facts.norm):
                self._refuse_nan_weights()
            if self.guard.accepts(self._facts.norm):
                self.last_norm = self._facts.norm
        return self._facts

    def _ballot(self, **options: Any) -> StepFacts:
        return hold_ballot(self._param_grads, self._reducer, self._comm, self.param_groups, **options)

    def _publish(self, *, native_too: bool) -> None:
        """Masters -> parameters: cast, and gather where parameters stay unsharded on ranks that own a part each."""
        changed = []
        for acc in self._reducer.accumulators:
            if not acc.flat.placement.native:
                acc.flat.refresh()
                changed.append(acc.flat)
        with self._comm.coalesced("updated parameters"):
            gather_resident(changed)
        if native_too:
            # In the order of the updates: the gather of one runs beside the update of the next.
            gather_resident(self._native_flats)

    def take_in(self, added: Sequence[GradAccumulator]) -> None:
        """Update parameters whose gradients the reducer has got since, as far as a group holds them.

        All ranks must call.
        """
        self.finish_updates()
        slices = self._groups.take(added)
        self.owned.extend(slices)
        self._update_natively(slices, added)

    def _update_natively(self, slices: Sequence[OwnedSlice], accumulators: Sequence[GradAccumulator]) -> None:
        """Hand what is offloaded of `accumulators` to the native rule."""
        native = [acc for acc in accumulators if acc.flat.placement.native]
        if not native:
            return
        check_native(self.optimizer, scaled=native[0].flat.placement.scaled)
        groups = {id(master): group for group in self.optimizer.param_groups for master in group["params"]}
        owned = [(slice_, groups[id(slice_.masters[0])]) for slice_ in slices if slice_.native]
        # Backward in the order of reduces is forward; what is never sharded is waited for, so it comes first.
        order = sorted(native, key=lambda acc: (acc.flat.on_demand, -native.index(acc)))
        self._native_flats += [acc.flat for acc in order]
        with self._comm.stop_together():
            self._native = self._native or self._make_rule(native)
            self._native.take_in(owned, order)
            for slice_, state in self._groups.native_state:
                self._native.load_run(slice_, state)

    def _make_rule(self, accumulators: Sequence[GradAccumulator]) -> UpdateRule:
        if accumulators[0].flat.placement.scaled:  # then all of them are: nothing is offloaded beside it
            return ScaledAdam(self._comm)
        return HostAdam(self._offload, self._comm.device)

    def native_state(self, owned: OwnedSlice) -> dict[str, Any] | None:
        """The state of a slice that is updated natively (see HostAdam.state_of); None for others."""
        return self._native.state_of(owned) if owned.native and self._native is not None else None

    def load_native_state(self, owned: OwnedSlice, state: Mapping[str, Any]) -> None:
        """Set the state of a natively updated slice; {} is the state before the first update."""
        assert self._native is not None
        self._native.load_run(owned, state)

    def restart_at(self, step: int) -> None:
        """`step` updates have been made before, in another run."""
        self.strategy.restart()
        if self._native is not None:
            self._native.restart_at(step)

    def state_tensors(self) -> list[torch.Tensor]:
        """Return what the user's optimizer keeps between steps."""
        return [one for state in self.state.values() for one in state.values() if torch.is_tensor(one)]

    def state_bytes(self) -> int:
        """The bytes of optimizer state beside the masters, on every medium."""
        held = sum(one.nbytes for one in self.state_tensors())
        held += sum(shard.nbytes for shards in self.attached.values() for shard in shards.values())
        return held + self.strategy.state_bytes() + (0 if self._native is None else self._native.moment_bytes())
