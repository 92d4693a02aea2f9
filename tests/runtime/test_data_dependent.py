"""Models whose data decide which layers a rank uses, at stage 3: the weights of one process that has the data of all.

Random uses of single layers are in tests/distributed/test_operation_order.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
import transformers as hf
from torch import nn

import hf_zero
from hf_zero.sharding.unit import UnitState
from tests.harness.ranks import run_ranks
from tests.hf.architectures import ARCHITECTURES

STEPS, WIDTH, VOCAB = 4, 8, 90
PREFETCH = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 10**9}
NO_PREFETCH = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
ON_HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}

# A forward on the data of a rank: (what is called, the module itself, step, rank) -> loss
Loss = Callable[[Any, Any, int, int], torch.Tensor]


def numbers(step: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def words(step: int, rank: int) -> torch.Tensor:
    return torch.randint(6, VOCAB, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


# ---------------------------------------------------------------- plain models
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Chooser(nn.Module):
    """Runs the blocks that it is told to; `exits` adds a term of the loss after each of the first ones, and `reads` a
    term for the weights of a block."""

    _no_split_modules = ("Block",)

    def __init__(self, *, checkpoints: bool = False, freezes: int = 0) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(WIDTH, 3)
        self.checkpoints = checkpoints
        for block in self.blocks[:freezes]:
            block.requires_grad_(False)

    def forward(self, x: torch.Tensor, blocks: list[int], exits: int = 0, reads: Sequence[int] = ()) -> torch.Tensor:
        loss = x.new_zeros(())
        for place, index in enumerate(blocks):
            block = self.blocks[index]
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if place < exits:
                loss = loss + self.head(x).square().mean()
        for index in reads:
            loss = loss + 0.01 * self.blocks[index].up.weight.square().sum()
        return loss + self.head(x).square().mean()


class Experts(nn.Module):
    """A layer of experts in a ModuleList, of which each runs on the rows that were routed to it."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.experts, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out = x
        for number, expert in enumerate(self.experts):
            rows = (routes == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        loss: torch.Tensor = self.head(self.last(out)).square().mean()
        return loss


def chosen(
    blocks: Callable[[int, int], list[int]],
    exits: Callable[[int, int], int] = lambda step, rank: 0,
    reads: Callable[[int, int], Sequence[int]] = lambda step, rank: (),
) -> Loss:
    def loss(run: Any, net: Any, step: int, rank: int) -> torch.Tensor:
        inputs = numbers(step, rank, 3, WIDTH), blocks(step, rank), exits(step, rank), reads(step, rank)
        value: torch.Tensor = run(*inputs)
        return value

    return loss


def routed(routes: Callable[[int, int], list[int]]) -> Loss:
    def loss(run: Any, net: Any, step: int, rank: int) -> torch.Tensor:
        value: torch.Tensor = run(numbers(step, rank, 4, WIDTH), torch.tensor(routes(step, rank)))
        return value

    return loss


# ---------------------------------------------------------------- models of transformers
def llava() -> Any:
    model: Any = ARCHITECTURES["llava"].make()
    return model


def qwen2_vl() -> Any:
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "mlp_ratio": 2, "patch_size": 4}
    config = hf.Qwen2VLConfig(
        text_config={**text, "vocab_size": 97, "num_key_value_heads": 1, "rope_parameters": rope},
        vision_config={**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=5,
        vision_start_token_id=3,
        vision_end_token_id=4,
        video_token_id=2,
    )
    return hf.Qwen2VLForConditionalGeneration(config)


def opt() -> Any:
    sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = hf.OPTConfig(
        vocab_size=97, max_position_embeddings=32, word_embed_proj_dim=16, layerdrop=0.5, dropout=0.0, **sizes
    )
    return hf.OPTForCausalLM(config)


def experts_of(name: str) -> Any:
    model: Any = ARCHITECTURES[name].make()
    model.set_experts_implementation("eager")  # the others know no fp64
    return model


def with_images(images: Callable[[int, int], int]) -> Loss:
    """LLaVA with so many images; each has four patches."""

    def loss(run: Any, net: Any, step: int, rank: int) -> torch.Tensor:
        tokens, count = words(step, rank), images(step, rank)
        inputs: dict[str, Any] = {}
        if count:
            tokens[0, : 4 * count] = 5
            inputs["pixel_values"] = numbers(step, rank, count, 3, 16, 16)
        value: torch.Tensor = run(input_ids=tokens, labels=tokens, **inputs).loss
        return value

    return loss


def with_calls_of_the_tower(calls: Callable[[int, int], int]) -> Loss:
    """Qwen2-VL with an image; more calls of the vision tower add to the loss."""

    def loss(run: Any, net: Any, step: int, rank: int) -> torch.Tensor:
        tokens, count = words(step, rank), calls(step, rank)
        inputs: dict[str, Any] = {}
        if count:
            inputs["pixel_values"] = numbers(step, rank, 16 * count, 3 * 2 * 4 * 4)
            inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * count)
            for row in range(count):
                tokens[row, 0], tokens[row, 1:5], tokens[row, 5] = 3, 5, 4
            inputs["mm_token_type_ids"] = (tokens == 5).int()
        value: torch.Tensor = run(input_ids=tokens, labels=tokens, **inputs).loss
        return value

    return loss


def dropping_layers(run: Any, net: Any, step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)  # LayerDrop draws from torch's generator
    return tokens_alone(run, net, step, rank)


def tokens_alone(run: Any, net: Any, step: int, rank: int) -> torch.Tensor:
    tokens = words(step, rank)
    value: torch.Tensor = run(input_ids=tokens, labels=tokens).loss
    return value


FORWARDS = [0, 1, 2, 3, 4, 5]
CASES: dict[str, tuple[Callable[[], Any], Loss]] = {
    "a rank skips": (Chooser, chosen(lambda step, rank: FORWARDS if rank == 0 else [0, 2, 3, 5])),
    "a rank skips late": (Chooser, chosen(lambda step, rank: FORWARDS if rank == 0 or step < 2 else [1, 2, 4])),
    "a rank needs more late": (
        Chooser,
        chosen(lambda step, rank: [0, 1, 2] if rank == 0 or step < 2 else [0, 3, 5, 2]),
    ),
    "disjoint": (Chooser, chosen(lambda step, rank: [0, 1] if rank == 0 else [4, 3])),
    "other orders": (Chooser, chosen(lambda step, rank: FORWARDS[:: (1, -1)[rank % 2]])),
    "early exit": (Chooser, chosen(lambda step, rank: FORWARDS[: 6 - 2 * ((rank + step) % 3)])),
    "a shared block": (Chooser, chosen(lambda step, rank: [0] + [1] * (1 + (rank + step) % 3) + [2])),
    "terms of the loss": (Chooser, chosen(lambda step, rank: FORWARDS, lambda step, rank: (rank + step) % 4)),
    "weights that are read": (
        Chooser,
        chosen(lambda step, rank: FORWARDS[rank:], reads=lambda step, rank: [rank, (rank + step) % 5]),
    ),
    "weights that are read late": (
        Chooser,
        chosen(lambda step, rank: FORWARDS[2:4], reads=lambda step, rank: [0, 5 - rank] if step > 1 else [0]),
    ),
    "all change": (Chooser, chosen(lambda step, rank: FORWARDS[step:] if step % 2 else FORWARDS[:3])),
    "recomputed": (
        functools.partial(Chooser, checkpoints=True),
        chosen(lambda step, rank: FORWARDS if (rank + step) % 2 else [4, 1, 1, 5]),
    ),
    "a frozen tower": (
        functools.partial(Chooser, freezes=3),
        chosen(lambda step, rank: FORWARDS if (rank + step) % 2 else FORWARDS[3:]),
    ),
    "overlapping experts": (Experts, routed(lambda step, rank: [rank, 1, 2, (rank + step) % 4])),
    "disjoint experts": (Experts, routed(lambda step, rank: [rank] * 4)),
    "no experts": (Experts, routed(lambda step, rank: [9] * 4 if rank == step % 2 else [3, 0, 0, 9])),
    "llava": (llava, with_images(lambda step, rank: int(rank == 0))),
    "llava, images of all kinds": (llava, with_images(lambda step, rank: (step + rank) % 3)),
    "qwen2-vl": (qwen2_vl, with_calls_of_the_tower(lambda step, rank: (step + rank) % 3)),
    "opt": (opt, dropping_layers),
    "mixtral": (functools.partial(experts_of, "mixtral"), tokens_alone),
    "qwen3 moe": (functools.partial(experts_of, "qwen3 moe"), tokens_alone),
}
# Models of transformers compute in fp32 here and there, where a last digit of fp64 decides how a number is rounded.
PARTLY_IN_FP32 = {"llava", "llava, images of all kinds", "qwen2-vl", "opt", "mixtral", "qwen3 moe"}
SLOW = {
    name for name in CASES if name not in ("a rank skips late", "a rank needs more late", "disjoint experts", "llava")
}


def build(name: str) -> Any:
    torch.manual_seed(3)
    return CASES[name][0]().double().train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def one_process(name: str, world: int, accumulation: int) -> dict[str, torch.Tensor]:
    model, loss = build(name), CASES[name][1]
    start = copy.deepcopy(model.state_dict())
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(world):
                (loss(model, model, step * accumulation + micro, rank) / world / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not all(torch.equal(value, start[key]) for key, value in model.state_dict().items())
    return {key: value.detach() for key, value in model.named_parameters()}


def sharded(name: str, stage: int, accumulation: int, zero: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """The weights, and the sum of losses of an evaluation of the same kind."""
    model, loss = build(name), CASES[name][1]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "desync_timeout": 30,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    engine = hf_zero.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    total = 0.0
    for step in range(STEPS * accumulation):
        engine.backward(loss(engine, engine.module, step, engine.rank))
        engine.step()
    with torch.no_grad():
        for step in range(3):
            total += loss(engine, engine.module, step, engine.rank).item()
    assert stage < 3 or engine.params.live.numel == 0
    weights = engine.full_state_dict(keep=True)
    assert weights is not None
    return weights, total


def check(name: str, world: int, stage: int, accumulation: int, zero: dict[str, Any]) -> None:
    want = one_process(name, world, accumulation)
    plain = build(name)
    plain.load_state_dict(want, strict=False)
    most = 1e-6 if name in PARTLY_IN_FP32 else 1e-9
    for rank, (weights, total) in enumerate(run_ranks(sharded, world, name, stage, accumulation, zero)):
        for key, value in want.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=most, msg=f"{name}, rank {rank}: {key}")
        with torch.no_grad():
            expected = sum(CASES[name][1](plain, plain, step, rank).item() for step in range(3))
        assert total == pytest.approx(expected, rel=most)


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in CASES])
def test_stage_3_on_two_ranks(name: str) -> None:
    check(name, 2, 3, 1, PREFETCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("world", "accumulation", "zero"), [(3, 2, NO_PREFETCH), (2, 2, {**ON_HOST, **PREFETCH}), (3, 1, PREFETCH)]
)
def test_stage_3(name: str, world: int, accumulation: int, zero: dict[str, Any]) -> None:
    check(name, world, 3, accumulation, zero)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["disjoint experts", "llava", "opt"])
def test_whole_parameters(name: str, stage: int) -> None:
    check(name, 3, stage, 2, {})


# ---------------------------------------------------------------- what it costs
def start(make: Callable[[], Any], zero: dict[str, Any]) -> Any:
    """An engine at stage 3 that trains what `make` makes, in fp64."""
    torch.manual_seed(3)
    model = make().double()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    return hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]


def gathers_of(blocks_of_step: list[list[list[int]]]) -> list[int]:
    """The all-gathers of each step, whose blocks are given by rank."""
    engine = start(Chooser, NO_PREFETCH)
    counts = []
    for step, by_rank in enumerate(blocks_of_step):
        before = engine.comm.counts["all_gather"].calls
        engine.backward(engine(numbers(step, dist.get_rank(), 3, WIDTH), by_rank[dist.get_rank()]))
        engine.step()
        counts.append(engine.comm.counts["all_gather"].calls - before)
    return counts


def test_nothing_is_gathered_that_no_rank_needs() -> None:
    """A unit is gathered once in forward and once in backward for all ranks that use it, and the root once."""
    text, image = [4, 5], [0, 1, 2, 3, 4, 5]
    steps = [[text, text], [text, text], [text, image], [text, image], [text, text], [image, image]]
    first, *others = run_ranks(gathers_of, 2, steps)
    assert others == [first]
    same, different, only_text, only_images = (
        1 + 2 * len(text),
        1 + 2 * len(image),
        1 + 2 * len(text),
        1 + 2 * len(image),
    )
    # The rank with the image first goes through the order that it expected of the other one: its text layers, once.
    assert first == [same, same, different + len(text), different, only_text, only_images]


def bytes_of(images: list[int]) -> list[int]:
    """The bytes that each step of LLaVA gathers and reduces, with so many images on rank 0 and none on the others."""
    engine = start(llava, PREFETCH)
    loss = with_images(lambda step, rank: images[step] if rank == 0 else 0)
    sizes = []
    for step in range(len(images)):
        before = sum(engine.comm.counts[name].nbytes for name in ("all_gather", "reduce_scatter"))
        engine.backward(loss(engine, engine.module, step, dist.get_rank()))
        engine.step()
        sizes.append(sum(engine.comm.counts[name].nbytes for name in ("all_gather", "reduce_scatter")) - before)
    return sizes


def test_text_gathers_nothing_of_the_image_tower() -> None:
    """A leaf module of DeepSpeed is gathered in every pass of every rank, as here where each batch has an image."""
    tower = sum(param.numel() for param in llava().model.vision_tower.parameters())
    as_leaf = set(run_ranks(bytes_of, 2, [1] * 6)[0])
    for sizes in run_ranks(bytes_of, 2, [0, 0, 0, 1, 0, 1, 0, 1]):
        text, images = set(sizes[4::2]), set(sizes[3::2])
        assert images == as_leaf and max(text) < min(images) - 8 * tower
        # One gather of a text step is for a tower that was expected, as in the step before.
        assert sum(sizes[-4:]) / 4 < 0.88 * max(as_leaf)


def gathers_beside_work(zero: dict[str, Any]) -> list[int]:
    """Return for each step how many blocks run beside a gather; rank 1 leaves out the first four blocks."""
    engine = start(Chooser, zero)
    blocks = [[0, 1, 2, 3, 4, 5], [4, 5]][dist.get_rank()]
    counts = [0] * 4
    for step in range(len(counts)):

        def count(*_: Any, step: int = step) -> None:
            counts[step] += any(unit.state is UnitState.UNSHARDING for unit in engine.params.units)

        hooks = [block.register_forward_pre_hook(count) for block in engine.module.blocks]
        engine.backward(engine(numbers(step, dist.get_rank(), 3, WIDTH), blocks))
        engine.step()
        for hook in hooks:
            hook.remove()
    return counts


def test_gathers_run_beside_the_work_of_ranks_that_differ() -> None:
    """Each rank expects, from the second step on, what it used in the last one; nothing follows the last block."""
    assert run_ranks(gathers_beside_work, 2, PREFETCH) == [[0, 5, 5, 5], [0, 1, 1, 1]]
    assert run_ranks(gathers_beside_work, 2, NO_PREFETCH) == [[0] * 4] * 2


def part_on_one_rank() -> None:
    model = hf_zero.shard(
        Chooser().double(),
        config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **NO_PREFETCH}},
    )
    with hf_zero.gathered_params(model.head), torch.no_grad():
        if dist.get_rank() == 0:
            model.head(numbers(0, 0, 3, WIDTH))
    with torch.no_grad():
        model(numbers(0, 0, 3, WIDTH), [0, 1])


def test_one_rank_may_call_a_part_without_layers() -> None:
    run_ranks(part_on_one_rank, 2)
