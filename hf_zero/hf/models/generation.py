"""`generate` of a sharded model: on all ranks together, with the weights gathered once or token by token.

[Note: Once or stream]
Gathered once, the model is unsharded on every rank from the first token to the last: a rank then needs nobody else,
and ends where its own sequences end. Streamed, every forward gathers the layers one by one, so all ranks must run
equally many forwards: transformers' `synced_gpus` has the ranks that are done go on until the last one is. A forward
may use other layers (experts) than that of another rank: see [Note: Ranks that use different units] in unit_pass.py.
An evaluation that generates for batch after batch gathers once for all of them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.errors import StateError
from hf_zero.hf.patching import by_name, replace_method
from hf_zero.native.machine import available_bytes
from hf_zero.sharding.unit import UnitState

logger = logging.getLogger(__name__)

# "auto" gathers once where the weights take at most this share of the free memory: the cache of keys and values, the
# activations and the logits need the rest.
SHARE_FOR_WEIGHTS = 0.5
# These make the number of forwards depend on the content of a rank's prompts. `synced_gpus` cannot level that out:
# assisted decoding appends to sequences that have ended, and a chunked prompt is forwarded before the first vote.
_UNEVEN = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "prefill_chunk_size")
_GIB = 1 << 30
# The units that calls in a row gather together; None outside of `calls_in_a_row`.
_ROW: ContextVar[ExitStack | None] = ContextVar("_ROW", default=None)


@contextmanager
def calls_in_a_row() -> Iterator[None]:
    """Keep weights that `generate` gathers once unsharded, from its first call in the block to the end of the block.

    Forwards there need no other rank then. All ranks must enter, and nothing inside may train or write weights.
    """
    with ExitStack() as row:
        token = _ROW.set(row)
        try:
            yield
        finally:
            _ROW.reset(token)


def install_generate(model: nn.Module, engine: ZeroEngine) -> None:
    """Let `generate` of `model`, and of every module in it that has one, gather the weights; until the teardown.

    All ranks must call `generate` equally often, but for calls inside `gathered_params`, which need no other rank.
    `synced_gpus` is set to what the gathering needs, whatever the caller passes. A call on one rank only raises
    StateError there, within seconds.
    """
    calls = _Calls(engine)
    for module in model.modules():
        for name, around in (("generate", calls.generate), ("init_continuous_batching", calls.continuous_batching)):
            if callable(getattr(type(module), name, None)):
                replace_method(module, name, engine, functools.partial(around, module))


# ---------------------------------------------------------------- calls
class _Calls:
    """The calls of `generate` of one engine's model. The outermost one gathers; those inside it pass through."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._synced: bool | None = None  # of the call under way; None outside of any
        self._streams = False  # in the call under way
        self._logged: bool | None = None  # the decision that was logged last

    def generate(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """All ranks must call, unless all units are unsharded."""
        bound = inspect.signature(original).bind(*args, **kwargs)
        given = by_name(bound)
        with self._gathered(given):
            # PEFT's generate and others have no such parameter: the one that they call decides.
            if "synced_gpus" in bound.signature.parameters:
                if self._synced:
                    _refuse_uneven(self._engine, module, given)
                bound.arguments["synced_gpus"] = self._synced
                if self._streams:
                    _keep_uncompiled(bound, given)
            return original(*bound.args, **bound.kwargs)

    def continuous_batching(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Continuous batching takes no notice of other ranks, and forwards in a thread of its own."""
        raise StateError(
            f"rank {self._engine.rank}: continuous batching (generate_batch, init_continuous_batching, "
            'cache_implementation="paged") runs as many forwards as the requests of its own rank need, but the '
            "weights are sharded: other ranks would not come to gather them.\nUse generate without it, or call "
            "engine.teardown() on every rank first, which leaves the plain model."
        )

    @contextmanager
    def _gathered(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Hold the weights during a call; inside another one do nothing."""
        if self._synced is not None:
            yield
            return
        with ExitStack() as stack:
            self._synced = self._hold(stack, given)
            try:
                yield
            finally:
                self._synced, self._streams = None, False

    def _hold(self, stack: ExitStack, given: Mapping[str, Any]) -> bool:
        """Let `stack` hold what the call needs; whether the ranks have to run equally many forwards."""
        engine = self._engine
        longest = _ROW.get() or stack
        assistant = engine_of(given.get("assistant_model"))
        if assistant is not None and not _is_unsharded(assistant):
            # Each rank asks it for candidates as often as its own text needs.
            _need_all_ranks(assistant)
            longest.enter_context(assistant.weights.gathered(assistant.units))
        if _is_unsharded(engine):
            return False
        _need_all_ranks(engine)
        engine.finish_updates()
        if self._fits_unsharded():
            longest.enter_context(engine.weights.gathered(engine.units))
            return False
        stack.enter_context(engine.params.streaming())
        self._streams = True
        return engine.world_size > 1

    def _fits_unsharded(self) -> bool:
        """[Note: Once or stream]. The same on all ranks; all must call."""
        engine = self._engine
        choice = engine.config.gather_for_generation
        if choice != "auto":
            return choice == "once"
        needed = sum(unit.full_bytes for unit in engine.units if unit.state is not UnitState.UNSHARDED)
        free = free_bytes(engine.device, engine.world_size)
        lacks = torch.tensor([float(needed > SHARE_FOR_WEIGHTS * free)], dtype=torch.float64, device="cpu")
        fits = engine.comm.vote(lacks, "room for generation").item() == 0
        if self._logged is not fits and engine.rank == 0:
            logger.info(
                "hf_zero: generate gathers the weights %s: they take %.2f GiB on every rank, and rank 0 has %.2f GiB "
                'free; "gather_for_generation" decides otherwise',
                "once" if fits else "layer by layer for every token",
                needed / _GIB,
                free / _GIB,
            )
        self._logged = fits
        return fits


def _is_unsharded(engine: ZeroEngine) -> bool:
    return all(unit.state is UnitState.UNSHARDED for unit in engine.units)


def _need_all_ranks(engine: ZeroEngine) -> None:
    try:
        engine.require_all_ranks("generate")
    except StateError as error:
        raise StateError(
            f"{error}\nRanks that generate for different numbers of batches do so inside `with "
            "hf_zero.gathered_params(model):`, which every rank enters: there generate needs no other rank."
        ) from error


def _keep_uncompiled(bound: inspect.BoundArguments, given: Mapping[str, Any]) -> None:
    """Keep `generate` from compiling the forward, which it does by itself with a static cache.

    CUDA graphs have the addresses of weights in them, and streamed weights have others at every token.
    """
    rest = [name for name, one in bound.signature.parameters.items() if one.kind is one.VAR_KEYWORD]
    if not rest:
        return  # not transformers' own, which has them
    if given.get("compile_config") or getattr(given.get("generation_config"), "compile_config", None):
        logger.warning(
            "hf_zero: generate compiles nothing (compile_config) while weights are gathered token by token; "
            '"gather_for_generation": "once" holds them unsharded'
        )
    bound.arguments[rest[0]] = {**bound.arguments.get(rest[0], {}), "disable_compile": True}


def _refuse_uneven(engine: ZeroEngine, module: nn.Module, given: Mapping[str, Any]) -> None:
    settings = [given]
    for config in (given.get("generation_config"), getattr(module, "generation_config", None)):
        settings += [] if config is None else [vars(config)]
    for name in _UNEVEN:
        if any(one.get(name) for one in settings):
            raise StateError(
                f"rank {engine.rank}: generate with {name} runs a number of forwards that depends on the prompt, and "
                "the weights are gathered token by token, for which all ranks must run equally many.\nSet "
                '"gather_for_generation": "once", or generate inside `with hf_zero.gathered_params(model):`; both '
                f"hold the full model on every rank meanwhile. Or remove {name}."
            )


# ---------------------------------------------------------------- memory
def free_bytes(device: torch.device, world_size: int) -> int:
    """Return the bytes that this rank may still take on `device`; on a CPU its share of what the node has."""
    if device.type != "cpu":
        free: int = torch.accelerator.get_memory_info(device)[0]
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return free + cached
    return available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
