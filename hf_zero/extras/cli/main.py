"""`hf-zero`: finds the command, runs it, and turns errors into one line and an exit status.

Exit status: 0 done, 1 the job failed, 2 bad usage. A new command is a module with the members of `Command`, added to
COMMANDS; modules import what is heavy inside `run`, so that no command waits for another one's libraries.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from hf_zero.checkpoint.consolidate import CLEAR_LINE, signals_raise
from hf_zero.checkpoint.format import ConsolidateError, package_version
from hf_zero.errors import ZeroError
from hf_zero.extras.cli import bench, config, consolidate, convert, estimate, inspect, launch, profile, report

PROGRAM = "hf-zero"
# Errors that any write may meet, whatever the program does. They name no file.
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class Command(Protocol):
    """The members of a command's module."""

    NAME: str
    SUMMARY: str
    EXAMPLES: str  # command lines, shown by --help

    @property
    def configure(self) -> Callable[[argparse.ArgumentParser], None]: ...  # adds the arguments

    # May raise ZeroError, ConsolidateError, OSError of a named file or a full disk, and argparse.ArgumentError where
    # arguments exclude each other. Anything else is a defect, and keeps its traceback.
    @property
    def run(self) -> Callable[[argparse.Namespace], None]: ...


COMMANDS: tuple[Command, ...] = (bench, config, consolidate, convert, estimate, inspect, launch, profile, report)


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage text: --help shows that."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


@dataclass(frozen=True)
class Parsers:
    top: argparse.ArgumentParser
    commands: Mapping[str, argparse.ArgumentParser]


def build_parsers() -> Parsers:
    top = OneLineParser(prog=PROGRAM, description="Tools around ZeRO training with hf_zero.", allow_abbrev=False)
    top.add_argument("--version", action="version", help="show the version", version=f"hf_zero {package_version()}")
    group = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands = {}
    for command in COMMANDS:
        parser = commands[command.NAME] = group.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.SUMMARY[0].upper() + command.SUMMARY[1:] + ".",
            epilog="examples:\n" + "".join(f"  {line}\n" for line in command.EXAMPLES.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.configure(parser)
        parser.set_defaults(run=command.run, prog=parser.prog)
    return Parsers(top, commands)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parsers = build_parsers()
    if not argv or argv[0] not in parsers.commands:
        return parsers.top.parse_args(argv)
    parser = parsers.commands[argv[0]]
    try:
        # Plain parsing takes `CKPT --dtype bf16 OUT` for an error: positionals must not stand apart there.
        return parser.parse_intermixed_args(argv[1:])
    except TypeError:
        return parser.parse_args(argv[1:])  # a command with commands of its own, or with a rest that it passes on


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. --help, --version and a parser's error leave by SystemExit."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    try:
        with signals_raise():
            args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output is gone (`hf-zero inspect x | head`): the flush at exit must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except argparse.ArgumentError as error:
        return _fail(args.prog, f"{error} (see {args.prog} --help)", status=2)
    except (ZeroError, ConsolidateError) as error:
        return _fail(args.prog, str(error))
    except OSError as error:
        if error.filename is None and error.errno not in _OF_A_DISK:
            raise
        return _fail(args.prog, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return _fail(args.prog, "interrupted")
    return 0


def _fail(prog: str, message: str, status: int = 1) -> int:
    print(f"{CLEAR_LINE if sys.stderr.isatty() else ''}{prog}: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
