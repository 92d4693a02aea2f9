"""The user's optimizer on shards, optimizers that torch does not have, and learning-rate schedules."""

from hf_zero.lazy import lazy_names
from hf_zero.optim.optimizer_types import OPTIMIZERS
from hf_zero.optim.schedule_types import SCHEDULES

# Public name -> module. Classes are loaded at first use, so that their types can be read without torch.
_EXPORTS = {
    path.rpartition(".")[2]: path.rpartition(".")[0]
    for path in (*OPTIMIZERS, *SCHEDULES)
    if path.startswith("hf_zero.optim.")
}
__all__ = sorted(_EXPORTS)
__getattr__ = lazy_names(__name__, _EXPORTS)
