"""hf-zero profile: spans, bytes and memory of a step beside what is known of it, and the page in a browser."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.extras.cli.main import main
from hf_zero.extras.cli.profile import joined
from hf_zero.extras.cli.text import format_bytes
from hf_zero.extras.pages.page import page, table
from tests.harness.browser import check_tables, look_at
from tests.harness.ranks import run_ranks

STEPS = 4
WIDTH = 32
LAYERS = 5
# Layers with a weight and a bias each: all that there is to gather and to reduce.
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)
SCRIPT = f"""
import json, sys
import torch
from torch import nn
import hf_zero

torch.manual_seed(0)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear({WIDTH}, {WIDTH})

    def forward(self, x):
        return torch.tanh(self.inner(x))

class Model(nn.Module):
    _no_split_modules = ["Layer"]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range({LAYERS}))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Model()
zero = {{"stage": 3, "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {{"device": "nvme", "nvme_path": sys.argv[1], "buffer_count": 4}}}}
config = {{"train_micro_batch_size_per_gpu": 2, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2}}}},
          "zero_optimization": zero}}
engine = hf_zero.initialize(model=model, config=config)[0]
losses, counts = [], []
for step in range({STEPS}):
    loss = engine(torch.full((2, {WIDTH}), step + engine.rank + 1.0)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    counts.append({{name: (count.calls, count.numel) for name, count in engine.comm.counts.items()}})
parts = (engine.comm, engine.params.live, engine.placements.copies, *engine.placements.disks.values(),
         engine.optimizer.strategy, engine.optimizer.update_worker)
left = [name for part in parts for name, value in vars(part).items() if callable(value) and hasattr(type(part), name)]
with open(sys.argv[2] + str(engine.rank), "w") as file:
    json.dump({{"losses": losses, "counts": counts, "left": left, "memory": engine.memory_report()}}, file)
engine.teardown()
"""


def work(folder: Path) -> dict[str, Any]:
    """Return what a rank has printed and done, profiled and not."""
    script = str(folder / "train.py")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["profile", "--output", str(folder / "out"), script, str(folder / "swap"), str(folder / "with")])
    plain = main(
        ["profile", "--skip", "9", "--output", str(folder / "no"), script, str(folder), str(folder / "plain")]
    )
    return {"status": status, "out": out.getvalue(), "plain": plain}


class Profiled:
    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        self.folder = folder
        self.ranks = run_ranks(work, 2, folder)
        self.html = folder / "out" / "profile.html"
        text = self.html.read_text(encoding="utf-8")
        begin = text.index(">", text.index('<script type="application/json"')) + 1
        self.data = json.loads(text[begin : text.index("</script>", begin)])
        files = [folder / "out" / f"trace-rank{rank}.json" for rank in range(2)]
        self.traces = [json.loads(file.read_text(encoding="utf-8"))["traceEvents"] for file in files]

    def of(self, name: str, rank: int) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.folder / f"{name}{rank}").read_text(encoding="utf-8"))
        return said

    def section(self, title: str) -> dict[str, Any]:
        (found,) = [section for section in self.data["sections"] if section["title"] == title]
        return dict(found)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    return Profiled(tmp_path_factory.mktemp("profile"))


def test_a_profile_changes_no_loss_and_leaves_nothing_behind(profiled: Profiled) -> None:
    for rank in range(2):
        seen, plain = profiled.of("with", rank), profiled.of("plain", rank)
        assert seen["losses"] == plain["losses"] and seen["losses"][0] != seen["losses"][-1]
        assert seen["left"] == plain["left"] == []
    assert [one["status"] for one in profiled.ranks] == [0, 0]
    assert "profile.html" in profiled.ranks[0]["out"] and profiled.ranks[1]["out"] == ""


def test_too_few_steps_are_said(profiled: Profiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["plain"] for one in profiled.ranks] == [1, 1]
    (tmp_path / "empty.py").write_text("import sys; print(sys.argv[1:]); sys.exit(0)\n", encoding="utf-8")
    line = ["profile", "--output", str(tmp_path / "out"), str(tmp_path / "empty.py"), "--steps", "3"]
    assert main(line) == 1
    said = capsys.readouterr()
    assert "['--steps', '3']" in said.out and "made no engine of hf_zero" in said.err
    assert main(["profile", str(tmp_path / "missing.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["profile", "--output", str(tmp_path / "file"), str(tmp_path / "empty.py")]) == 1
    assert "cannot make the folder of --output" in capsys.readouterr().err


def test_bytes_of_collectives_are_those_of_the_model(profiled: Profiled) -> None:
    rows = {row[0]: row for row in profiled.section("Bytes per collective")["rows"]}
    assert rows["reduce_scatter_tensor"][2] == 4 * NUMEL
    # Every layer once in forward; in backward again, but for those that are kept.
    before, after = profiled.of("with", 0)["counts"][1:3]
    gathered = after["all_gather"][1] - before["all_gather"][1]
    assert rows["all_gather_into_tensor"][2] == 4 * gathered
    assert NUMEL <= gathered <= 2 * NUMEL
    assert rows["all_gather_into_tensor"][1] == after["all_gather"][0] - before["all_gather"][0]


def test_each_rank_has_a_trace_with_its_collectives(profiled: Profiled) -> None:
    for trace in profiled.traces:
        names = {event["name"] for event in trace if event["ph"] == "X"}
        ours = sorted(name for name in names if name.startswith("hf_zero::"))
        for what in ("gather", "reduce"):
            assert all(any(what in name and f"layers.{layer}" in name for name in ours) for layer in range(LAYERS)), (
                ours
            )
        assert "aten::linear" in names


def test_a_timeline_has_what_the_step_moved(profiled: Profiled) -> None:
    for one in profiled.section("One step")["ranks"]:
        lanes = {"forward", "backward", "step", "gather", "reduce", "other collectives", "update"}
        assert {span["lane"] for span in one["spans"]} >= lanes
        spans = {lane: [span for span in one["spans"] if span["lane"] == lane] for lane in ("disk read", "disk write")}
        # Masters and two moments, fp32, of this rank's half. Updates of the step before may run beside this forward,
        # and what is still being written is not read.
        states = 3 * 4 * NUMEL // 2
        of_a_layer = states // LAYERS
        moved = {lane: sum(span["nbytes"] for span in found) for lane, found in spans.items()}
        assert states <= moved["disk write"] <= 2 * states and 0 < moved["disk read"] <= 2 * states, moved
        # Each transfer is a whole state of a layer. Writes are those of whole layers, but for the layer whose writes
        # were under way when the recording began. A read of any state may be missing, because a state that is still
        # being written is taken from memory.
        for lane, found in spans.items():
            assert {span["nbytes"] for span in found} == {of_a_layer // 3}, (lane, found)
        written = [span["name"].partition("/")[0] for span in spans["disk write"]]
        whole = [layer for layer in written if layer != written[0]]
        assert whole and all(whole.count(layer) % 3 == 0 for layer in whole), written
        phases = [span["name"] for span in one["spans"] if span["lane"] in ("forward", "backward", "step")]
        assert phases == ["forward", "backward", "last reduces", "step"]
        for span in one["spans"]:
            assert span["start_ms"] >= 0 and span["start_ms"] + span["ms"] <= one["ms"] + 0.01


def test_memory_planned_and_measured(profiled: Profiled) -> None:
    rows = {row["name"]: row for row in profiled.section("Memory, planned beside measured")["rows"]}
    measured = profiled.of("with", 0)["memory"]
    assert rows["optimizer states"]["measured"] == measured["optimizer"] == 2 * 4 * NUMEL // 2
    for row in rows.values():
        assert row["planned"] == row["measured"], row
    area = profiled.section("Memory over the step")
    peaks = {one["name"]: max(one["values"]) for one in area["series"]}
    assert (
        peaks["gathered"] == measured["gathered_peak"] and peaks["unreduced gradients"] <= measured["gradients_peak"]
    )
    assert peaks["parameters"] == 4 * NUMEL // 2
    (units,) = [section for section in profiled.data["sections"] if section["kind"] == "strip"]
    assert sum(unit["numel"] for unit in units["units"]) == NUMEL


@pytest.mark.nightly
def test_the_page_in_a_browser(profiled: Profiled, tmp_path: Path) -> None:
    seen = look_at(profiled.html, tmp_path)
    assert seen.data == profiled.data
    check_tables(seen)
    ((given, drawn),) = seen.sections("timeline")
    spans, shown = given["ranks"][0]["spans"], drawn.all("rect", **{"class": "part"})
    assert sorted((span["lane"], float(span["ms"]), span["nbytes"]) for span in spans) == sorted(
        (one.attributes["data-lane"], float(one.attributes["data-ms"]), int(one.attributes["data-bytes"]))
        for one in shown
    )
    ((pairs, drawn),) = seen.sections("pairs")
    labels = [format_bytes(row[which]) for row in pairs["rows"] for which in ("planned", "measured")]
    texts = [text.text for text in drawn.all("text", **{"class": "soft"})]
    assert [text for text in texts if text in labels][-len(labels) :] == labels
    ((area, drawn),) = seen.sections("area")
    assert [int(one.attributes["data-peak"]) for one in drawn.all("polygon")] == [
        max(one["values"]) for one in area["series"]
    ]


def test_buckets_of_a_unit_are_one_span_in_the_page() -> None:
    bucket = {"lane": "gather", "op": "all_gather_into_tensor", "nbytes": 4}
    starts = (("a", 0.0), ("b", 0.5), ("a", 1.0), ("a", 3.0), ("a", 9.0))
    spans = joined([{**bucket, "name": name, "start_ms": start, "ms": 2.0} for name, start in starts])
    seen = [(span["name"], span["start_ms"], span["ms"], span["nbytes"]) for span in spans]
    assert seen == [("a", 0.0, 5.0, 12), ("b", 0.5, 2.0, 4), ("a", 9.0, 2.0, 4)]


def test_a_name_cannot_end_the_data(tmp_path: Path) -> None:
    name = "</script><script>document.title='owned'</script>"
    text = page(name, [("model", name)], [table(name, [(name, "text")], [(name,)])])
    assert text.count("<script") == 2 and text.count("</script>") == 2
