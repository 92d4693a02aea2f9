"""The layout: which element of which parameter lies where on which rank."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hf_zero.layout import ALIGN, UnitLayout

SHAPES = {
    "weight": (11, 13),
    "scalar": (),
    "one": (1,),
    "empty": (0, 5),
    "bias": (13,),
    "kernel": (3, 5, 7, 1),
}
WORLDS = (1, 2, 3, 4, 7)
BUCKETS = (None, 1, 3, 16, 100, 1 << 20)


def build(world: int, bucket: int | None = None, shapes: dict[str, tuple[int, ...]] | None = None) -> UnitLayout:
    shapes = SHAPES if shapes is None else shapes
    return UnitLayout.build(
        "unit/float32", shapes, dtype="float32", trainable=True, world_size=world, max_bucket_numel=bucket
    )


@pytest.fixture(params=itertools.product(WORLDS, BUCKETS), ids=lambda pair: f"world{pair[0]}-bucket{pair[1]}")
def layout(request: pytest.FixtureRequest) -> UnitLayout:
    return build(*request.param)


def test_parameters_lie_behind_each_other_and_aligned(layout: UnitLayout) -> None:
    end = 0
    for (name, shape), slot in zip(SHAPES.items(), layout.slots, strict=True):
        assert (slot.name, slot.shape, slot.numel) == (name, shape, math.prod(shape))
        assert slot.offset % ALIGN == 0
        assert 0 <= slot.offset - end < ALIGN
        end = slot.end
    assert 0 <= layout.padded_numel - end < ALIGN * layout.world_size
    assert layout.padded_numel % (layout.world_size * ALIGN) == 0
    assert layout.numel == sum(math.prod(shape) for shape in SHAPES.values())


def test_buckets_tile_the_buffer_and_split_evenly(layout: UnitLayout) -> None:
    position = 0
    for start, numel in layout.buckets():
        assert start == position and numel > 0 and numel % layout.world_size == 0
        position += numel
    assert position == layout.padded_numel
    assert len(list(layout.buckets())) == layout.num_buckets


@pytest.mark.parametrize("bucket", [None, 100, 200, 1 << 20])
@pytest.mark.parametrize("world", [1, 2, 3, 6, 7, 12])
def test_every_part_of_every_rank_starts_aligned(world: int, bucket: int | None) -> None:
    """Each part starts aligned in the flat parameter and in the shard; 100 elements are as many as one aligned part
    for each of 12 ranks.
    """
    layout = build(world, bucket)
    for rank in range(world):
        ranges = layout.shard_range(rank)
        assert all(start % ALIGN == end % ALIGN == 0 for start, end in ranges), (rank, ranges)
    assert layout.bucket_numel % (world * ALIGN) == 0 or layout.num_buckets == 0


@pytest.mark.parametrize(("world", "limit"), [(1, 3), (2, 16), (3, 16), (3, 100), (7, 100), (4, 1)])
def test_a_bucket_is_within_its_limit(world: int, limit: int) -> None:
    layout = build(world, limit)
    assert layout.bucket_numel <= max(limit, world)
    assert layout.num_buckets > 1


def test_shards_tile_the_buffer(layout: UnitLayout) -> None:
    owner = [-1] * layout.padded_numel
    for rank in range(layout.world_size):
        ranges = layout.shard_range(rank)
        assert sum(end - start for start, end in ranges) == layout.shard_numel
        for start, end in ranges:
            assert owner[start:end] == [-1] * (end - start), "an element has two owners"
            owner[start:end] = [rank] * (end - start)
    assert -1 not in owner


def test_a_collective_needs_no_copy(layout: UnitLayout) -> None:
    """Rank r owns the r-th part of every bucket, and these parts are one behind the other in its shard."""
    for rank in range(layout.world_size):
        for (start, numel), (low, high) in zip(layout.buckets(), layout.shard_range(rank), strict=True):
            part = numel // layout.world_size
            assert (low, high) == (start + rank * part, start + (rank + 1) * part)


def test_pieces_say_where_every_element_is(layout: UnitLayout) -> None:
    found: dict[tuple[str, int], int] = {}
    for rank in range(layout.world_size):
        # shard offset -> flat offset, from the ranges alone
        flat_of = [i for start, end in layout.shard_range(rank) for i in range(start, end)]
        previous_end = 0
        for piece in layout.pieces(rank):
            assert piece.numel > 0 and piece.shard_offset >= previous_end
            previous_end = piece.shard_offset + piece.numel
            slot = layout.slot(piece.name)
            assert piece.flat_offset == slot.offset + piece.start and piece.end <= slot.numel
            expected = list(range(piece.flat_offset, piece.flat_offset + piece.numel))
            assert flat_of[piece.shard_offset : piece.shard_offset + piece.numel] == expected
            for element in range(piece.start, piece.end):
                assert found.setdefault((piece.name, element), rank) == rank, "an element has two owners"
    assert len(found) == layout.numel


def test_a_run_is_contiguous_in_the_shard(layout: UnitLayout) -> None:
    for rank in range(layout.world_size):
        runs = layout.slices(rank)
        assert len({run.name for run in runs}) == len(runs)
        assert [piece for run in runs for piece in run.pieces] == layout.pieces(rank)
        for run in runs:
            position = run.shard_offset
            for piece in run.pieces:
                assert piece.shard_offset == position
                position += piece.numel
            assert position == run.shard_offset + run.numel
            assert run.is_unsharded == (run.numel == math.prod(SHAPES[run.name]))


def test_locate_agrees_with_pieces(layout: UnitLayout) -> None:
    random.seed(0)
    places = {
        (piece.name, piece.start + i): (rank, piece.shard_offset + i, piece.flat_offset + i)
        for rank in range(layout.world_size)
        for piece in layout.pieces(rank)
        for i in range(piece.numel)
    }
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        cuts = [(0, None), (0, 0)] + [tuple(sorted(random.choices(range(numel + 1), k=2))) for _ in range(5)]
        for start, end in cuts:
            position = start
            for owned in layout.locate(name, start, end):
                assert owned.piece.start == position and owned.piece.name == name
                for i in range(owned.piece.numel):
                    place = (owned.rank, owned.piece.shard_offset + i, owned.piece.flat_offset + i)
                    assert places[(name, position + i)] == place
                position = owned.piece.end
            assert position == (numel if end is None else end)


def test_a_layout_survives_its_file(layout: UnitLayout) -> None:
    again = UnitLayout.from_json(layout.to_json())
    assert again == layout and again.digest() == layout.digest()
    assert again.pieces(layout.world_size - 1) == layout.pieces(layout.world_size - 1)


def test_the_digest_tells_layouts_apart() -> None:
    reordered = dict(reversed(SHAPES.items()))
    reshaped = {**SHAPES, "weight": (13, 11)}
    renamed = {("other" if name == "bias" else name): shape for name, shape in SHAPES.items()}
    layouts = [
        build(2),
        build(3),
        build(2, 16),
        *(build(2, None, shapes) for shapes in (reordered, reshaped, renamed)),
    ]
    frozen = UnitLayout.build("unit/float32", SHAPES, dtype="float32", trainable=False, world_size=2)
    half = UnitLayout.build("unit/float32", SHAPES, dtype="bfloat16", trainable=True, world_size=2)
    assert len({layout.digest() for layout in [*layouts, frozen, half]}) == 8
    assert build(2).digest() == build(2).digest()


def test_a_unit_without_elements() -> None:
    for shapes in ({}, {"empty": (0,)}):
        layout = build(2, None, shapes)
        assert (layout.padded_numel, layout.shard_numel, layout.num_buckets) == (0, 0, 0)
        assert layout.pieces(0) == layout.pieces(1) == [] and layout.shard_range(1) == []


def test_more_ranks_than_elements() -> None:
    layout = build(7, None, {"one": (1,)})
    assert [len(layout.pieces(rank)) for rank in range(7)] == [1, 0, 0, 0, 0, 0, 0]
    assert layout.shard_numel == ALIGN


def test_layouts_of_earlier_files_are_read() -> None:
    """Their parts were not aligned."""
    data = build(3).to_json()
    end = build(3).slots[-1].end
    old = UnitLayout.from_json({**data, "padded_numel": end + -end % 3, "bucket_numel": end + -end % 3})
    assert old.shard_numel % ALIGN and old.shard_numel < build(3).shard_numel
    owned = sum(piece.numel for rank in range(3) for piece in old.pieces(rank))
    assert owned == old.numel == build(3).numel


def test_a_broken_layout_is_refused() -> None:
    data = build(2).to_json()
    with pytest.raises(AssertionError, match="unit/float32"):
        UnitLayout.from_json({**data, "padded_numel": data["padded_numel"] + 1})
    with pytest.raises(KeyError):
        build(2).slot("unknown")
