"""Takes over what code outside of the engine writes to full weights in place, as a forward that clamps its own.

[Note: Writes to weights]
torch counts writes in place, so that comparing counts shows them for nothing. Where weights are sharded between uses,
such a write would be lost when the unit is resharded: the shard takes it over then. Where they are never sharded, the
masters take it over before the step. Every rank takes its own part over, so the write must be the
same on all ranks; the vote of the step compares it, and an unequal one raises on all of them. That is what
nn.Embedding(max_norm) meets: each rank scales the rows of its own batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.errors import StateError
from hf_zero.runtime.edit_watch import fingerprint
from hf_zero.runtime.full_weights import take_over
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.runtime.step_events import StepEvents
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.unit import ShardUnit


class WeightEdits:
    """Takes such writes over. See [Note: Writes to weights].

    Args:
        param_grads: The vote of a step finds there what ranks did by hand.
    """

    def __init__(self, units: Sequence[ShardUnit], param_grads: ParamGrads, events: StepEvents) -> None:
        self._units = units
        self._param_grads = param_grads
        self._events = events

    @torch.no_grad()
    def unit_used(self, unit: ShardUnit, *, late: bool) -> None:
        """Take over what was written to an on-demand unit whose use is over; StateError where it cannot be kept.

        Args:
            late: Backward has begun, and with it perhaps the update.
        """
        for flat in unit.flats:
            flat.check_views()
            if written := flat.written():
                if late:
                    _refuse_new_values(flat, written)
                else:
                    self._take(flat, written)

    @torch.no_grad()
    def collect_resident(self) -> bool:
        """Take over what was written to weights that are never resharded; return whether that was anything."""
        found = False
        for flat in (flat for unit in self._units for flat in unit.flats):
            if not flat.on_demand and (written := flat.written()):
                self._take(flat, written)
                found = True
        return found

    def _take(self, flat: FlatParam, written: list[int]) -> None:
        self._events.check_current()  # an update that is not published yet would be lost
        slots = [flat.layout.slots[index] for index in written]
        marks = {slot.name: int(fingerprint(flat.full[slot.offset : slot.end])) for slot in slots}
        self._param_grads.note_weights(marks)
        take_over(flat, set(marks))
        flat.mark_written()


def _refuse_new_values(flat: FlatParam, written: list[int]) -> None:
    """Raise StateError if a write in backward, where an update may have begun, gave new values.

    A recomputed forward writes what the forward wrote: nothing is new.
    """
    for index in written:
        slot = flat.layout.slots[index]
        for slice_ in flat.layout.slices(flat.rank):
            if slice_.name == slot.name:
                parts = torch.cat(
                    [flat.full[slot.offset : slot.end][piece.start : piece.end] for piece in slice_.pieces]
                )
                if not torch.equal(parts, flat.shard.read_slice(slice_).to(parts.device)):
                    raise StateError(
                        f"{slot.name} was written to in backward, by a forward that is computed again (activation "
                        "checkpointing) or a hook, with other values than before: while weights are sharded that "
                        "cannot be kept.\nWrite after engine.step(), inside `with hf_zero.gathered_params(model, "
                        "write_rank=0):`."
                    )
    flat.mark_written()
