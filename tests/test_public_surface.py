"""The public surface is what tests/golden/public_surface.txt lists: nothing public comes or goes unseen.

`python -m tests.test_public_surface` writes the file anew. A line that goes breaks somebody's script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from torch import nn

import hf_zero
from hf_zero import checkpointing, estimate, optim, pipeline
from hf_zero.config.keys import OBEYED, statuses
from hf_zero.extras.cli.main import build_parsers

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "public_surface.txt"


def engine_classes() -> list[type]:
    """The classes of the engines that `initialize` gives for a module and for a pipeline."""
    plain = hf_zero.initialize(model=nn.Linear(1, 1), config={"zero_optimization": {"stage": 0}})[0]
    layers = pipeline.PipelineModule([nn.Linear(1, 1)], num_stages=1, loss_fn=nn.MSELoss())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1}}}
    staged = hf_zero.initialize(model=layers, config=config)[0]
    return [type(plain), type(staged)]


def public(names: object) -> list[str]:
    return sorted(name for name in dir(names) if not name.startswith("_"))


def options(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, f"{command} {name}")
        elif "--help" not in action.option_strings:
            yield f"{command} {' '.join(action.option_strings) or action.metavar or action.dest}"


def surface() -> str:
    lines = [f"hf_zero.{name}" for name in hf_zero.__all__]
    modules = {"checkpointing": checkpointing, "estimate": estimate, "optim": optim, "pipeline": pipeline}
    for module, names in modules.items():
        lines += [f"hf_zero.{module}.{name}" for name in getattr(names, "__all__", None) or public(names)]
    plain, staged = engine_classes()
    lines += [f"engine.{name}" for name in public(plain) if not hasattr(nn.Module, name)]
    lines += [f"pipeline engine.{name}" for name in public(staged) if not hasattr(plain, name)]
    lines += options(build_parsers().top, "hf-zero")
    lines += sorted(f"key {path}" for path, status in statuses() if status.verdict == OBEYED)
    return "\n".join(lines) + "\n"


def test_the_public_surface_is_the_one_that_is_listed() -> None:
    found, listed = surface().splitlines(), GOLDEN.read_text(encoding="utf-8").splitlines()
    gone, new = [one for one in listed if one not in found], [one for one in found if one not in listed]
    assert not gone and not new, f"gone: {gone}\nnew: {new}\n(python -m tests.test_public_surface writes the list)"
    assert (
        sum(line.startswith("engine.") for line in found) > 50 and sum(line.startswith("key ") for line in found) > 150
    )


if __name__ == "__main__":
    GOLDEN.write_text(surface(), encoding="utf-8")
