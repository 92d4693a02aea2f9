"""Parameters that several stages use: one stage trains them, the others have copies.

The first stage that uses a tied parameter owns it: it has the master, the optimizer state and the place in
checkpoints. On the other stages a plain tensor replaces the parameter, so that no engine there takes it
for its own. After the backwards of a batch each copy's gradient goes to the owner, and after the update the
parameter comes back. So copies are equal to the bit, nothing is kept twice, and as many bytes travel as in an
all-reduce of the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_zero.distributed.messages import MAX_TAG, Messages, Received
from hf_zero.extras.pipeline.batch_run import StageLocation
from hf_zero.extras.pipeline.module import Tie
from hf_zero.runtime.grad_accumulator import GradSettings
from hf_zero.sharding.param_data import set_data


@dataclass
class _Copy:
    """A tied parameter on a stage that does not own it."""

    original: nn.Parameter
    places: list[tuple[nn.Module, str]]  # where it is an attribute
    tensor: torch.Tensor
    grad: torch.Tensor | None = None  # summed over micro-batches
    hooks: list[Any] = field(default_factory=list)


class TiedCopies:
    """The ties of one stage. All ranks must call each method but `weights`, in the same order.

    Args:
        ties: Of all stages, in the same order on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        ties: Sequence[Tie],
        place: StageLocation,
        messages: Messages | None,
        grads: GradSettings,
    ) -> None:
        self._ties = ties
        self._place = place
        self._messages = messages
        self._grads = grads
        self._copies: dict[str, _Copy] = {}
        for tie in ties:
            if tie.param is not None and tie.stages[0] != place.stage:
                self._copies[tie.name] = _taken_out(module, tie.param)

    def weights(self) -> list[torch.Tensor]:
        """The copies that get gradients."""
        return [copy.tensor for copy in self._copies.values() if copy.tensor.requires_grad]

    def leave_to_owners(self, optimizer: torch.optim.Optimizer) -> None:
        """Take parameters that other stages own out of an optimizer that was made over all of the module's."""
        others = {id(copy.original) for copy in self._copies.values()}
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) not in others]
        for copy in self._copies.values():
            optimizer.state.pop(copy.original, None)

    def restore(self) -> None:
        """Put the parameters back, with the values of the copies."""
        for copy in self._copies.values():
            set_data(copy.original, copy.tensor.detach())
            for module, name in copy.places:
                delattr(module, name)
                module.register_parameter(name, copy.original)
        self._copies.clear()

    # ---------------------------------------------------------------- parameters
    def publish(self) -> None:
        """Bring the copies up to date."""
        if self._messages is None:
            return
        coming: list[tuple[_Copy, Received]] = []
        for number, tie in enumerate(self._ties):
            what = f"the tied parameter {tie.name}"
            if tie.stages[0] == self._place.stage:
                assert tie.param is not None
                for stage in tie.stages[1:]:
                    self._messages.send(self._place.ranks[stage], self._tag(number), tie.param, what)
            elif tie.name in self._copies:
                owner = self._place.ranks[tie.stages[0]]
                coming.append((self._copies[tie.name], self._messages.receive(owner, self._tag(number), what)))
        for copy, received in coming:
            self._set(copy, received.wait())
        self._messages.wait_for_sends()

    def _set(self, copy: _Copy, value: torch.Tensor) -> None:
        if copy.tensor.dtype == value.dtype and copy.tensor.device == value.device:
            copy.tensor.data.copy_(value)
            return
        for hook in copy.hooks:
            hook.remove()
        copy.tensor = value  # it needs a gradient where the owner's does
        for module, name in copy.places:
            setattr(module, name, copy.tensor)
        if copy.tensor.requires_grad:
            copy.hooks = [copy.tensor.register_post_accumulate_grad_hook(_adder(self))]

    # ---------------------------------------------------------------- gradients
    def add(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """A micro-batch has given a copy this gradient."""
        copy = next(one for one in self._copies.values() if one.tensor is tensor)
        if copy.grad is None:
            copy.grad = grad.to(self._grads.accumulation_dtype(tensor.dtype), copy=True)
        else:
            copy.grad.add_(grad)

    @torch.no_grad()
    def collect(self, feed: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Hand the gradients of copies to the owners, for whom `feed` takes them, stage by stage."""
        if self._messages is None:
            return
        coming: list[tuple[nn.Parameter, Received]] = []
        for number, tie in enumerate(self._ties):
            what, tag = f"the gradient of the tied parameter {tie.name}", self._tag(number) + 1
            if tie.stages[0] == self._place.stage:
                assert tie.param is not None
                for stage in tie.stages[1:] if tie.param.requires_grad else ():
                    coming.append((tie.param, self._messages.receive(self._place.ranks[stage], tag, what)))
            elif tie.name in self._copies and self._copies[tie.name].tensor.requires_grad:
                copy = self._copies[tie.name]
                self._messages.send(self._place.ranks[tie.stages[0]], tag, copy.grad, what)
        for param, received in coming:
            grad = received.wait()
            if grad is not None:
                feed(param, grad)
        self._messages.wait_for_sends()
        self.forget()

    def forget(self) -> None:
        """The gradients have been used, or are not wanted."""
        for copy in self._copies.values():
            copy.grad = None

    def _tag(self, number: int) -> int:
        return MAX_TAG - 2 * len(self._ties) + 2 * number  # from the other end than those of micro-batches


def _taken_out(module: nn.Module, param: nn.Parameter) -> _Copy:
    """Replace a parameter by a plain tensor, wherever it is."""
    places = [(one, name) for one in module.modules() for name, mine in one._parameters.items() if mine is param]
    for one, name in places:
        del one._parameters[name]
    # Other values and types come with the first `publish`.
    return _Copy(param, places, torch.empty(0, dtype=torch.uint8))


def _adder(copies: TiedCopies) -> Callable[[torch.Tensor], None]:
    # Python cannot see that a tensor's hook refers to it: weakly, or an engine that nobody tore down would stay.
    weak_copies = weakref.ref(copies)

    def hook(tensor: torch.Tensor) -> None:
        grad, tensor.grad = tensor.grad, None
        assert grad is not None
        owner = weak_copies()
        assert owner is not None
        with torch.no_grad():
            owner.add(tensor, grad)

    return hook
