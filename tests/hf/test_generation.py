"""`generate` of a sharded model gives the texts of one process, whatever the ranks do differently."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CompileConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_zero
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.hf.models import generation
from hf_zero.sharding.unit import UnitKind
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

VOCAB = 97
NEW = 9


def llama(layers: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        initializer_range=0.6,  # texts that do not repeat one token
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def t5() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        d_model=20,
        d_kv=6,
        d_ff=28,
        num_layers=2,
        num_heads=2,
        vocab_size=VOCAB,
        initializer_factor=3.0,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval()


def lora() -> Any:
    model: Any = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(5)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    return model.eval()


BUILD: dict[str, Callable[[], Any]] = {"llama": llama, "t5": t5, "lora": lora}


class StopRow(StoppingCriteria):
    """Ends row r of rank k after 2 + r + 2k new tokens."""

    def __init__(self, start: int, rank: int) -> None:
        self._start, self._rank = start, rank

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        limit = 2 + 2 * self._rank + torch.arange(len(input_ids))
        return input_ids.shape[1] - self._start >= limit


# Decoding -> arguments of generate; "stop" marks that rows and ranks end at different steps.
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop": {"stop": True},
    "beams": {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True},
    "sampling": {"do_sample": True, "top_k": 20, "stop": True},
}


def prompts(rank: int, rows: int = 2, length: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def text(model: Any, rank: int, decoding: str) -> list[list[int]]:
    settings = {"max_new_tokens": NEW, **DECODINGS[decoding]}
    ids = prompts(rank)
    if settings.pop("stop", False):
        start = 1 if model.config.is_encoder_decoder else ids.shape[1]
        settings["stopping_criteria"] = [StopRow(start, rank)]
    torch.manual_seed(rank)
    rows: list[list[int]] = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings).tolist()
    return rows


def sharded(model: Any, choice: str = "stream", **zero: Any) -> ZeroEngine:
    config = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "gather_for_generation": choice,
    }
    engine = engine_of(hf_zero.shard(model, config))
    assert engine is not None and engine.is_sharded
    return engine


class Forwards:
    """Counts the forwards of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        module.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def is_released(engine: ZeroEngine) -> bool:
    return all(param.isnan().all() for unit in engine.units for buffer in unit.flats for param in buffer.params)


def compare(name: str, choice: str, decodings: list[str], zero: dict[str, Any]) -> dict[str, tuple[Any, Any, int]]:
    """Return for each decoding: text of the sharded model, text of a plain one on this rank alone, forwards
    of the former.
    """
    plain, model = BUILD[name](), BUILD[name]()
    engine = sharded(model, choice, **zero)
    forwards = Forwards(model if name != "lora" else model.get_base_model())
    rank, found = dist.get_rank(), {}
    for decoding in decodings:
        forwards.count = 0
        got = text(model, rank, decoding)
        assert is_released(engine), decoding
        found[decoding] = (got, text(plain, rank, decoding), forwards.count)
    return found


def check_texts(results: list[dict[str, tuple[Any, Any, int]]], choice: str) -> None:
    for decoding in results[0]:
        for rank, result in enumerate(results):
            got, want, _ = result[decoding]
            assert got == want, (decoding, rank)
        texts = [result[decoding][0] for result in results]
        assert texts[0] != texts[1], "vacuous: ranks have the same text"
        if DECODINGS[decoding].get("stop"):
            counts = {result[decoding][2] for result in results}
            assert len({len(rows[0]) for rows in texts}) == len(results), "vacuous: ranks end at the same step"
            assert len(counts) == (1 if choice == "stream" else len(results)), counts


@pytest.mark.parametrize("choice", ["once", "stream"])
@pytest.mark.parametrize("name", ["llama", "t5", "lora"])
def test_texts_are_those_of_one_process(name: str, choice: str) -> None:
    check_texts(run_ranks(compare, 2, name, choice, list(DECODINGS), {}), choice)


@pytest.mark.parametrize("choice", ["once", "stream"])
def test_texts_on_three_ranks(choice: str) -> None:
    check_texts(run_ranks(compare, 3, "llama", choice, ["stop", "beams"], {}), choice)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["once", "stream"])
def test_texts_of_shards_in_groups(choice: str) -> None:
    check_texts(run_ranks(compare, 4, "lora", choice, ["stop", "sampling"], {"sharding_group": 2}), choice)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_texts_with_offloaded_parameters(world_size: int, device: str, disk_path: Path) -> None:
    zero = {"offload_param": {"device": device, "nvme_path": str(disk_path)}}
    for choice in ("once", "stream"):
        results = run_ranks(compare, world_size, "llama", choice, ["stop", "sampling"], zero)
        if world_size > 1:
            check_texts(results, choice)
        else:
            assert all(got == want for got, want, _ in results[0].values())


# -------------------------------------------------------------------- what is gathered
def count_gathers(choice: str, zero: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], int]:
    """Return (all-gathers counted by unit kind, buckets by unit kind, forwards)."""
    model = llama(layers=3)
    engine = sharded(model, choice, **zero)
    kinds = {buffer.layout.name: unit.kind.value for unit in engine.units for buffer in unit.flats}
    counted = dict.fromkeys(kinds.values(), 0)
    buckets = dict.fromkeys(kinds.values(), 0)
    for unit in engine.units:
        for buffer in unit.flats:
            buckets[unit.kind.value] += buffer.layout.num_buckets
    original = engine.comm.all_gather

    def counting(full: torch.Tensor, part: torch.Tensor, what: str, **options: bool) -> Any:
        counted[kinds[what]] += 1
        return original(full, part, what, **options)

    engine.comm.all_gather = counting  # type: ignore[method-assign]
    forwards = Forwards(model)
    text(model, 0, "greedy")
    assert is_released(engine)
    return counted, buckets, forwards.count


def test_number_of_gathers() -> None:
    layer, root = UnitKind.LAYER.value, UnitKind.ROOT.value
    for counted, buckets, forwards in run_ranks(count_gathers, 2, "once", {}):
        assert forwards == NEW and counted == buckets
    for counted, buckets, forwards in run_ranks(count_gathers, 2, "stream", {}):
        ahead = buckets[layer] // 3  # of a token that was not asked for any more
        assert counted == {layer: buckets[layer] * forwards + ahead, root: buckets[root]}
    no_prefetch = {"stage3_prefetch_bucket_size": 0}
    for counted, buckets, forwards in run_ranks(count_gathers, 2, "stream", no_prefetch):
        assert counted == {layer: buckets[layer] * forwards, root: buckets[root]}
    for counted, buckets, forwards in run_ranks(count_gathers, 2, "stream", {"stage3_max_live_parameters": 1}):
        assert counted == {layer: buckets[layer] * forwards, root: buckets[root] * forwards}


def decide(fits: list[bool]) -> int:
    generation.SHARE_FOR_WEIGHTS = 1.0 if fits[dist.get_rank()] else 0.0
    model = llama()
    engine = sharded(model, "auto")
    text(model, 0, "greedy")
    return engine.comm.counts["all_gather"].calls


def test_auto_gathers_once_where_every_rank_has_room() -> None:
    once, stream = run_ranks(decide, 2, [True, True]), run_ranks(decide, 2, [True, False])
    assert once == [once[0]] * 2 and stream == [stream[0]] * 2 and 2 * once[0] < stream[0]


def peak_of_stream() -> tuple[int, int]:
    model = llama(layers=6)
    engine = sharded(model)
    text(model, 0, "greedy")
    return engine.params.live.peak_bytes, sum(unit.full_bytes for unit in engine.units)


def test_streaming_never_holds_all_layers() -> None:
    for peak, whole in run_ranks(peak_of_stream, 2):
        assert 0 < peak < 0.75 * whole


# -------------------------------------------------------------------- beside training
def train_and_generate(choice: str, on_shards: bool) -> tuple[list[float], list[list[int]]]:
    """Return the losses of steps with a generation between them; the last one breaks off by an exception on
    all ranks.
    """
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    rank, world = (dist.get_rank(), dist.get_world_size()) if on_shards else (0, 1)
    engine: ZeroEngine | None = None
    if on_shards:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"zero_optimization": zero, "gather_for_generation": choice}
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    losses: list[float] = []
    rows: list[list[int]] = []

    def step(number: int, between: Callable[[], Any]) -> None:
        ids = torch.randint(3, VOCAB, (6, 8), generator=torch.Generator().manual_seed(number))
        mine = ids.chunk(world)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        between()
        loss.backward()
        losses.append(loss.item())
        if engine is not None:
            engine.step()
        else:
            optimizer.step()
            optimizer.zero_grad()

    def speak() -> None:
        rows.extend(text(model, 0, "stop"))

    def fail() -> None:
        def stop(*_: Any) -> Any:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            model.generate(prompts(0), max_new_tokens=4, logits_processor=[stop])

    for number, between in enumerate((lambda: None, speak, fail, speak, lambda: None)):
        step(number, between)
        between()
        assert engine is None or is_released(engine)
    return losses, rows


@pytest.mark.parametrize("choice", ["once", "stream"])
def test_training_goes_on_after_generation(choice: str) -> None:
    want_losses, want_rows = run_ranks(train_and_generate, 1, choice, False)[0]
    results = run_ranks(train_and_generate, 2, choice, True)
    for index, want in enumerate(want_losses):
        mean = sum(losses[index] for losses, _ in results) / 2
        assert math.isclose(mean, want, rel_tol=1e-4), (index, mean, want)
    assert want_losses[-1] != want_losses[0]
    for _, rows in results:
        assert rows == want_rows
    assert want_rows[:2] != want_rows[2:], "vacuous: training does not change the text"


# -------------------------------------------------------------------- compiled by itself
def compiles(choice: str) -> tuple[list[bool], bool]:
    """Return whether generate would compile the forward of each token, as it does on GPUs where a cache is static; and
    whether the text is that of one process.
    """
    would = []
    plain, model = llama(), llama()
    decides = type(model)._valid_auto_compile_criteria

    def decide(self: Any, *args: Any) -> bool:
        would.append(decides(self, *args))
        return False  # compiling takes long

    ids = prompts(0)
    compiler = CompileConfig(backend="eager")
    compiler._compile_all_devices = True
    settings = GenerationConfig(cache_implementation="static", compile_config=compiler, max_new_tokens=3)
    type(model)._valid_auto_compile_criteria = decide
    expected = plain.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    assert any(would), "vacuous: it does not compile one process either"
    would.clear()
    sharded(model, choice)
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    assert settings.disable_compile is not True, "the caller's own"
    return would, bool(torch.equal(found, expected))


@pytest.mark.parametrize("choice", ["once", "stream"])
def test_streamed_weights_are_in_no_graph(choice: str) -> None:
    """Compiled forwards record CUDA graphs, with the addresses of weights, which move where they are streamed."""
    for would, same in run_ranks(compiles, 2, choice):
        assert would and set(would) == {choice == "once"} and same
