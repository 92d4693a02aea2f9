"""Ranks that run checkpointed regions on the same inputs: each keeps a part of an input, and all gather it again.

The group is the script's (tensor parallelism, replicated batches), and its other collectives go over it too: in the
order of the program, which is the same on all of its ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_zero.distributed.torch_names import all_gather_single
from hf_zero.errors import DivergenceError

_WORD = 8  # bytes
_PIECES = 64  # of an input that are added up: what moves inside of one piece is not seen
_FACTOR = 1_000_003  # odd, so that no difference of an earlier input is lost modulo 2 ** 64


class InputGroup:
    """
    Args:
        group: Of torch.distributed, with this rank in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self._group = group
        self._digest: torch.Tensor | None = None  # of all inputs since the last look
        self._compared: list[str] = []

    def part_numel(self, numel: int) -> int:
        """Return the number of elements of a part; the last one may have fewer that count."""
        return -(-numel // self.size)

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a 1-D tensor: a view, of fewer elements than `part_numel` at the end."""
        start = self.rank * self.part_numel(flat.numel())
        return flat[start : start + self.part_numel(flat.numel())]

    def gather(self, part: torch.Tensor, what: str) -> torch.Tensor:
        """The parts of all ranks, one behind the other. All ranks of the group must call.

        Raises DivergenceError on every rank, before the first gather, if what was compared differs.
        """
        self._look(what)
        return self._gather(part, what)

    def compare(self, flat: torch.Tensor, what: str) -> None:
        """Compare a 1-D tensor with those of the other ranks: at the next `gather`, all since the last one at once."""
        digest = _digest(flat)
        self._digest = digest if self._digest is None else self._digest * _FACTOR + digest
        self._compared.append(what)

    def _look(self, what: str) -> None:
        digest, self._digest = self._digest, None
        compared, self._compared = self._compared, []
        if digest is None:
            return
        digests = self._gather(digest, what).view(self.size, -1)
        if bool((digests == digests[self.rank]).all()):
            return
        raise DivergenceError(
            f"rank {dist.get_rank()}: activation_checkpointing.partition_activations: ranks {self.ranks} were named "
            "as a group that shares the inputs of checkpointed regions, but the inputs differ (in one of: "
            f"{', '.join(compared[:4])}{', ...' if len(compared) > 4 else ''}).\nGive these ranks the same batches "
            "and the same random numbers, or name another group in hf_zero.checkpointing.configure(mpu), or none."
        )

    def _gather(self, part: torch.Tensor, what: str) -> torch.Tensor:
        full = torch.empty(self.size * part.numel(), dtype=part.dtype, device=part.device)
        try:
            all_gather_single(full, part, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise DivergenceError(
                f"rank {dist.get_rank()}: the gather of {what} over ranks {self.ranks} did not complete: "
                f"{str(error).splitlines()[0]}\nAnother rank has stopped, or runs other checkpointed regions than "
                "this one."
            ) from error
        return full


def _digest(flat: torch.Tensor) -> torch.Tensor:
    """int64 [_PIECES + 2]: sums over pieces of the bits, read as int64, the rest behind the pieces, the size.

    A change anywhere changes a sum, unless changes inside of a piece cancel out.
    """
    data = flat.view(torch.uint8)
    if data.storage_offset() % _WORD:  # it may start elsewhere on another rank
        data = data.clone()
    numel = data.numel() // (_PIECES * _WORD) * _PIECES
    pieces = data[: numel * _WORD].view(torch.int64).view(_PIECES, numel // _PIECES).sum(1)
    rest = data[numel * _WORD :].sum(dtype=torch.int64)
    size = torch.full((), data.numel(), dtype=torch.int64, device=flat.device)
    return torch.cat([pieces, torch.stack([rest, size])])
