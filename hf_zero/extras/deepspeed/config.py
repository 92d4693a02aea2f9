"""`DeepSpeedConfig`: a configuration by itself, as scripts read sizes of it before there is an engine."""

from __future__ import annotations

from typing import Any

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.distributed.processes import launched_processes
from hf_zero.engine.deepspeed_names import OWN_OPTIMIZERS

# Programs compare the name of an engine's optimizer with these.
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = OWN_OPTIMIZERS
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "onebitadam", "onebitlamb"


def DeepSpeedConfig(config: Any, mpu: Any = None, mesh_device: Any = None) -> ResolvedConfig:
    """Return a path, dict or JSON string with batch sizes and defaults filled in: what `engine.config` is.

    `mpu` and `mesh_device` are for DeepSpeed's sake: all processes share the data.
    Raises:
        ConfigError: Everything that is wrong with the configuration, at once.
    """
    loaded = ZeroConfig.load(config)
    return loaded.resolve(world_size=launched_processes(), client_optimizer=True, client_scheduler=True)
