"""`as_deepspeed`: from then on `import deepspeed` in this process finds hf_zero, under all names of names.py."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_zero.errors import StateError
from hf_zero.extras.deepspeed import names
from hf_zero.extras.deepspeed.out_of_scope import sentence_about, stand_in

logger = logging.getLogger(__name__)

# Gradients are not clipped where the file does not say so, which DeepSpeed changed in 0.19.3.
VERSION = "0.19.2"
MAJOR, MINOR, PATCH = map(int, VERSION.split("."))
NO_GIT = "[none]"  # as DeepSpeed says of a release
_DEEPSPEED = "deepspeed"
# These look for the package when they are loaded.
_LOOK_FOR_IT = ("accelerate", "transformers")


def as_deepspeed() -> None:
    """Let this process find hf_zero where it asks for the package deepspeed: `import deepspeed`, its version.

    Programs, transformers and accelerate then take their own paths for DeepSpeed. A program calls it first of all;
    `hf-zero launch --as-deepspeed` and `python -m hf_zero.run --as-deepspeed` do it for one that is not to be edited.
    A second call does nothing.

    Raises:
        StateError: deepspeed, transformers or accelerate was imported before.
    """
    if any(isinstance(one, _Finder) for one in sys.meta_path):
        return
    if early := [name for name in (_DEEPSPEED, *_LOOK_FOR_IT) if name in sys.modules]:
        raise StateError(
            f"hf_zero.as_deepspeed() came after the import of {', '.join(early)}, which had looked for deepspeed "
            "already.\nCall it in the first line of the program."
        )
    real = importlib.machinery.PathFinder.find_spec(_DEEPSPEED)
    if real is not None and real.origin is not None:  # without an origin it is a folder without code
        logger.warning("import deepspeed finds hf_zero, and not the package in %s", real.origin)
    sys.meta_path.insert(0, _Finder())
    names.install(_DEEPSPEED)
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


def inherit() -> None:
    """Let every Python that this process starts call `as_deepspeed` at its start."""
    paths = [str(Path(__file__).parent / "children"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


class _Finder:
    """The place where Python looks for modules and packages first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find a stand-in for what is out of scope in DeepSpeed, and other modules as Python does.

        Python asks for names that a package does not have too: `from deepspeed.utils import NAME`.
        """
        below = name.removeprefix(f"{_DEEPSPEED}.")
        if below != name and (sentence := sentence_about(below)) is not None:
            return importlib.machinery.ModuleSpec(name, _StandIns(below, sentence), is_package=True)
        return _loaded_then(name, path, _CHANGES[name]) if name in _CHANGES else None

    def find_distributions(self, context: Any) -> Iterator[importlib.metadata.Distribution]:
        if context.name in (None, _DEEPSPEED):
            yield _Package()


class _StandIns(importlib.abc.Loader):
    """Makes the stand-in for one path below deepspeed."""

    def __init__(self, path: str, sentence: str) -> None:
        self._path = path
        self._sentence = sentence

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return stand_in(self._path, self._sentence)

    def exec_module(self, module: ModuleType) -> None:
        """It has no code."""


class _Package(importlib.metadata.Distribution):
    """The answers of importlib.metadata for the package deepspeed."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            message = Message()
            message["Metadata-Version"], message["Name"], message["Version"] = "2.1", _DEEPSPEED, VERSION
            return message.as_string()
        return _DEEPSPEED if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


def _loaded_then(name: str, path: Any, change: Callable[[ModuleType], None]) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module of a file, to which `change` is done after it was loaded."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None and spec.loader is not None:
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _count_processes_on_cpu(state: Any) -> None:
    """Let accelerate train under DeepSpeed on a machine without accelerator, where it would count one process."""
    import torch

    if torch.accelerator.is_available():
        return
    prepare, init = state.PartialState._prepare_backend, state.AcceleratorState.__init__

    def trains_under_deepspeed() -> bool:
        return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"

    def prepare_backend(self: Any, cpu: bool, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        found = prepare(self, cpu, sagemaker_dp, backend)
        return prepare(self, True, sagemaker_dp, backend) if found[0] is None and trains_under_deepspeed() else found

    def init_state(self: Any, *args: Any, **kwargs: Any) -> None:
        if trains_under_deepspeed():
            os.environ.pop("ACCELERATE_USE_CPU", None)  # accelerate would take it as "without DeepSpeed"
        init(self, *args, **kwargs)

    state.PartialState._prepare_backend = prepare_backend
    state.AcceleratorState.__init__ = init_state


def _name_parameters(module: Any) -> None:
    """Give parameters of torch the attributes that DeepSpeed gives those of stage 3."""
    for name in ("ds_id", "ds_numel", "ds_persist", "ds_shape", "ds_status", "ds_summary", "ds_tensor"):
        setattr(module.Parameter, name, _answered("parameters", name))
    module.Parameter.ds_active_sub_modules = property(lambda _: set())


def _answered(by: str, name: str) -> property:
    """Return a property that `answer` of the module `by` of this room answers."""

    def answer(one: Any) -> Any:
        return importlib.import_module(f"hf_zero.extras.deepspeed.{by}").answer(name, one)

    return property(answer)


def _name_modules(module: Any) -> None:
    """Give modules DeepSpeed's list of what else their forward uses: nothing is registered here."""
    module.Module.ds_external_parameters = lambda _: iter(())


def _name_monitors(module: Any) -> None:
    """Give configurations the blocks of their monitors, of which programs make monitors for numbers of their own."""
    module.ResolvedConfig.monitor_config = _answered("monitor", "monitor_config")


def _name_partitions(module: Any) -> None:
    """Give optimizers the attributes that programs read of DeepSpeed's, such as its hooks at stage 3."""
    scale = "cur_iter cur_scale dynamic_loss_scale last_overflow_iter loss_scale min_loss_scale scale_window"
    weights = "fp32_partitioned_groups_flat single_partition_of_fp32_groups"
    for name in f"{scale} {weights} parameter_offload offload_states reload_states".split():
        setattr(module.ShardedOptimizer, name, _answered("optimizer", name))


def _save_empty(module: Any) -> None:
    """Let programs save a state dict of sharded parameters, as they do before they write a full one over it."""
    module.ShapeOnly.saves_empty = True


def _compare_tied_weights(module: Any) -> None:
    """Let transformers compare tied weights that are stored twice when it has loaded them into zero.Init's shards.

    All ranks do it, so it may gather, which a read without gradients may not: programs load under torch.no_grad.
    """
    import torch

    finalize = module.PreTrainedModel._finalize_model_loading
    module.PreTrainedModel._finalize_model_loading = staticmethod(torch.enable_grad()(finalize))


def _save_in_own_ways(module: Any) -> None:
    """Let the `_save` of a library's Trainer find full weights in the model: it may look at no state dict.

    For adapters it is given all that PEFT saves: transformers would leave out frozen rows of a resized vocabulary.
    """
    save_model = module.Trainer.save_model

    @functools.wraps(save_model)
    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        from hf_zero.engine.engine import engine_of
        from hf_zero.hf.models.peft import is_peft_model
        from hf_zero.hf.models.saving import full_weights, saving_alone
        from hf_zero.hf.patching import instead

        engine: Any = engine_of(self.model)
        own = self._save

        def save_here(output_dir: str | None = None, state_dict: Any = None) -> None:
            if engine is None or not engine.is_sharded:
                own(output_dir, state_dict=state_dict)
            elif self.args.should_save:  # transformers 5.24 calls it on all ranks, of which one has the weights
                with saving_alone(engine, state_dict):
                    own(output_dir, state_dict=state_dict)

        def adapters(exclude_frozen_parameters: bool) -> dict[str, Any]:
            return full_weights(self.model, engine, keep=self.args.should_save)

        with contextlib.ExitStack() as stack:
            stack.enter_context(instead(self, "_save", save_here))
            if engine is not None and is_peft_model(self.model):
                stack.enter_context(instead(engine, "_zero3_consolidated_16bit_state_dict", adapters))
            save_model(self, *args, **kwargs)

    module.Trainer.save_model = save


# Modules of others are changed once they are loaded.
_CHANGES: dict[str, Callable[[Any], None]] = {
    "accelerate.state": _count_processes_on_cpu,
    "hf_zero.config.resolved": _name_monitors,
    "hf_zero.optim.sharded": _name_partitions,
    "hf_zero.sharding.shape_only": _save_empty,
    "torch.nn.modules.module": _name_modules,
    "torch.nn.parameter": _name_parameters,
    "transformers.modeling_utils": _compare_tied_weights,
    "transformers.trainer": _save_in_own_ways,
}
