"""activation_memory: the choice against all choices, bytes of a real run against the budget, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.resolved import ActivationCheckpointing
from hf_zero.errors import ConfigError
from hf_zero.extras.activations import active
from hf_zero.extras.activations.budget import Choice, RegionBytes, choose, least, peak_of
from tests.harness.ranks import run_ranks

LAYERS, BATCH, TOKENS, HIDDEN = 8, 2, 8, 16


def test_the_choice_recomputes_as_little_as_any_choice_of_last_regions_can() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sizes = [RegionBytes(rng.randint(1, 5), rng.randint(0, 30)) for _ in range(rng.randint(1, 6))]
        limit, can_offload = rng.randint(1, 120), rng.random() < 0.5
        chosen = choose(sizes, limit, can_offload=can_offload)
        kinds = [one for one in Choice if can_offload or one is not Choice.OFFLOAD]
        fitting = [c for c in itertools.product(kinds, repeat=len(sizes)) if peak_of(sizes, c) <= limit]
        if chosen is None:
            # Copies to the host are made of the first regions only.
            assert limit < least(sizes, can_offload=can_offload) or can_offload
            continue
        assert peak_of(sizes, chosen) <= limit and tuple(chosen) in fitting
        kept = chosen.count(Choice.KEEP)
        assert all(choice is Choice.KEEP for choice in chosen[len(sizes) - kept :])


class LayerBytes(TorchDispatchMode):
    """The memory that layers make in their forwards and recomputations, counted tensor by tensor: the most of it that
    lives whenever something else computes, as a backward."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.peak = 0
        self._inside = False
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        for layer in layers:
            layer.forward = self._watched(layer.forward)

    def _watched(self, forward: Any) -> Any:
        def watched(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return forward(hidden, *args, **kwargs)
            finally:  # torch ends a recomputation by an exception
                self._inside = False

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        if not self._inside:
            self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
            return found
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and (storage := one.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return found


def run(stage: int, memory: Any, reentrant: bool, tokens: tuple[int, ...] = (TOKENS,) * 3) -> Any:
    """Losses; how many regions were recomputed in the last step; the budget; and bytes counted in the last step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 40}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1)
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    block = {} if memory is None else {"activation_checkpointing": {"activation_memory": memory}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    keys = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero, **block}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = hf_zero.initialize(model=model.train(), optimizer=optimizer, config=keys)[0]
    torch.manual_seed(engine.rank)
    calls = [0]
    counted = LayerBytes(model.model.layers)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    losses = []
    try:
        for step, length in enumerate(tokens):
            calls[0] = 0
            ids = torch.randint(40, (BATCH, length))
            with counted if step == len(tokens) - 1 else contextlib.nullcontext():
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        now = active.current()
        return losses, calls[0] - LAYERS, None if now is None else now.budget, counted.peak
    finally:
        engine.teardown()


def budgets() -> Any:
    """Train at five budgets, at both stages and ways of checkpointing; rank 1 has another budget than rank 0."""
    plain = {reentrant: run(3, None, reentrant)[0] for reentrant in (False, True)}
    found = []
    _, _, budget, _ = run(3, "1GB", False)
    whole, smallest = peak_of(budget.sizes, [Choice.KEEP] * LAYERS), least(budget.sizes, can_offload=False)
    assert set(budget.choices) == {Choice.KEEP}
    for part in range(5):
        memory = smallest + part * (whole - smallest) // 4
        losses, recomputed, budget, counted = run(3, memory + 500 * dist.get_rank(), part % 2 == 1)
        assert losses == plain[part % 2 == 1]
        found.append((memory, recomputed, peak_of(budget.sizes, budget.choices), counted))
    longer = run(2, smallest * 3, False, (TOKENS, TOKENS, 2 * TOKENS, TOKENS, 2 * TOKENS))
    assert longer[2].sizes[0].inputs > budget.sizes[0].inputs
    with pytest.raises(ConfigError) as raised:
        run(2, 1000, False)
    return found, str(raised.value), smallest


@pytest.mark.slow
def test_budgets_of_a_llama() -> None:
    for rank, (found, text, smallest) in enumerate(run_ranks(budgets, 2)):
        counts = [recomputed for _, recomputed, _, _ in found]
        assert counts == sorted(counts, reverse=True) and counts[-1] == 0 and counts[0] >= LAYERS - 2
        assert len(set(counts)) == 5
        assert all(peak <= memory + 500 * rank for memory, _, peak, _ in found)
        assert all(0.9 * peak < counted <= memory + 500 * rank for memory, _, peak, counted in found), found
        assert text.startswith(f"rank {rank}: activation_checkpointing.activation_memory = 1000 bytes cannot be met")
        assert f"take {smallest} bytes" in text


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_was_measured_is_freed(reentrant: bool) -> None:
    """The first step's graphs leave nothing alive after its backward."""
    layer, made = torch.nn.Linear(4, 4), list[weakref.ref[torch.Tensor]]()

    def region(x: torch.Tensor) -> torch.Tensor:
        inner = layer(x).exp()
        made.append(weakref.ref(inner))
        return inner.exp()

    end = active.use(ActivationCheckpointing(activation_memory=10**9), torch.device("cpu"), 0)
    try:
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(region, x * 0.1, use_reentrant=reentrant)
        x.sum().backward()
        now = active.current()
        assert now is not None and now.budget is not None and set(now.budget.measured_bodies()) == {0, 1}
        del x
        gc.collect()
        assert len(made) == 4 and [one() for one in made] == [None] * 4
    finally:
        end()


@pytest.mark.parametrize("value", ["lots", 0, "-1GB", "4 apples"])
def test_a_size_that_is_none_is_refused(value: Any) -> None:
    block = {"activation_memory": value}
    problems = ZeroConfig.load({"activation_checkpointing": block}, defer=True).check()
    assert len(problems) == 1 and 'a size such as "4GB", "512MiB"' in str(problems[0])


def test_sizes_and_what_does_not_go_together() -> None:
    sizes = {"4GB": 4 * 10**9, "1.5 GiB": 3 * 2**29, 12345: 12345, "100M": 10**8}
    for given, expected in sizes.items():
        block = {"activation_checkpointing": {"activation_memory": given}}
        assert ZeroConfig.load(block, defer=True).get("activation_checkpointing.activation_memory") == expected
    block = {"activation_memory": "4GB", "cpu_checkpointing": True}
    (problem,) = ZeroConfig.load({"activation_checkpointing": block}, defer=True).check()
    assert "cpu_checkpointing is true as well" in str(problem)
