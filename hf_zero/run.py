"""Runs an unmodified training script under ZeRO: `python -m hf_zero.run --zero zero3.json script.py ...`.

Under torchrun or accelerate launch: `torchrun --nproc_per_node 2 -m hf_zero.run --zero zero3.json script.py ...`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_zero.errors import ConfigError
from hf_zero.extras.launcher.script import become, missing_script
from hf_zero.hf.enable import enable

_EXAMPLES = """examples:
  python -m hf_zero.run --zero zero2.json train.py --output_dir out
  torchrun --nproc_per_node 2 -m hf_zero.run --zero zero3.json train.py --output_dir out
  ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -m hf_zero.run --zero zero3.json train.py    # without a GPU
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
    parser.add_argument("--zero", required=True, metavar="CONFIG", help="path of a JSON file, or the JSON itself")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS]", help="the script to run")
    return parser


if __name__ == "__main__":
    main()
