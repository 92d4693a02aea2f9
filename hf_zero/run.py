"""Runs an unmodified training script under ZeRO: `python -m hf_zero.run --zero zero3.json script.py ...`.

Under torchrun or accelerate launch: `torchrun --nproc_per_node 2 -m hf_zero.run --zero zero3.json script.py ...`.
With `--as-deepspeed` in place of `--zero` the script names its configuration itself, as for DeepSpeed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_zero.errors import ConfigError
from hf_zero.extras.deepspeed.facade import as_deepspeed, inherit
from hf_zero.extras.launcher.script import become, missing_script

_EXAMPLES = """examples:
  python -m hf_zero.run --zero zero2.json train.py --output_dir out
  torchrun --nproc_per_node 2 -m hf_zero.run --zero zero3.json train.py --output_dir out
  ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -m hf_zero.run --zero zero3.json train.py    # without a GPU
  torchrun --nproc_per_node 2 -m hf_zero.run --as-deepspeed train.py --deepspeed ds_config.json
  python -m hf_zero.run --as-deepspeed -m accelerate.commands.launch --config_file deepspeed.yaml train.py
  accelerate launch -m hf_zero.run --zero '{"zero_optimization": {"stage": 3}}' -m my_package.train
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse our own options, enable ZeRO in this process, and become the script."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.script:
        parser.error("give the script to run")
    script, arguments = options.script[0], options.script[1:]
    if problem := missing_script(script, is_module=options.module):
        parser.error(problem)
    try:
        if options.as_deepspeed:
            inherit()
            as_deepspeed()
        else:
            from hf_zero.hf.enable import enable

            enable(options.zero)
    except ConfigError as error:
        sys.stderr.write(f"hf_zero.run: {error}\n")
        raise SystemExit(2) from None
    become(script, arguments, is_module=options.module)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_zero.run",
        description="Run an unmodified transformers, TRL or accelerate script under ZeRO.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--zero", metavar="CONFIG", help="path of a JSON file, or the JSON itself")
    way.add_argument("--as-deepspeed", action="store_true", help="SCRIPT is for DeepSpeed, and finds hf_zero instead")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS]", help="the script to run")
    return parser


if __name__ == "__main__":
    main()
