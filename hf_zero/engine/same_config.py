"""Compares the configurations of the ranks: what decides which operations they start, and what an update computes."""

from __future__ import annotations

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.processes import call_site
from hf_zero.errors import ConfigError

# Others may differ: what is logged, where files lie, what suits the disks and memory of a host.
_ALIKE = (
    "stage",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "communication_data_type",
    "grad_accum_dtype",
    "precision",
    "gather_for_generation",
)


def refuse_other_configurations(comm: Comm, config: ResolvedConfig) -> None:
    """Raise ConfigError on every rank where one has other values than rank 0. All ranks must call."""
    everyone = comm.all_gather_object({name: str(getattr(config, name)) for name in _ALIKE}, "configurations")
    for rank, theirs in enumerate(everyone):
        differ = [
            f"{name} is {theirs[name]}, and {here} on rank 0"
            for name, here in everyone[0].items()
            if theirs[name] != here
        ]
        if differ:
            raise ConfigError(
                f"rank {rank} has another configuration than rank 0: {'; '.join(differ)}.\nGive every rank the same "
                f"file and arguments.\nCalled from: {call_site()}"
            )
