"""`hf-zero config`: looks at a configuration file before anything is started.

`check` reads the file alone; `resolve` shows what a Trainer with the given arguments would make of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from hf_zero.config import Problem, ZeroConfig
from hf_zero.config.autofill import hidden_size
from hf_zero.config.keys import help_of
from hf_zero.errors import ConfigError
from hf_zero.extras.cli.text import plural

NAME = "config"
SUMMARY = "check a configuration, or show every value that it resolves to"
EXAMPLES = """
hf-zero config check zero3.json
hf-zero config resolve zero3.json --per_device_train_batch_size 4 --learning_rate 2e-5 --bf16
hf-zero config resolve zero3.json --model ./my-model --world_size 8 --num_training_steps 1000 --json
hf-zero config resolve zero3.json --plain --changed
"""

_FILE_HELP = "a JSON file in DeepSpeed's schema, or the JSON itself"
_REST_HELP = "options above, and arguments of transformers.TrainingArguments, such as --learning_rate 2e-5"


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_subparsers(title="commands", metavar="WHAT", required=True)
    checking = "list every problem of a file, each with the nearest known key"
    check = group.add_parser("check", help=checking, description=f"{checking.capitalize()}.", allow_abbrev=False)
    check.add_argument("file", metavar="FILE", help=_FILE_HELP)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(action=_check, prog=check.prog)
    resolving = "show every resolved value with its origin"
    resolve = group.add_parser("resolve", help=resolving, description=f"{resolving.capitalize()}.", allow_abbrev=False)
    _add_options(resolve)
    resolve.add_argument("file", metavar="FILE", help=_FILE_HELP)
    resolve.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help=_REST_HELP)
    resolve.set_defaults(action=_resolve, prog=resolve.prog)


def _add_options(parser: argparse.ArgumentParser, **default: Any) -> None:
    """The options of `resolve`: before the file they are the command's own, after it they stand among the rest."""
    parser.add_argument("--model", metavar="M", help="folder or name of the model that sizes follow from", **default)
    parser.add_argument(
        "--world_size", type=int, metavar="N", help="number of ranks (1)", **(default or {"default": 1})
    )
    parser.add_argument("--num_training_steps", type=int, metavar="N", help="updates, for schedulers", **default)
    parser.add_argument(
        "--plain", action="store_true", help="a loop of your own: no TrainingArguments stand behind auto", **default
    )
    parser.add_argument("--changed", action="store_true", help="leave out keys that have their default", **default)
    parser.add_argument("--json", action="store_true", help="print JSON", **default)


def run(args: argparse.Namespace) -> None:
    args.action(args)


# -------------------------------------------------------------------- check
def _check(args: argparse.Namespace) -> None:
    config = _load(args.file)
    outcome = config.alone()
    _report_problems(config, outcome.problems, as_json=args.json)
    assert outcome.config is not None, "no problems"
    notices = list(outcome.config.notices)
    if args.json:
        print(json.dumps({"source": config.source, "stage": config.stage, "problems": [], "notices": notices}))
        return
    for notice in notices:
        print(f"note: {notice}")
    print(f"{config.source}: no problems (stage {config.stage})")


def _load(source: str) -> ZeroConfig:
    try:
        return ZeroConfig.load(source, defer=True)
    except ConfigError as error:
        raise ConfigError(" ".join(str(error).split("\n"))) from None


def _report_problems(config: ZeroConfig, problems: Sequence[Problem], *, as_json: bool) -> None:
    """Print the problems, if there are any, and end with an error in one line."""
    if not problems:
        return
    if as_json:
        rows = [{"help": help_of(problem.key), **asdict(problem)} for problem in problems]
        print(json.dumps({"source": config.source, "stage": config.stage, "problems": rows}))
    else:
        for number, problem in enumerate(problems, start=1):
            print(f"{number}. {problem}")
            if text := help_of(problem.key):
                print(f"   {problem.key}: {text}")
    raise ConfigError(f"{plural(len(problems), 'problem')} in {config.source}")


# -------------------------------------------------------------------- resolve
def _resolve(args: argparse.Namespace) -> None:
    arguments = _read_rest(args)
    config = _load(args.file)
    model = _model(args.model) if args.model is not None else None
    outcome = config.outcome(arguments, model, args.world_size, num_training_steps=args.num_training_steps)
    _report_problems(config, outcome.problems, as_json=args.json)
    resolved = outcome.config
    assert resolved is not None, "no problems"
    if args.json:
        values = {
            path: {"value": value, "origin": resolved.origins[path], "help": help_of(path)}
            for path, value in resolved.public_settings.items()
            if not args.changed or resolved.is_changed(path)
        }
        print(json.dumps({"source": config.source, "values": values, "notices": list(resolved.notices)}))
        return
    print(resolved.describe(changed=args.changed))
    for notice in resolved.notices:
        print(f"note: {notice}")


def _read_rest(args: argparse.Namespace) -> Any:
    """TrainingArguments by attribute, or None for a plain loop; the command's own options go to `args`.

    They are parsed, not constructed: that would look for devices and join processes.
    """
    from transformers import HfArgumentParser, TrainingArguments

    parser: Any = HfArgumentParser(TrainingArguments, add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.prog = args.prog
    parser.error = _refuse
    _add_options(parser, default=argparse.SUPPRESS)
    given, unknown = parser.parse_known_args(args.rest)
    if unknown:
        raise argparse.ArgumentError(None, f"unrecognized arguments: {' '.join(unknown)}")
    for name in ("model", "world_size", "num_training_steps", "plain", "changed", "json"):
        if hasattr(given, name):
            setattr(args, name, getattr(given, name))
            delattr(given, name)
    if args.world_size < 1:
        raise argparse.ArgumentError(None, f"--world_size {args.world_size}: expected at least 1")
    return None if args.plain else given


def _refuse(message: str) -> None:
    raise argparse.ArgumentError(None, message)


def _model(name: str) -> Any:
    """Return what the resolver looks at: the configuration, or shapes on the meta device where that has no width."""
    from transformers import AutoConfig

    from hf_zero.extras.cli.meta_model import build

    try:
        found = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {str(error).splitlines()[0]}") from None
    shapeless = SimpleNamespace(config=found, parameters=lambda: iter(()))
    return shapeless if hidden_size(shapeless) is not None else build(found)
