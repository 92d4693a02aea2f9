"""The most memory that a rank takes while a model is loaded, or constructed, in shards: its share and little more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_zero
from tests.harness.memory import anonymous_bytes
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow
ZERO = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
LAYERS, WIDTH, VOCABULARY = 12, 640, 8192
_SLACK = 24 << 20  # Python's objects, and what the allocator has not given back


def config() -> LlamaConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    return LlamaConfig(**sizes, num_attention_heads=8, vocab_size=VOCABULARY, tie_word_embeddings=False)


def peak_of(work: Callable[[], object]) -> int:
    """Highest anonymous memory of this process during `work`, over what it had before."""
    before, highest, ended = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.is_set():
            highest[0] = max(highest[0], anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=look)
    watcher.start()
    kept = work()
    ended.set()
    watcher.join()
    del kept
    return max(highest[0], anonymous_bytes()) - before


def warm(folder: str) -> None:
    """Load once: the memory of what a first load imports is not the model's."""
    small = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    if torch.distributed.get_rank() == 0:
        LlamaForCausalLM(small).save_pretrained(f"{folder}/small")
    torch.distributed.barrier()
    hf_zero.enable(ZERO)
    AutoModelForCausalLM.from_pretrained(f"{folder}/small", dtype=torch.float32)
    hf_zero.disable()


def load(folder: str) -> int:
    warm(folder)
    hf_zero.enable(ZERO)
    return peak_of(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_takes_its_share_and_the_largest_tensor(world: int, tmp_path: Path) -> None:
    model = LlamaForCausalLM(config())
    sizes = [param.nbytes for param in model.parameters()]
    model.save_pretrained(tmp_path)
    del model
    bound = sum(sizes) / world + 2 * max(sizes) + _SLACK
    assert 0.9 * sum(sizes) > bound, "vacuous: a whole model would fit"
    peaks = run_ranks(load, world, str(tmp_path))
    assert sum(sizes) / world * 0.9 < min(peaks), "vacuous: the shards are not seen"
    assert max(peaks) <= bound, (peaks, bound)


class Block(nn.Module):
    """A decoder layer as far as its parameters go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})
        self.norm = nn.LayerNorm(width)


class Stack(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])


def construct(threshold: int) -> int:
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    init = hf_zero.zero.Init(config_dict_or_path={"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1})
    with init:
        Stack(8, 1)  # what a first construction imports is no memory of a model

    def build() -> Stack:
        with init:
            return Stack(1024, LAYERS)

    return peak_of(build)


@pytest.mark.parametrize("threshold", [0, 100_000])  # with the second, biases and norms stay unsharded
def test_a_model_under_construction_takes_its_share_and_the_largest_module(threshold: int) -> None:
    sizes = [sum(param.nbytes for param in block.parameters()) for block in Stack(1024, LAYERS).layers]
    bound = sum(sizes) / 2 + 2 * max(sizes) + _SLACK
    assert 0.9 * sum(sizes) > bound, "vacuous: a whole model would fit"
    peaks = run_ranks(construct, 2, threshold)
    assert sum(sizes) / 2 * 0.9 < min(peaks), "vacuous: the shards are not seen"
    assert max(peaks) <= bound, (peaks, bound)
