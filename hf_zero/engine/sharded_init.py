"""Shards a model while it is being constructed, so that it is never unsharded anywhere.

Modules are really constructed and initialised, with the caller's random numbers; what is finished is sharded at once
in small units of its own, and at the end those are exchanged for the units of the model.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn.modules import module as torch_hooks

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import StateError
from hf_zero.layout import UnitLayout
from hf_zero.native.host_memory import return_freed_memory
from hf_zero.runtime.build import build_units
from hf_zero.runtime.edit_watch import EditWatch
from hf_zero.runtime.memory_report import cast_line
from hf_zero.runtime.unit_specs import BuildSettings
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.param_index import ParamIndex, ParamPlace
from hf_zero.sharding.placement import FlatParamSpec, Placement
from hf_zero.sharding.reshard import LayoutChange
from hf_zero.sharding.unit import ShardUnit, UnitKind, UnitState
from hf_zero.storage import DeviceStore
from hf_zero.storage.copy_stream import CopyStreams

logger = logging.getLogger(__name__)


class ShardedConstruction:
    """Watches modules being put together, on all ranks alike; rank 0's values win.

    A module is finished when its parent has been put into a module of its own: until then the parent's constructor may
    still initialise it. So what is unsharded at a time is what is between a module and its grandparent, and the
    children of the outermost module.

    Args:
        resolve: The configuration of an outermost module, for the engine that it gets at the end.
    """

    def __init__(self, comm: Comm, resolve: Callable[[nn.Module], ResolvedConfig]) -> None:
        self._comm = comm
        self._resolve = resolve
        store, copies = DeviceStore(comm.device), CopyStreams(comm.device)
        self._placement = Placement(param=store, master=store, copies=copies, native=False, tile_numel=1)
        self._index = ParamIndex()  # of what is in shards
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._settled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # an engine has taken them over already
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Shard what is finished inside the block."""
        handles = [
            torch_hooks.register_module_module_registration_hook(self._module_registered),
            torch_hooks.register_module_parameter_registration_hook(self._parameter_registered),
        ]
        token = _OPEN.set(self)
        try:
            yield
        finally:
            _OPEN.reset(token)
            for handle in handles:
                handle.remove()

    def _parameter_registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if module not in self._settled:
            self._seen.add(module)

    def _module_registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or isinstance(parent, ZeroEngine) or parent in self._settled:
            return
        self._seen.add(parent)
        self._inner.add(child)
        for finished in child.children():
            self._shard(finished)

    def _shard(self, module: nn.Module) -> None:
        """Put the parameters of `module` itself into shards. All ranks must call."""
        if module in self._settled:
            return
        label = f"{type(module).__name__} {next(self._numbers)}"
        # One flat parameter for each: at the end it goes when its parameter has moved, whatever unit that belongs to.
        flats = [
            self._flat(f"{label}/{name}", param)
            for name, param in module.named_parameters(recurse=False)
            if param not in self._index and param.is_floating_point() and not param.is_meta
        ]
        if not flats:
            return
        unit = ShardUnit(label, UnitKind.LAYER, module, flats)
        unit.reshard()
        for flat in unit.flats:
            flat.watch_values(self._refuse)
        self._index.add(unit)
        return_freed_memory(sum(flat.full_bytes for flat in flats))

    def place_of(self, param: nn.Parameter) -> ParamPlace | None:
        """Return the place of a parameter that is in shards already; None for the others."""
        return self._index.get(param)

    def _refuse(self, param: nn.Parameter, writes: bool) -> bool:
        """Raise StateError where a constructor reads or writes parameters of a finished module."""
        raise StateError(
            f"rank {self._comm.run_rank}: a constructor initialised or read parameters below its own children, which "
            "are in shards by then.\nInitialise parameters in the constructor of their module or of its parent, or "
            "inside `with hf_zero.gathered_params(child, write_rank=0):`."
        )

    def _flat(self, name: str, param: nn.Parameter) -> FlatParam:
        layout = UnitLayout.build(
            name,
            {name: tuple(param.shape)},
            dtype=str(param.dtype).removeprefix("torch."),
            trainable=False,
            world_size=self._comm.world_size,
            max_bucket_numel=self._comm.max_bucket_numel,
        )
        spec = FlatParamSpec(layout, param.dtype, on_demand=True)
        return FlatParam(spec, [param], self._comm, self._placement, FlatParam.initialize_from_params)

    @contextlib.contextmanager
    def gathered(self, params: Iterable[nn.Parameter], write_rank: int | None) -> Iterator[None]:
        """Inside, `params` are unsharded; the changes of `write_rank` are kept on all ranks. All ranks must call.

        What has not been sharded yet is left as it is. `write_rank` None is for reading.
        Raises:
            StateError: This rank wrote where all only read.
        """
        params = list(params)
        mine = [unit for unit in self._index.units_of(params) if unit.state is UnitState.SHARDED]
        with torch.no_grad():
            for unit in mine:
                unit.unshard()
                unit.wait_for_unshard()
        watch = EditWatch((flat for unit in mine for flat in unit.flats), by_value=False)
        yield
        if write_rank is None and (edited := watch.edited()):
            raise StateError(
                f"rank {self._comm.run_rank} wrote to parameter(s) that were gathered for reading: "
                f"{', '.join(edited)}.\nName the rank whose edits are to be kept: "
                "hf_zero.gathered_params(..., write_rank=0)."
            )
        with torch.no_grad():
            if write_rank is not None:
                watch.take_replaced()
            for unit in mine:
                if write_rank is not None:
                    self._keep_edits(unit, write_rank)
                unit.reshard()
            if write_rank:  # rank 0's values win anyway when these are sharded
                for param in params:
                    if param not in self._index and param.is_floating_point() and not param.is_meta:
                        values = param.detach().to(self._comm.device, copy=True)
                        self._comm.broadcast(values, "edits of parameters under construction", src=write_rank)
                        param.copy_(values)

    def _keep_edits(self, unit: ShardUnit, write_rank: int) -> None:
        for flat in unit.flats:
            for start, numel in flat.layout.buckets():
                bucket = flat.full[start : start + numel]
                self._comm.broadcast(bucket, f"first weights of {unit.name}", src=write_rank)
            flat.accept_edits()

    def unsharded(self, modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[None]:
        """Inside, `modules` have their own parameters unsharded; rank 0's changes are kept. All ranks must call."""
        return self.gathered((param for module in modules for param in module.parameters(recurse=False)), 0)

    # ---------------------------------------------------------------- the end
    def finish(self) -> None:
        """Put every outermost module under an engine. All ranks must call."""
        roots = [module for module in self._seen if module not in self._inner and _has_parameters(module)]
        roots = [root for root in roots if not any(module in self._settled for module in root.modules())]
        self._engines(sorted(roots, key=self._first_number), self._index.units)

    def settle(self, model: nn.Module) -> None:
        """Put `model` under its engine before the end of the block, for an engine to follow. All ranks must call."""
        if units := self._index.units_of(model.parameters()):
            self._engines([model], units)
        for param in model.parameters():
            self._index.pop(param)
        self._settled.update(model.modules())

    def _engines(self, roots: Iterable[nn.Module], units: Iterable[ShardUnit]) -> None:
        layout_change = LayoutChange(units, self._comm)
        for root in roots:
            config, params = self._resolve(root), list(root.parameters())
            types = [param.dtype for param in params]
            settings = BuildSettings.of(config, train=False)
            built = build_units(root, settings, self._comm, layout_change.initialize, reuse=layout_change.reuse)
            ZeroEngine(root, config, built=built, train=False)
            line = cast_line(types, [param.dtype for param in params])
            if line is not None and self._comm.rank == 0:
                logger.warning("%s: %s", type(root).__name__, line)
        layout_change.finish()

    def _first_number(self, root: nn.Module) -> int:
        """Return a key that sorts models alike on every rank: by what was sharded first."""
        names = [unit.name for unit in self._index.units_of(root.parameters())]
        return min((int(name.rpartition(" ")[2]) for name in names), default=next(self._numbers))


def _has_parameters(module: nn.Module) -> bool:
    return any(param.is_floating_point() and not param.is_meta for param in module.parameters())


_OPEN: ContextVar[ShardedConstruction | None] = ContextVar("hf_zero.engine.sharded_init", default=None)


def open_construction() -> ShardedConstruction | None:
    """Return the construction that `sharded_init` has opened in this context, if any."""
    return _OPEN.get()
