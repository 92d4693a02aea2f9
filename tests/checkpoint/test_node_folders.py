"""Every node has a folder of its own: saves, resumes with files of other nodes, and what is missing everywhere.

`/proc/self/cwd` is one path with other content for each process, as a local disk is for each node.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero import CheckpointError
from hf_zero.checkpoint import background, committers, file_exchange, writer
from hf_zero.checkpoint.consolidate import consolidate
from hf_zero.checkpoint.folders import read_manifest
from hf_zero.checkpoint.format import ConsolidateError
from hf_zero.errors import ZeroError
from tests.checkpoint.test_resume import Net, offload
from tests.harness.ranks import RankFailure, run_ranks, try_ranks
from tests.harness.save_faults import at, kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/cwd")

LOCAL = "/proc/self/cwd/out"  # the same path on every node


def start(stage: int, seed: int, *, medium: str = "none", model: nn.Module | None = None, **checkpoint: Any) -> Any:
    torch.manual_seed(seed)
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 150}
        | offload(medium),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"use_node_local_storage": True} | checkpoint,
    }
    return hf_zero.initialize(model=model or Net(), config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    """The same global batch whatever the world size; the mean loss over it."""
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, 31, (12, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(ids.chunk(engine.world_size)[engine.rank])
        engine.backward(loss)
        engine.step()
        losses.append(sum(engine.comm.all_gather_object(loss.item(), "loss")) / engine.world_size)
    return losses


def on_node(root: str, node: int) -> Path:
    """Stand on that node from here on; returns its folder LOCAL under a name that all processes can use."""
    home = Path(root, f"node{node}")
    home.mkdir(exist_ok=True)
    os.chdir(home)
    return home / "out"


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def refused(call: Callable[[], Any], match: str) -> str:
    with pytest.raises(CheckpointError, match=match) as caught:
        call()
    return str(caught.value)


# -------------------------------------------------------------------- saves
def save_on_two_nodes(root: str, stage: int, medium: str) -> list[float]:
    """4 ranks, 2 a node. Another save into the same tag replaces the files of the first one on both nodes."""
    rank = int(os.environ["RANK"])
    folder = on_node(root, rank // 2)
    engine = start(stage, seed=0, medium=medium)
    for last in (1, 3):
        steps(engine, engine.global_steps, last)
        engine.save_checkpoint(LOCAL, "a", client_state={"last": last})
        engine.comm.barrier("saved")
        mine = [name for name in names(folder) if "rank-" in name]
        wanted = [f"zero/rank-{one:05d}" for one in range(4) if one // 2 == rank // 2]
        assert [name.partition("a/")[2].partition(".")[0] for name in mine] == wanted, mine
        rest = set(names(folder)) - set(mine)
        scripts = {"a/consolidate.py", "a/zero_to_fp32.py", "zero_to_fp32.py"}
        assert rest == {"latest", "a/zero/manifest.json", *scripts}, rest
        engine.comm.barrier("looked")
    return steps(engine, 3, 6)


def resume(root: str, stage: int, medium: str, nodes: list[int], bad: bool) -> list[float]:
    """`nodes`: of each rank. `bad`: first without files, and with a damaged one."""
    folder = on_node(root, nodes[int(os.environ["RANK"])])
    engine = start(stage, seed=1, medium=medium)
    if bad:
        without_a_node(engine, root)
        from_damage(engine, Path(root, "node1", "out"), folder)
    assert engine.load_checkpoint(LOCAL) == (f"{LOCAL}/a", {"last": 3})
    return steps(engine, 3, 6)


def without_a_node(engine: Any, root: str) -> None:
    os.chdir(Path(root, "node0"))
    before = engine.full_state_dict(keep=True)
    text = refused(lambda: engine.load_checkpoint(LOCAL), "no node of this run has rank-00002")
    assert "rank-00003" in text and f"written on {os.uname().nodename}" in text and "copy them into" in text
    assert all(torch.equal(before[name], value) for name, value in engine.full_state_dict(keep=True).items())


def from_damage(engine: Any, damaged: Path, folder: Path) -> None:
    """A part that came over the network is compared with its checksums too."""
    os.chdir(folder.parent)
    path = next((damaged / "a" / "zero").glob("rank-00003*"))
    content = path.read_bytes()
    engine.comm.barrier("read")
    for data in (content[:-1] + bytes([content[-1] ^ 1]), content):
        if engine.rank == 0:
            path.write_bytes(data)
        engine.comm.barrier("written")
        if data != content:
            text = refused(lambda: engine.load_checkpoint(LOCAL), rf"{path.name}.* is damaged: wrong checksum")
            assert "rank 1" in text and "on the node of rank 0" in text, text


@pytest.mark.parametrize(("stage", "medium"), [(3, "none"), (2, "cpu")])
def test_a_run_goes_on_from_the_folders_of_its_nodes(stage: int, medium: str, tmp_path: Path) -> None:
    root = str(tmp_path)
    losses = run_ranks(save_on_two_nodes, 4, root, stage, medium)[0]
    # At another world size with the nodes swapped, where one of three nodes has nothing, and as before.
    for nodes in ([1, 0], [0, 1, 2]) if stage == 3 else ([0, 0, 1, 1],):
        found = run_ranks(resume, len(nodes), root, stage, medium, nodes, nodes == [1, 0])[0]
        assert found == pytest.approx(losses, rel=0, abs=1e-5), nodes
        if len(nodes) == 4:
            assert found == losses, "not to the bit"
    _one_folder_says_what_is_missing(tmp_path)


def _one_folder_says_what_is_missing(root: Path) -> None:
    folder = root / "node0" / "out" / "a"
    host = os.uname().nodename
    gone = [file.name for file in read_manifest(folder).files[2:]]
    with pytest.raises(ConsolidateError, match=f"copy {gone[0]}, {gone[1]} on {host} from there into {folder}/zero"):
        consolidate(folder, root / "weights")
    for name in gone:
        shutil.copy(root / "node1" / "out" / "a" / "zero" / name, folder / "zero")
    consolidate(folder, root / "weights.safetensors")


# -------------------------------------------------------------------- file systems
def nodes_and_keys(root: str) -> None:
    writer._VISIBLE_WITHIN_S = 0.3
    rank = int(os.environ["RANK"])
    engine = start(1, seed=0)
    for _ in range(5):  # on one file system: one commits
        engine.save_checkpoint(f"{root}/shared", "a")
    engine.comm.barrier("saved")
    found = names(Path(root, "shared"))
    scripts = ["a/consolidate.py", "a/zero_to_fp32.py", "zero_to_fp32.py"]
    assert set(found) == {"a/zero/manifest.json", "latest", *(f for f in found if "rank-" in f), *scripts}
    assert len(found) == 7 and not list(Path(root).rglob("*.token"))
    engine.load_checkpoint(f"{root}/shared")
    on_node(root, rank)
    engine.comm.barrier("looked")
    stock = start(1, seed=0, use_node_local_storage=False)
    text = refused(lambda: stock.save_checkpoint(LOCAL, "a"), "this rank does not see it")
    assert "Save to a file system that all nodes share" in text and "use_node_local_storage" in text
    Path("out/a/zero").mkdir(parents=True, exist_ok=True)
    text = refused(lambda: stock.save_checkpoint(LOCAL, "a"), "rank that commits does not see them all")
    assert "Save to a file system that all nodes share" in text and "use_node_local_storage" in text
    engine.save_checkpoint(LOCAL, "b")
    refused(lambda: stock.load_checkpoint(LOCAL), "is missing")
    if rank == 1:  # a save that reached one node only
        shutil.rmtree("out/b")
        Path("out/latest").unlink()
        Path("out/b/zero").mkdir(parents=True)
    refused(lambda: engine.load_checkpoint(LOCAL, "b"), "no node of this run has rank-00001")
    refused(lambda: engine.load_checkpoint(LOCAL, "c"), "holds no complete checkpoint")


def test_one_rank_commits_for_each_file_system(tmp_path: Path) -> None:
    run_ranks(nodes_and_keys, 2, str(tmp_path))


def interrupted(root: str) -> None:
    """A save over an old one that ends between the renames of two nodes, and one whose second node is full."""
    rank = int(os.environ["RANK"])
    on_node(root, rank)
    engine = start(1, seed=0)
    steps(engine, 0, 1)
    engine.save_checkpoint(LOCAL, "a")
    first = engine.full_state_dict(keep=True)
    steps(engine, 1, 2)
    second = engine.full_state_dict(keep=True)
    for name in ("prepare_commit", "publish"):
        plain = getattr(committers, name)
        if rank == 1:
            setattr(committers, name, broken)
        refused(lambda: engine.save_checkpoint(LOCAL, "a"), "rank 1: no space")
        setattr(committers, name, plain)
        if name == "prepare_commit":
            left = sorted(path.name for path in Path("out/a/zero").iterdir())
            assert left == ["manifest.json", f"rank-0000{rank}.safetensors"]
            engine.load_checkpoint(LOCAL)
            assert all(torch.equal(first[key], value) for key, value in engine.full_state_dict(keep=True).items())
            engine.load_full_state_dict(second)
    text = refused(lambda: engine.load_checkpoint(LOCAL), "the ranks do not agree")
    assert "delete zero/manifest.json on the nodes with the older save" in text
    if rank == 1:
        Path("out/a/zero/manifest.json").unlink()
    engine.comm.barrier("deleted")
    engine.load_full_state_dict(first)
    engine.load_checkpoint(LOCAL)
    assert all(torch.equal(second[key], value) for key, value in engine.full_state_dict(keep=True).items())


def broken(*args: Any) -> None:
    raise CheckpointError("no space")


def test_a_save_that_reached_one_node_only(tmp_path: Path) -> None:
    run_ranks(interrupted, 2, str(tmp_path))


# -------------------------------------------------------------------- in the background
def in_the_background(root: str) -> dict[str, Any]:
    """4 ranks on two nodes: losses without saves and beside them, what a full disk of node 1 makes of a save."""
    rank = int(os.environ["RANK"])
    on_node(root, rank // 2)
    plain = start(3, seed=0)
    wanted = steps(plain, 0, 6)
    plain.teardown()
    engine = start(3, seed=0, **{"async": True})
    losses = []
    for step in range(4):
        losses += steps(engine, step, step + 1)
        engine.save_checkpoint(LOCAL, "over" if step % 2 else "and over")
    engine.finish_saves()
    whole = names(Path("out"))
    prepare = background.prepare_commit
    if rank == 2:
        background.prepare_commit = broken
    engine.save_checkpoint(LOCAL, "over")
    with pytest.raises(CheckpointError) as said:
        steps(engine, 4, 200)
    failed_at = engine.global_steps
    background.prepare_commit = prepare
    left = names(Path("out"))
    assert engine.load_checkpoint(LOCAL)[0] == f"{LOCAL}/over"
    losses += steps(engine, 4, 6)
    engine.teardown()
    return {
        "right": losses == wanted,
        "said": str(said.value),
        "at": failed_at,
        "clean": left == whole,
        "files": whole,
    }


def test_nodes_save_in_the_background(tmp_path: Path) -> None:
    found = run_ranks(in_the_background, 4, str(tmp_path), timeout=120)
    for rank, one in enumerate(found):
        assert one["right"] and one["clean"], (rank, one)
        assert one["said"] == f"{LOCAL}/over was not saved in the background: rank 2: no space"
        assert one["at"] == found[0]["at"], "ranks raise in different steps"
        own = [name for name in one["files"] if name.startswith("over/zero/rank")]
        assert [int(name.partition("rank-")[2][:5]) for name in own] == [2 * (rank // 2), 2 * (rank // 2) + 1]
        assert {"over/zero/manifest.json", "and over/zero/manifest.json", "latest"} <= set(one["files"])


def save_and_be_killed(root: str, point: str, victims: list[int]) -> None:
    """A node a rank."""
    on_node(root, int(os.environ["RANK"]))
    engine = start(2, seed=0, **{"async": True})
    steps(engine, 0, 1)
    engine.save_checkpoint(LOCAL, "one")
    engine.finish_saves()
    steps(engine, 1, 2)
    if engine.rank in victims:
        at(point, kill)
    engine.save_checkpoint(LOCAL, "two")
    steps(engine, 2, 4)
    engine.finish_saves()


def newest_that_loads(root: str) -> tuple[str | None, int, list[str]]:
    """Return what is loaded, its step, and what is in the folder of "two" when that was saved again."""
    home = on_node(root, int(os.environ["RANK"]))
    engine = start(3, seed=7)
    path, _ = engine.load_checkpoint(LOCAL)
    engine.save_checkpoint(LOCAL, "two")
    return path, engine.global_steps, names(home / "two" / "zero")


# All points are in tests/nightly/test_checkpoint_faults.py.
@pytest.mark.parametrize("point, victims", [("the folder is synced", [0]), ("latest is set", [1])])
def test_a_kill_leaves_what_all_nodes_have(point: str, victims: list[int], tmp_path: Path) -> None:
    ended = try_ranks((save_and_be_killed, (str(tmp_path), point, victims), {}), 2, timeout=60)
    assert not ended.hang
    assert all(isinstance(ended.outcomes[victim], RankFailure) for victim in victims)
    for rank, (path, step, left) in enumerate(run_ranks(newest_that_loads, 2, str(tmp_path))):
        assert (path, step) in ((f"{LOCAL}/one", 1), (f"{LOCAL}/two", 2))
        assert len(left) == 2 and left[0] == "manifest.json" and left[1].startswith(f"rank-0000{rank}."), left


def dying(root: str) -> None:
    rank = int(os.environ["RANK"])
    on_node(root, rank)
    engine = start(3, seed=0)
    engine.save_checkpoint(LOCAL)
    os.chdir(Path(root, f"node{1 - rank}"))  # everything is on the other node
    plain = file_exchange.FileExchange._read
    count = 0

    def read(self: Any, *args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if rank == 1 and count == 5:
            os._exit(1)
        return plain(self, *args)

    file_exchange.FileExchange._read = read  # type: ignore[method-assign]
    engine.load_checkpoint(LOCAL)


def test_a_rank_that_dies_while_it_sends_files_ends_the_load_of_the_others(tmp_path: Path) -> None:
    waits, died = run_ranks(dying, 2, str(tmp_path), expect_error=True)  # within its time limit
    assert died.kind == "Died" and isinstance(waits.exception, ZeroError), (waits, died)
    assert "rank 0" in waits.message and "pieces of checkpoint files" in waits.message, waits
