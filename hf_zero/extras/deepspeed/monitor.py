"""deepspeed.monitor's classes: a program's own numbers go to the trackers that the configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch.distributed as dist

from hf_zero.config import ResolvedConfig
from hf_zero.extras.deepspeed.config import DeepSpeedConfig
from hf_zero.extras.monitors.trackers import TRACKERS

Events = Iterable[tuple[str, Any, int]]  # tag, number, samples


class _Monitor:
    """One tracker, by its block of the configuration; it writes on rank 0. The keys of the block are attributes.

    Raises ConfigError there if it is enabled and cannot write.
    """

    block: ClassVar[str]

    def __init__(self, config: Any) -> None:
        self._config = config
        self._tracker = TRACKERS[self.block][1](config) if config.enabled and _is_first_rank() else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)

    def write_events(self, event_list: Events) -> None:
        if self._tracker is not None:
            for tag, value, samples in event_list:
                self._tracker.log({tag: float(value)}, samples)


class TensorBoardMonitor(_Monitor):
    block = "tensorboard"


class csvMonitor(_Monitor):
    block = "csv_monitor"


class WandbMonitor(_Monitor):
    block = "wandb"


class CometMonitor(_Monitor):
    block = "comet"


class MonitorMaster:
    """All trackers of `DeepSpeedConfig(...).monitor_config`."""

    def __init__(self, monitor_config: Any) -> None:
        self.enabled = monitor_config.enabled
        kinds = (TensorBoardMonitor, csvMonitor, WandbMonitor, CometMonitor)
        self._monitors = [kind(getattr(monitor_config, kind.block)) for kind in kinds]

    def write_events(self, event_list: Events) -> None:
        """Write (tag, number, samples) of each event. Any rank may call; rank 0 writes."""
        events = list(event_list)
        for monitor in self._monitors:
            monitor.write_events(events)


def DeepSpeedMonitorConfig(**blocks: Any) -> Any:
    """Return the blocks of the trackers with their defaults filled in, and `enabled`, whether one of them is."""
    return answer("monitor_config", DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **blocks}))


def answer(name: str, config: ResolvedConfig) -> Any:
    """Return what DeepSpeed's attribute `monitor_config` of a configuration holds."""
    sections = {block: config.section(block, section) for block, (section, _) in TRACKERS.items()}
    return SimpleNamespace(**sections, enabled=any(one.enabled for one in sections.values()))


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
