"""The plan that every host of a job has to know, and the form in which it travels on a command line."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any, Literal

from hf_zero.native.device_files import visible_devices_variable

Kind = Literal["file", "module", "program"]


def devices_variable() -> str:
    """The environment variable that chooses among the accelerators of this host."""
    import torch

    kind = torch.accelerator.current_accelerator()
    return "CUDA_VISIBLE_DEVICES" if kind is None else visible_devices_variable(kind.type)


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """The same for all hosts.

    Attributes:
        master_addr: Of the first host; "" where SLURM knows, which puts hosts into an order of its own.
        devices: For each host, the device of each of its processes, as CUDA_VISIBLE_DEVICES or its like names it.
        kind: What `script` is.
        pass_local_rank: Give `--local_rank=K` to the script, before its own arguments, as DeepSpeed does.
        use_devices: Set that variable. False where this host is the only one and has no GPU.
        bind_cores: None, or the cores that a host's processes share out; "" for all that they may use.
        as_deepspeed: Processes find hf_zero where they ask for deepspeed.
        job: A name that no other job has; "" where nobody has to find the processes by it.
        watch_stdin: The end of standard input means that the launcher is gone.
    """

    devices: tuple[tuple[str, ...], ...]
    master_addr: str
    master_port: int
    script: str
    arguments: tuple[str, ...] = ()
    kind: Kind = "file"
    pass_local_rank: bool = False
    use_devices: bool = True
    bind_cores: str | None = None
    log_folder: str | None = None
    job: str = ""
    watch_stdin: bool = False
    as_deepspeed: bool = False

    @property
    def num_nodes(self) -> int:
        return len(self.devices)

    def encode(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> JobPlan:
        values: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        values["devices"] = tuple(tuple(host) for host in values["devices"])
        values["arguments"] = tuple(values["arguments"])
        return cls(**values)
