"""PipelineModule: what a stage builds and how it names it, stage after stage against one nn.Sequential."""

from __future__ import annotations

import copy
import logging
import random
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block as GPT2BlockBase

from hf_zero.errors import ConfigError, StateError
from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.topology import PipeDataParallelTopology

WIDTH, WORDS = 6, 11


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


def to_words(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.T


def stages_of(layers: Any, num_stages: int, virtual_stages: int = 1, **options: Any) -> list[PipelineModule]:
    """Every stage, each of its own copy of the layers, as processes have them."""
    made = []
    for stage in range(num_stages):
        torch.manual_seed(3)
        options_of_one = {"virtual_stages": virtual_stages, **options}
        made.append(PipelineModule(copy.deepcopy(layers), num_stages, stage=stage, **options_of_one))
    return made


def run(stages: list[PipelineModule], inputs: Any, micro_offset: int = 0) -> Any:
    for chunk in range(stages[0].virtual_stages):
        for stage in stages:
            stage.micro_offset = micro_offset
            inputs = stage(inputs, chunk=chunk)
    return inputs


def sequential() -> nn.Sequential:
    """Build layers with all kinds of sharing: a module given twice, a parameter shared by modules of two kinds."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, WORDS))
    layers[3] = layers[1]
    layers[5].weight = layers[0].weight
    return layers


@pytest.mark.parametrize(("num_stages", "virtual_stages"), [(1, 1), (2, 1), (4, 1), (6, 1), (2, 2), (2, 3)])
def test_stages_in_a_row_are_the_sequential(num_stages: int, virtual_stages: int) -> None:
    whole, ids = sequential(), torch.randint(WORDS, (2, 3), generator=torch.Generator().manual_seed(1))
    stages = stages_of(whole, num_stages, virtual_stages, partition_method="uniform")
    want, got = whole(ids), run(stages, ids)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    got.sum().backward()
    want.sum().backward()
    # The names of all stages together are the Sequential's; gradients of the copies of a tie add up to its own.
    grads: dict[str, Any] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            grads[name] = grads.get(name, 0) + param.grad
    assert set(grads) == dict(whole.named_parameters()).keys()
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)
    assert set().union(*(stage.state_dict() for stage in stages)) == set(whole.state_dict())


def test_ties_are_known_on_all_stages_by_their_first_names() -> None:
    stages = stages_of(sequential(), 3, partition_method="uniform")
    assert stages[0].parts == [0, 2, 4, 6]
    assert [stage.chunk_layers(0) for stage in stages] == [[0, 1], [2, 3], [4, 5]]
    want = [("0.weight", [0, 2]), ("1.inner.weight", [0, 1]), ("1.inner.bias", [0, 1])]
    for stage in stages:
        assert [(tie.name, tie.stages) for tie in stage.ties] == want
        own = dict(stage.named_parameters())
        assert all((tie.param is not None) == (stage.stage_id in tie.stages) for tie in stage.ties)
        assert all(tie.param is own[tie.name] for tie in stage.ties if tie.param is not None)
    assert list(dict(stages[2].named_parameters())) == [
        "0.weight",
        "4.inner.weight",
        "4.inner.bias",
        "5.bias",
    ]
    # Under the name of its own layer too, as in the Sequential.
    assert stages[2].state_dict()["5.weight"].data_ptr() == stages[2].state_dict()["0.weight"].data_ptr()
    assert stages[0].canonical_names["5.weight"] == "0.weight"
    assert stages[0].canonical_names["3.inner.bias"] == "1.inner.bias"
    assert stages[0].canonical_names["4.inner.bias"] == "4.inner.bias"
    assert stages_of(sequential(), 1)[0].ties == []


def specs(dropout: float = 0.0) -> list[Any]:
    return [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH),
        *[LayerSpec(Block, WIDTH, dropout=dropout) for _ in range(3)],
        torch.relu,
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=to_words),
    ]


def test_specs_are_built_where_they_run_and_alike_for_any_number_of_stages() -> None:
    (one,) = stages_of(specs(), 1)
    ids = torch.tensor([[1, 2, 3]])
    want = one(ids)
    assert want.shape == (1, 3, WORDS)
    for num_stages in (2, 3, 6):
        stages = stages_of(specs(), num_stages, partition_method="uniform")
        torch.testing.assert_close(run(stages, ids), want, rtol=0, atol=0)
        for index, stage in enumerate(stages):
            layers = stage.chunk_layers(0)
            built = {int(name.partition(".")[0]) for name in stage.state_dict()}
            assert built == {i for i in layers if i != 4} | ({0} if 5 in layers else set()), f"stage {index}"
    assert [(tie.name, tie.stages) for tie in stages[0].ties] == [("0.weight", [0, 5])]
    assert list(dict(stages[5].named_parameters())) == ["0.weight"]


def test_building_draws_alike_on_all_ranks() -> None:
    after = []
    for stage in range(3):
        torch.manual_seed(7)
        random.seed(7)
        PipelineModule(specs(), 3, stage=stage, seed_layers=stage == 1)
        after.append((torch.rand(()).item(), random.random()))
    assert after[0] == after[1] == after[2]
    torch.manual_seed(7)
    assert torch.rand(()).item() != after[0][0], "what follows is not what the first layer was made of"


def test_seeded_layers_are_built_with_the_base_seed_and_their_number() -> None:
    module = PipelineModule(specs(), 2, stage=1, partition_method="uniform", seed_layers=True, base_seed=50)
    torch.manual_seed(53)
    torch.testing.assert_close(module.get_parameter("3.inner.weight"), Block().inner.weight, rtol=0, atol=0)
    torch.manual_seed(50)
    torch.testing.assert_close(module.get_parameter("0.weight"), nn.Embedding(WORDS, WIDTH).weight, rtol=0, atol=0)
    seeds: list[int] = []
    module = PipelineModule(specs(), 2, stage=0, partition_method="uniform", seed_layers=True, seed_fn=seeds.append)
    module.micro_offset = 2
    module(torch.tensor([[1]]))
    assert seeds == [1234, 1235, 1236, 1234 * 3, 1234 * 3 + 1, 1234 * 3 + 2]


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_seeded_dropout_is_that_of_the_micro_batch_and_the_layer(interval: int) -> None:
    """Whatever the stages, the order of micro-batches and what is recomputed; other random numbers go on untouched."""
    ids, results = torch.tensor([[1, 2, 3]]), []
    for num_stages in (1, 3):
        options = {"seed_layers": True, "activation_checkpoint_interval": interval if num_stages > 1 else 0}
        stages = stages_of(specs(dropout=0.5), num_stages, partition_method="uniform", **options)
        for stage in stages:
            stage.train()
        torch.manual_seed(num_stages)
        before = torch.get_rng_state()
        order = [4, 5] if num_stages == 1 else [5, 4]
        outputs = {number: run(stages, ids, micro_offset=number) for number in order}
        assert torch.equal(torch.get_rng_state(), before)
        for number in sorted(outputs, reverse=num_stages > 1):
            outputs[number].square().sum().backward()
        grads = {}
        for stage in stages:
            for name, param in stage.named_parameters():
                grads[name] = grads.get(name, 0) + param.grad
        results.append((outputs[4], outputs[5], grads))
    (four, five, grads), (four_again, five_again, grads_again) = results
    assert not torch.equal(four, five), "vacuous: no dropout"
    torch.testing.assert_close((four_again, five_again), (four, five), rtol=0, atol=0)
    torch.testing.assert_close(grads_again, grads)


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x)


@pytest.mark.parametrize("function", [None, checkpoint])
def test_layers_are_recomputed_in_groups(function: Any) -> None:
    """Also by a reentrant function, whose first group has no input with a gradient."""

    def reentrant(run: Any, *inputs: Any) -> Any:
        return function(run, *inputs, use_reentrant=True)

    layers = [Counted(4, 4) for _ in range(5)] + [torch.tanh, nn.Linear(4, 2)]
    options = {} if function is None else {"activation_checkpoint_func": reentrant}
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    grads, calls = [], []
    for interval, names in ((0, None), (2, None), (2, ["Counted"])):
        module = PipelineModule(
            copy.deepcopy(layers),
            1,
            activation_checkpoint_interval=interval,
            checkpointable_layers=names,
            **(options if interval else {}),
        )
        Counted.calls = 0
        module(x).square().sum().backward()
        calls.append(Counted.calls)
        grads.append({name: param.grad for name, param in module.named_parameters()})
    # Groups of two: with the names only those whose two layers are Counted.
    assert calls == [5, 10, 9]
    assert set(grads[0]) == set(grads[1]) and all(grad is not None for grad in grads[1].values())
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)
    torch.testing.assert_close(grads[2], grads[0], rtol=0, atol=0)
    Counted.calls = 0
    with torch.no_grad():
        module(x)
    assert Counted.calls == 5


def test_tuples_pass_from_layer_to_layer_recomputed_or_not() -> None:
    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x * 2

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(pair[0]), pair[1]

    layers = [split, Pair(), lambda pair: pair[0] + pair[1]]
    x = torch.ones(1, 2)
    plain = PipelineModule(layers, 1)(x)
    again = PipelineModule(layers, 1, activation_checkpoint_interval=1)(x)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


class GPT2Preprocessing(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)


class GPT2Block(GPT2BlockBase):
    pass


class GPT2Postprocessing(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def test_gpt2_is_split_and_logged_as_in_the_document(caplog: pytest.LogCaptureFixture) -> None:
    """Golden values of DeepSpeed's log for `partition_method="type:GPT2Block"` on four ranks."""
    config = GPT2Config()
    with torch.device("meta"):
        blocks = [GPT2Block(config) for _ in range(12)]
        layers = nn.Sequential(GPT2Preprocessing(config), *blocks, GPT2Postprocessing(config))
    with caplog.at_level(logging.INFO, "hf_zero"):
        stages = [PipelineModule(layers, 4, partition_method="type:GPT2Block", stage=stage) for stage in range(4)]
    assert stages[0].parts == [0, 4, 7, 10, 14]
    held = [sum(param.numel() for param in stage.parameters()) for stage in stages]
    assert held == [60_647_424, 21_263_616, 21_263_616, 59_862_528] and sum(held) == 163_037_184
    lines = [record.getMessage() for record in caplog.records if "STAGE_PARAMS" in record.getMessage()]
    total = "TOTAL_PARAMS=163037184 (163.037M) UNIQUE_PARAMS=163037184 (163.037M)"
    assert lines == [
        f"RANK=0 STAGE=0 LAYERS=4 [0, 4) STAGE_PARAMS=60647424 (60.647M) {total}",
        f"RANK=1 STAGE=1 LAYERS=3 [4, 7) STAGE_PARAMS=21263616 (21.264M) {total}",
        f"RANK=2 STAGE=2 LAYERS=3 [7, 10) STAGE_PARAMS=21263616 (21.264M) {total}",
        f"RANK=3 STAGE=3 LAYERS=4 [10, 14) STAGE_PARAMS=59862528 (59.863M) {total}",
    ]


def test_tied_parameters_are_counted_once_as_unique() -> None:
    (line, _) = stages_of(specs(), 2)[0].stage_lines()
    tied, block = WORDS * WIDTH, WIDTH * WIDTH + WIDTH
    assert re.search(rf"TOTAL_PARAMS={2 * tied + 3 * block} .* UNIQUE_PARAMS={tied + 3 * block} ", line)


def test_the_slow_layer_gets_a_stage_of_its_own_by_profile() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = super().forward(x)
            return x

    layers = [nn.Embedding(WORDS, 4), nn.Linear(4, 4), Slow(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    module = PipelineModule(layers, 3, partition_method="profile", stage=1)
    assert module.parts[1:3] == [2, 3]
    assert all(param.grad is None for param in module.parameters())
    with pytest.raises(ConfigError, match=r"not known what the first layer takes.*profile_inputs="):
        PipelineModule([torch.relu, *layers[1:]], 3, partition_method="profile", stage=0)
    with pytest.raises(ConfigError, match=r'"profile": layer 1 raised RuntimeError.*what layer 0 returns'):
        PipelineModule(
            [torch.relu, nn.Linear(4, 4)], 2, partition_method="profile", stage=0, profile_inputs=torch.ones(1, 3)
        )


def test_layers_are_split_as_listed() -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(14)))
    for stage, begins in enumerate((0, 4, 7, 10)):
        module = PipelineModule(layers, 4, partition_method=[4, 3, 3, 4], stage=stage)
        assert module.parts == [0, 4, 7, 10, 14] and module.chunk_layers(0)[0] == begins
    chunks = PipelineModule(layers, 2, partition_method=(1, 2, 3, 8), virtual_stages=2, stage=1)
    assert [len(chunks.chunk_layers(chunk)) for chunk in range(2)] == [2, 8]
    for wrong, said in {
        (4, 3, 3): r"3 parts, 10 layers: expected 4 numbers, .* the 14 layers",
        (4, 3, 3, 5): "4 parts, 15 layers",
        (7, 0, 3, 4): "0 is no number of layers",
        (4, 3, 3, 4.0): "4.0 is no number of layers",
    }.items():
        with pytest.raises(ConfigError, match=said):
            PipelineModule(layers, 4, partition_method=wrong, stage=0)


def test_without_stages_it_is_built_later() -> None:
    module = PipelineModule(specs(), virtual_stages=2)
    assert not module.is_built and not list(module.parameters())
    with pytest.raises(StateError, match=r'give num_stages=.*"pipeline": \{"stages": ...\}'):
        module(torch.tensor([[1]]))
    module.build(3, stage=1, partition_method="uniform")
    assert module.is_built and module.chunk_layers(1) == [4]
    with pytest.raises(StateError, match="has its 3 stages already"):
        module.build(3, stage=1)


def test_a_loss_with_parameters_is_the_last_stages() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    first, last = stages_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), 2, loss_fn=weighted)
    assert first.loss_fn is weighted and last.loss_fn is weighted
    assert [name for name, _ in last.named_buffers()] == ["loss_module.weight"] and not list(first.buffers())


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("width")


LINEAR = [nn.Linear(2, 2), nn.Linear(2, 2)]


@pytest.mark.parametrize(
    ("layers", "options", "problem"),
    [
        (LINEAR, {"num_stages": 3}, "has 2 layers for 3 stages: stage 2 would have none. Use at most 2 stages"),
        (LINEAR, {"num_stages": 2, "virtual_stages": 2}, "2 layers for 2 stages with 2 chunks each"),
        (LINEAR, {"num_stages": 0}, "num_stages=0: expected the number of stages"),
        (LINEAR, {"num_stages": 2, "virtual_stages": 0}, "virtual_stages=0"),
        (LINEAR, {"num_stages": 2, "stage": None}, "does not divide the number of processes, 1"),
        (LINEAR, {"topology": PipeDataParallelTopology(1, 1), "num_stages": 2}, "the topology has 1 stages"),
        (LINEAR, {"num_stages": 2, "stage": 2}, "stage=2: there are 2 stages"),
        (LINEAR, {"num_stages": 1, "partition_method": "best"}, "='best': no method has this name: expected"),
        (LINEAR, {"num_stages": 1, "partition_method": "type:Conv"}, "matches no layer: their classes are Linear"),
        (LINEAR, {"num_stages": 1, "activation_checkpoint_interval": -1}, "activation_checkpoint_interval=-1"),
        ([nn.Linear(2, 2), "relu"], {"num_stages": 1}, r"layer 1 is 'relu' \(str\): expected a module, a function"),
        ([nn.ReLU], {"num_stages": 1}, r"layer 0 is the class ReLU.*Write ReLU\(...\) or LayerSpec\(ReLU, ...\)"),
        ([LayerSpec(Wrong)], {"num_stages": 1}, r"layer 0, LayerSpec\(Wrong\), cannot be built: KeyError: 'width'"),
        ([], {"num_stages": 1}, "has 0 layers for 1 stages"),
        (
            [TiedLayerSpec("w", nn.Linear, 2, 2), TiedLayerSpec("w", nn.Linear, 2, 3)],
            {"num_stages": 1},
            r"TiedLayerSpec\('w'\) is Linear .* at layer 0, and Linear with .*\(3, 2\).* at layer 1: .*one module",
        ),
        (
            [TiedLayerSpec("w", nn.Linear, 2, 2), TiedLayerSpec("w", nn.Embedding, 2, 2)],
            {"num_stages": 1},
            "Linear with .* at layer 0, and Embedding",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(layers: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PipelineModule(layers, **{"stage": 0, **options})


def test_a_spec_that_is_no_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is no class of torch.nn.Module.*functions are layers as they are"):
        LayerSpec(torch.relu)  # type: ignore[arg-type]
