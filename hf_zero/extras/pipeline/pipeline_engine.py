"""The engine of one stage of a pipeline: ZeRO among the ranks of the stage, and batches that go through all stages."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from hf_zero.checkpoint.load import ALL_PARTS, Parts
from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.messages import UnsendableError
from hf_zero.engine.checkpointing import Checkpointing
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.reports import Event, Reports
from hf_zero.errors import ConfigError, StateError, ZeroError
from hf_zero.extras.pipeline.batch_run import BatchRun, BatchTimes, StageLocation
from hf_zero.extras.pipeline.equal_settings import batch_settings, difference, group_settings
from hf_zero.extras.pipeline.micro_batches import Batch, RepeatingLoader, read_micro_batches
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.pipeline_section import PipelineSection
from hf_zero.extras.pipeline.stage_checkpoints import StageCheckpointing
from hf_zero.extras.pipeline.stage_passes import BadLossError, StagePasses, scalar_loss
from hf_zero.extras.pipeline.stage_schedules import EVALUATION, Action, bubble_share, order_of
from hf_zero.extras.pipeline.stage_weights import gather_weights, of_this_stage
from hf_zero.extras.pipeline.tied_copies import TiedCopies
from hf_zero.extras.pipeline.topology import PipelineGrid
from hf_zero.logs import log_line
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.build import BuiltUnits
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.unit_specs import BuildSettings


class BatchReports(Reports):
    """The reports of an engine whose micro-batches overlap: a batch counts as one."""

    def _forward_starts(self) -> None:
        self._notify(Event.FORWARD_STARTS)


class PipelineEngine(ZeroEngine):
    """Trains a PipelineModule, a batch at a time: see `train_batch`. Names and properties are DeepSpeed's.

    `rank`, `world_size` and the optimizer are those of the ranks of this stage, which share its parameters; `world`
    has all ranks of the run.

    Args:
        module: Built; each rank has its own stage.
        config: Resolved for `module`: what stages cannot do is found then. Batch sizes count the ranks of one stage.
    All ranks of the run must construct it. Raises ConfigError for what a pipeline cannot do.
    """

    module: PipelineModule
    shuffles = False
    reports_class = BatchReports

    def __init__(self, module: PipelineModule, config: ResolvedConfig, *, train: bool = True, **given: Any) -> None:
        grid = module.grid
        ranks = tuple(grid.stage_to_global(stage) for stage in range(grid.pipe_parallel_size))
        self.place = StageLocation(grid.stage_id, grid.pipe_parallel_size, module.virtual_stages, ranks)
        self.world = Comm.join(timeout_s=config.desync_timeout)
        self._expect_alike(batch_settings(config), "configuration")
        self._messages = self.world.messages() if self.place.num_stages > 1 else None
        grads = BuildSettings.of(config).grads
        self._has_ties = bool(ties := module.ties)
        self._ties = TiedCopies(module, ties, self.place, self._messages, grads)
        super().__init__(module, config, train=train, groups=grid.dp_groups, **given)
        self._schedule_name = config.section("pipeline", PipelineSection).schedule
        self._passes = StagePasses(
            module, self.loss_scale, weights=self._weights, loss_of=self._loss_of, feed=self._feed
        )
        self._data: Callable[[], Iterator[Any]] = _no_data
        self._batch_fn: Callable[[Any], Any] | None = None
        # id of a parameter -> its accumulator, and what adds a gradient there
        self._where: dict[int, tuple[GradAccumulator, int]] = {}  # id of a parameter -> its place
        self._run: BatchRun | None = None  # under way, or the last one
        self._is_in_loss_fn = False
        self.times = BatchTimes()  # of the last batch
        self._ties.publish()

    @property
    def run_comm(self) -> Comm:
        return self.world

    def _open_checkpoints(self, built: BuiltUnits) -> Checkpointing:
        given = (built, self.schedule, self.config, self._check_saved)
        return StageCheckpointing(self.module, *given, world=self.world, place=self.place)

    # ---------------------------------------------------------------- places
    @property
    def num_stages(self) -> int:
        return self.place.num_stages

    @property
    def stage_id(self) -> int:
        return self.place.stage

    def is_first_stage(self) -> bool:
        return self.place.stage == 0

    def is_last_stage(self) -> bool:
        return self.place.stage == self.place.num_stages - 1

    @property
    def grid(self) -> PipelineGrid:
        """This rank's place among the stages, with the groups of DeepSpeed's names."""
        return self.module.grid

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a batch: gradient_accumulation_steps."""
        return self.accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether there are several pipelines."""
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """Whether there is an axis of tensor parallelism, which is the script's own."""
        return self.grid.model_parallel_size > 1

    # ---------------------------------------------------------------- data
    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Set what makes (inputs, labels) of what the data iterator gives."""
        self._batch_fn = fn

    def set_dataloader(self, loader: Any) -> None:
        """Set what batches are read from where `train_batch` is given no iterator: again from the start at its end."""
        endless = RepeatingLoader(loader)
        self._data = lambda: endless

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set what batches are read from where `train_batch` is given no iterator."""
        self._data = lambda: iterator

    # ---------------------------------------------------------------- batches
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on the next `gradient_accumulation_steps` micro-batches, and update. All ranks must call.

        Args:
            data_iter: Gives (inputs, labels) of a micro-batch, or what `set_batch_fn`'s function makes that of. Read
                on the first and the last stage, which must find the same; None: what `set_dataloader` has set.
        Returns:
            The mean loss over micro-batches and pipelines, on all ranks: 0-dim, on the device, fp32 or fp64.
        Raises:
            StopIteration: On all ranks, where the iterator is at its end.
            StateError: On all ranks: what went wrong on any, with its stage and layer.
        """
        if self.optimizer is None:
            raise StateError(
                "train_batch: this engine has no optimizer: pass one to hf_zero.initialize, or an optimizer block"
            )
        if not self.module.training:
            self.module.train()
        count, schedule, began = self.accumulation_steps, self._schedule_name, time.perf_counter()
        batch = self._read(data_iter, count)
        with self._together("train_batch"):
            run = self._start(batch, around_backward=self._around_backward)
            self.schedule.micro_steps += count - 1  # `step` counts the last one
            run.run(self._order(schedule, count))
            if not self._has_ties:
                # Reduces run beside what other stages still compute: the loss waits for all of them.
                self.reducer.reduce_remaining()
            loss = self._mean_loss(list(run.results.values()), count)
            self._keep_times(run, schedule, count)
            self._ties.collect(self._feed)
            self.reports.loss(loss)
            super().step()
            self._ties.publish()
        self.agg_train_loss = loss  # DeepSpeed's name
        self._log_progress(loss, time.perf_counter() - began)
        return loss

    def _log_progress(self, loss: torch.Tensor, seconds: float) -> None:
        """Log the loss and the time of a batch on rank 0, every `steps_per_print` steps, in DeepSpeed's form."""
        every, steps = self.config.steps_per_print, self.global_steps
        if self.world.rank == 0 and every > 0 and steps % every == 0:
            rate = self.train_batch_size() / seconds
            log_line(f"steps: {steps} loss: {loss:0.4f} iter time (s): {seconds:0.3f} samples/sec: {rate:0.3f}")

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run micro-batches forward, without gradients and in the model's eval mode. All ranks must call.

        Args:
            return_logits: Return (result, outputs), outputs of the last stage being a list by micro-batch.
            compute_loss: False: the result is the last stage's output; on other stages None.
            reduce_output: "avg": the mean over micro-batches, of losses also over pipelines; None: a list of them.
            bcast_loss: Give the loss to all stages; else only the last one has it.
            num_micro_batches: None: gradient_accumulation_steps.
        Raises:
            As `train_batch`; ConfigError for another `reduce_output`; StateError, on all ranks, for outputs without a
            mean. The engine goes on after these two.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f'eval_batch(reduce_output={reduce_output!r}): expected "avg" or None')
        count = self.accumulation_steps if num_micro_batches is None else num_micro_batches
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"eval_batch(num_micro_batches={count!r}): expected a number of at least 1, or None")
        trained = self.module.training
        self.module.eval()
        try:
            batch = self._read(data_iter, count)
            with self._together("eval_batch"), torch.no_grad():
                run = self._start(batch, around_backward=lambda is_last: contextlib.nullcontext())
                run.run(self._order(EVALUATION, count), wants_loss=compute_loss)
                self._keep_times(run, EVALUATION, count)
                outputs = [run.results[micro] for micro in sorted(run.results)]
                result: Any = outputs if self.is_last_stage() else None
                if reduce_output is not None and compute_loss:
                    mean = self._mean_loss(outputs, count)
                    result = mean if bcast_loss or self.is_last_stage() else None
            if reduce_output is not None and not compute_loss:
                result = self._mean_output(outputs)
        finally:
            self.module.train(trained)
        return (result, outputs) if return_logits else result

    def _mean_output(self, outputs: list[Any]) -> torch.Tensor | None:
        """Average outputs over micro-batches, on the last stage. All ranks must call. All raise StateError."""
        tensors = [one for one in outputs if isinstance(one, torch.Tensor) and one.is_floating_point()]
        kinds = sorted({_kind(one) for one in outputs})
        problem = f"{self.place.title}: {', '.join(kinds)}" if len(kinds) > 1 or len(tensors) < len(outputs) else ""
        if found := [one for one in self.world.all_gather_object(problem, "outputs") if one]:
            raise StateError(
                "eval_batch(compute_loss=False): the outputs of the micro-batches have no mean, for which they are to "
                f"be floating-point tensors of one shape: {'; '.join(found)}.\nreduce_output=None gives "
                "them as they are, in a list."
            )
        return torch.stack(tensors).mean(0) if tensors else None

    # ---------------------------------------------------------------- what a pipeline has no call for
    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _use_train_batch("engine(...)")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _use_train_batch("engine.backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _use_train_batch("engine.step")

    def no_sync(self) -> NoReturn:
        raise _use_train_batch("engine.no_sync")

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> NoReturn:
        """Raises StateError: every batch ends with an update."""
        raise StateError(
            "set_gradient_accumulation_boundary: train_batch updates at the end of its gradient_accumulation_steps "
            "micro-batches.\nChange how many there are by set_train_batch_size."
        )

    def reset_activation_shape(self) -> None:
        """Nothing is to be done: shapes may change at any time."""

    # ---------------------------------------------------------------- optimizer
    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        """See ZeroEngine.attach_optimizer: this stage's. Gradients are clipped by the norm over all stages."""
        self._ties.leave_to_owners(optimizer)
        self.module.leave_out_stand_in(optimizer)
        self._expect_alike(group_settings(optimizer), "optimizer", _GROUPS_REMEDY)
        sharded = super().attach_optimizer(optimizer)
        sharded.norm_of_all = self._norm_of_all
        return sharded

    def _norm_of_all(self, norm: float) -> float:
        """Compute the norm of all stages' gradients from that of each stage. All ranks must call."""
        mine = torch.tensor([norm * norm if self.comm.rank == 0 else 0.0], dtype=torch.float64, device="cpu")
        return math.sqrt(self.world.vote(mine, "norm of all stages").item())

    def _expect_alike(self, mine: Mapping[str, str], what: str, remedy: str = "Give all ranks the same.") -> None:
        """Raise ConfigError, on all ranks, unless they have the same settings. All ranks must call."""
        if found := difference(self.world.all_gather_object(dict(mine), f"{what} of all stages")):
            raise ConfigError(f"{what} of a pipeline: {found}.\n{remedy}")

    # ---------------------------------------------------------------- weights
    def full_state_dict(self, keep: bool, *, trainable_only: bool = False) -> dict[str, torch.Tensor]:
        """See ZeroEngine.full_state_dict: of all stages, under an nn.Sequential's names. All ranks must call."""
        if self._messages is None:
            return super().full_state_dict(keep, trainable_only=trainable_only)
        sends = self.comm.rank == 0 and self.module.grid.data_parallel_id == 0
        mine = super().full_state_dict(sends, trainable_only=trainable_only)
        return gather_weights(mine, self.module, self.world, self._messages, keep=keep, sends=sends)

    def read_checkpoint(self, folder: str | Path, parts: Parts = ALL_PARTS) -> Any:
        """See ZeroEngine.read_checkpoint. All ranks of the run must call."""
        state = super().read_checkpoint(folder, parts)
        self._ties.publish()
        return state

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        """See ZeroEngine.load_checkpoint: from any number of stages. All ranks of the run must call."""
        loaded = super().load_checkpoint(*args, **kwargs)
        self._ties.publish()
        return loaded

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """See ZeroEngine.load_full_state_dict: takes what belongs to this stage. All ranks of the run must call."""
        super().load_full_state_dict(of_this_stage(state, self.module), strict)
        self._ties.publish()

    # ---------------------------------------------------------------- what was measured
    def schedule_report(self) -> dict[str, Any]:
        """Tell when each stage computed and idled in the last batch. All ranks must call.

        Returns:
            "stages": by stage of this pipeline {"actions": [(action, start, end)] in seconds, "busy", "peak_live"};
            "seconds"; "idle_share": the part of all ranks' time in which they computed nothing; "bubble_share": what
            it is by the schedule, with equal stages and messages that take no time (see stage_schedules).
        """
        actions = [(str(action), start, end) for action, start, end in self.times.actions]
        mine = {"actions": actions, "busy": self.times.busy, "peak_live": self.times.peak_live}
        everyone = self.world.all_gather_object((mine, self.times.total), "schedule report")
        stages = [everyone[rank][0] for rank in self.place.ranks]
        seconds = max(everyone[rank][1] for rank in self.place.ranks)
        busy = sum(stage["busy"] for stage in stages)
        return {
            "stages": stages,
            "seconds": seconds,
            "idle_share": 1 - busy / (seconds * self.num_stages) if seconds else 0.0,
            "bubble_share": self._bubble_share(),
        }

    def _bubble_share(self) -> float:
        times = self.times
        if not times.num_micros:  # there was no batch
            return 0.0
        return bubble_share(times.schedule, self.num_stages, times.num_micros, self.place.virtual_stages)

    # ---------------------------------------------------------------- inside a batch
    def _read(self, data_iter: Iterator[Any] | None, count: int) -> Batch:
        reader = self._data if data_iter is None else lambda: data_iter
        return read_micro_batches(reader, count, self.world, self.place, self._batch_fn)

    def _start(self, batch: Batch, *, around_backward: Callable[[bool], Any]) -> BatchRun:
        self._passes.begin_batch(self.schedule.micro_steps)
        self._ties.forget()
        self._run = run = BatchRun(self._passes, self.place, self._messages, batch, around_backward)
        return run

    def _order(self, schedule: str, count: int) -> list[Action]:
        return order_of(schedule, self.stage_id, self.num_stages, count, self.place.virtual_stages)

    @contextlib.contextmanager
    def _around_backward(self, is_last: bool) -> Iterator[None]:
        """Only the last backward of a batch may reduce what it gives, if nothing comes after it."""
        if is_last and self.place.virtual_stages == 1 and not self._has_ties:
            yield
        else:
            with self.schedule.no_sync():
                yield

    def _loss_of(self, outputs: Any, labels: Any) -> torch.Tensor:
        loss_fn = self.module.loss_fn
        self._is_in_loss_fn = loss_fn is not None
        loss = scalar_loss(outputs if loss_fn is None else loss_fn(outputs, labels))
        self._is_in_loss_fn = False
        return loss

    def _mean_loss(self, losses: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """Average the loss over micro-batches and pipelines. All ranks must call."""
        mine = (sum(float(loss) for loss in losses), losses[0].dtype) if losses else None
        found = [one for one in self.world.all_gather_object(mine, "losses") if one is not None]
        mean = sum(total for total, _ in found) / (len(found) * count)
        dtype = torch.promote_types(found[0][1], torch.float32)  # a mean of 16-bit losses has more digits than they
        return torch.tensor(mean, dtype=dtype, device=self.device)

    def _keep_times(self, run: BatchRun, schedule: str, count: int) -> None:
        self.times = run.times
        self.times.schedule, self.times.num_micros = schedule, count
        self.times.total = time.perf_counter() - run.began

    # ---------------------------------------------------------------- gradients
    def _weights(self) -> list[torch.Tensor]:
        """The leaves of this stage that get gradients."""
        own: list[torch.Tensor] = [param for _, param in self.module.named_parameters() if param.requires_grad]
        return own + self._ties.weights()

    def _feed(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        """Take the gradient of a weight that autograd did not hand on."""
        if not isinstance(weight, torch.nn.Parameter):
            return self._ties.add(weight, grad)
        if id(weight) not in self._where:
            for acc in self.reducer.accumulators:
                for index, param in enumerate(acc.flat.params):
                    self._where[id(param)] = acc, index
        acc, index = self._where[id(weight)]
        with self.loss_scale.received():
            acc.take({index: grad})

    # ---------------------------------------------------------------- failures
    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """An error of this rank inside stops all ranks, which raise it too."""
        try:
            yield
        except ZeroError as error:
            self._abandon(error)
            raise
        except Exception as error:
            kind = "" if isinstance(error, UnsendableError | BadLossError) else f"{type(error).__name__}: "
            reason = StateError(f"{self.place.title}, {self._doing(what)}: {kind}{error}")
            self._abandon(reason)
            # Python takes an error that a StopIteration has caused for the StopIteration.
            raise reason from (None if isinstance(error, StopIteration) else error)

    def _abandon(self, reason: ZeroError) -> None:
        for comm in (self.world, self.comm):
            comm.abandon(reason)

    def _doing(self, what: str) -> str:
        """Describe for an error what this rank is computing."""
        run = self._run
        if run is None or run.doing is None:
            return what
        layers, layer = self.module.chunk_layers(run.doing.chunk), self.module.running_layer
        where = f"layers {layers[0]} to {layers[-1]}" if layer is None else f"layer {self.module.layer_title(layer)}"
        if self._is_in_loss_fn:
            where = "loss_fn"
        elif run.is_sending:
            where = f"output of layer {self.module.layer_title(layers[-1])}"
        return f"{run.doing.title}, {where}"

    # ---------------------------------------------------------------- end
    def teardown(self) -> None:
        """See ZeroEngine.teardown: this rank's stage is a plain module again."""
        super().teardown()
        self._ties.restore()
        if self.world is not self.comm:
            self.world.end(is_shared=False)


_GROUPS_REMEDY = (
    "A checkpoint has one list of groups: give every stage the same ones, with the same values. A group may be empty "
    'on a stage ({"params": []}).'
)


def _no_data() -> Iterator[Any]:
    raise StateError("no data: give train_batch an iterator, or call engine.set_dataloader first")


def _kind(value: Any) -> str:
    """The type and shape of a value in messages: "float32[2, 3]"."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _use_train_batch(call: str) -> StateError:
    return StateError(
        f"{call}: a pipeline runs whole batches, whose micro-batches are in several stages at once.\n"
        "Call engine.train_batch(data_iter) instead of forward, backward and step, and engine.eval_batch to "
        "evaluate."
    )
