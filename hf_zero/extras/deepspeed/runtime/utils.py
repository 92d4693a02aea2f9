"""What scripts import from deepspeed.runtime.utils."""

import torch.distributed as dist

from hf_zero.engine.memory_usage import log_memory_usage


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and what the device and the host hold now. Any rank may call; rank 0 logs.

    Without `force` it does nothing. Max_MA and Max_CA are the peaks since the last call on an accelerator, and since
    the process began without one.
    """
    if force and not (dist.is_initialized() and dist.get_rank() != 0):
        log_memory_usage(message)
