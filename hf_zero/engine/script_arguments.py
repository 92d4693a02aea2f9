"""The options of a script's command line that name the configuration, ours and DeepSpeed's."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.config.parse import EXAMPLE
from hf_zero.errors import ConfigError

logger = logging.getLogger(__name__)

_OPTIONS = ("zero", "zero_config", "deepspeed_config", "deepscale_config")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --zero (or --zero_config), and DeepSpeed's --deepspeed and --deepspeed_config; returns `parser`.

    `initialize(args=parser.parse_args(), ...)` takes the configuration from them. `--deepspeed` is a switch for the
    script's own use, as it is for DeepSpeed.
    """
    group = parser.add_argument_group("ZeRO", "configuration of hf_zero")
    group.add_argument("--zero", "--zero_config", metavar="CONFIG", help="path of a JSON file, or the JSON itself")
    group.add_argument("--deepspeed", action="store_true", help="DeepSpeed's switch; it is for the script to read")
    group.add_argument("--deepspeed_config", metavar="CONFIG", help="DeepSpeed's name of --zero")
    group.add_argument("--deepscale", action="store_true", help="older name of --deepspeed")
    group.add_argument("--deepscale_config", metavar="CONFIG", help="older name of --deepspeed_config")
    return parser


def config_of(args: Any, config: Any, config_params: Any = None) -> ZeroConfig:
    """Return the one configuration that a script names, by argument or option; its problems wait until it is resolved.

    Raises:
        ConfigError: There is none, or more than one.
    """
    named: dict[str, ZeroConfig | Mapping[str, Any] | str | Path] = {}
    for name in _OPTIONS:
        # DeepSpeed's parsers give a bool where another library's --zero is a switch.
        value = getattr(args, name, None)
        # hf_zero's TrainingArguments have what --zero names in both forms.
        is_loaded_twice = isinstance(value, ZeroConfig) and "args.zero" in named
        if value is not None and not isinstance(value, bool) and not is_loaded_twice:
            named[f"args.{name}"] = value
    for name, value in (("config", config), ("config_params", config_params)):
        if value is not None:
            named[f"{name}="] = value
    if not named:
        raise ConfigError(
            "initialize needs a configuration: config= as a path, a dict or a JSON string "
            f"(the smallest one is {EXAMPLE}), or args with --zero FILE "
            "(hf_zero.add_config_arguments(parser) adds that option)"
        )
    if len(named) > 1:
        raise ConfigError(
            f"initialize was given {len(named)} configurations, by {' and '.join(named)}: leave out all but one"
        )
    ((name, value),) = named.items()
    if name == "args.deepscale_config":
        logger.warning("--deepscale_config is an old name: write --zero or --deepspeed_config")
    return value if isinstance(value, ZeroConfig) else ZeroConfig.load(value, defer=True)


def adopt_local_rank(args: Any) -> None:
    """Set `args.local_rank`, if there is one, to this process's: scripts read it after `initialize`."""
    if not hasattr(args, "local_rank"):
        return
    if "LOCAL_RANK" in os.environ:
        args.local_rank = int(os.environ["LOCAL_RANK"])
    elif args.local_rank is None or args.local_rank < 0:  # else the script, which started its own processes, knows
        args.local_rank = 0
