"""The case in one process: plain torch, the ranks one after the other, gradients averaged by hand."""

from __future__ import annotations

import torch
from torch import nn

from tests.fuzz.cases import Case, Phase
from tests.fuzz.optimizers import make_reference, make_schedule
from tests.fuzz.registry import build
from tests.fuzz.train import (
    Driver,
    Trace,
    copy_of,
    events_before,
    floating,
    may_freeze,
    touched,
    train_micro,
    value_to_set,
)

Grads = dict[nn.Parameter, torch.Tensor]
Buffers = dict[str, torch.Tensor]


class PlainDriver(Driver):
    """Collects the gradients of one rank in the type in which they accumulate."""

    def __init__(self, case: Case, net: nn.Module) -> None:
        self.run, self.net, self.case = net, net, case
        self.collected: Grads = {}

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def drop(self, how: str) -> None:
        self.net.zero_grad()
        self.collected.clear()

    def train_rank(self, step: int, rank: int, trace: Trace) -> Grads:
        """The mean gradient of the micro-batches of `rank`."""
        self.collected = {}
        for micro in range(self.case.accumulation):
            trace.losses[step, micro, rank] = train_micro(self, step, micro, rank)
            for param in self.net.parameters():
                if param.grad is not None:
                    grad = accumulated_type(param.grad) / self.case.accumulation
                    self.collected[param] = self.collected[param] + grad if param in self.collected else grad
                    param.grad = None
        return self.collected


def accumulated_type(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()


class Reference:
    """The model, its masters (itself, but for 16 bits), and the buffers of each rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.trace = case, Trace()
        masters = build(case.model, torch.float32 if case.dtype == "bf16" else case.torch_dtype)
        self.net = build(case.model, case.torch_dtype) if case.dtype == "bf16" else masters
        for module in self.net.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = False  # the numbers are the same, and every optimizer takes them
        # The pairs go by parameter of the model; tied ones are one master.
        pairs = zip(self.net.parameters(), masters.parameters(), strict=True)
        self.masters: dict[nn.Parameter, nn.Parameter] = dict(pairs)
        named = [(name, self.masters[param]) for name, param in self.net.named_parameters()]
        if not case.all_params:
            named = [(name, master) for name, master in named if master.requires_grad]
        self.optimizer = make_reference(case.optimizer, named, case.groups)
        self.schedule = make_schedule(case.schedule, self.optimizer, case.steps)
        self.trainable = {param: param.requires_grad for param in self.net.parameters()}
        self.buffers: dict[int, Buffers] = {0: buffers_of(self.net)}

    def train(self) -> Trace:
        """Index 0 of `weights` is before the first step."""
        self.trace.weights[0] = copy_of(dict(self.net.named_parameters()))
        done = 0
        for phase in self.case.phases:
            self._start(phase)
            for step in range(done, done + phase.steps):
                self._step(phase, step)
            done += phase.steps
        self.trace.buffers = self.buffers
        return self.trace

    def _start(self, phase: Phase) -> None:
        """A checkpoint holds the buffers of rank 0, and nothing of what was frozen meanwhile."""
        self.buffers = {rank: copy_of(self.buffers[0]) for rank in range(phase.world)}
        for param, trainable in self.trainable.items():
            param.requires_grad_(trainable)

    def _step(self, phase: Phase, step: int) -> None:
        events = events_before(self.case, step)
        for event in events:
            self._event(event, step)
        total: Grads = {}
        driver = PlainDriver(self.case, self.net)
        for rank in range(phase.world):
            set_buffers(self.net, self.buffers[rank])
            for param, grad in driver.train_rank(step, rank, self.trace).items():
                total[param] = total.get(param, torch.zeros_like(grad)) + grad / phase.world
            self.buffers[rank] = buffers_of(self.net)
        self._update(total, 0.5 if "scale gradients" in events else 1.0, step)
        self.trace.weights[step + 1] = copy_of(dict(self.net.named_parameters()))

    def _update(self, grads: Grads, factor: float, step: int) -> None:
        for param, master in self.masters.items():
            master.grad = None
            if param in grads:
                master.grad = (factor * grads[param]).to(master.dtype)
        with_grad = [master for master in self.masters.values() if master.grad is not None]
        squares = [float(master.grad.double().square().sum()) for master in with_grad if master.grad is not None]
        norm = sum(squares) ** 0.5
        self.trace.norms[step] = norm
        if self.case.clip and norm > self.case.clip:
            for master in with_grad:
                assert master.grad is not None
                master.grad *= self.case.clip / (norm + 1e-6)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for param, master in self.masters.items():
            master.grad = None
            if master is not param and master.requires_grad:
                param.copy_(master)

    @torch.no_grad()
    def _event(self, event: str, step: int) -> None:
        param = touched(self.net, step)
        if event == "write":
            for _, each in (floating(self.net)[0], floating(self.net)[-1]):
                each.mul_(0.9).add_(0.01)
                self.masters[each].copy_(each)
        elif event == "set":
            param.copy_(value_to_set(param))
            self.masters[param].copy_(param)
        elif event == "load weights":  # which are rounded: masters start from them
            for each, master in self.masters.items():
                master.copy_(each)
        elif event == "rate":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.7
        elif event == "freeze" and may_freeze(self.net, param):
            param.requires_grad_(False)
        elif event == "thaw":
            for each, trainable in self.trainable.items():
                each.requires_grad_(trainable)


def buffers_of(net: nn.Module) -> Buffers:
    return copy_of(dict(net.named_buffers()))


def set_buffers(net: nn.Module, values: Buffers) -> None:
    """New tensors instead of the old ones, which a graph may still hold."""
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        net.get_submodule(owner)._buffers[last] = value.clone()


def train_reference(case: Case) -> Trace:
    return Reference(case).train()
