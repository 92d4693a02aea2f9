"""No number of a rank's step grows with the ranks, but that of the messages in which they agree."""

from __future__ import annotations

from pathlib import Path

from tests.harness.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "growth.py"


def test_what_grows_with_the_number_of_ranks(tmp_path: Path) -> None:
    ran = run_script(SCRIPT, "--ranks", 8, 512, "--plot", "growth.svg", folder=tmp_path, processes=1)
    assert ran.status == [0], ran.err
    assert "records at rank 0" in (tmp_path / "growth.svg").read_text()
    found = {}
    for line in ran.out.splitlines():
        name, *values = line.split()
        found[name] = [float(value.replace(",", "")) for value in values]
    assert found.pop("ranks") == found["files"] == [8, 512]
    assert found["messages"] == [3, 9]
    for name in ("operations", "message"):
        few, many = found[name]
        assert few == many > 0
    bytes_of = [inside + across for inside, across in zip(found["inside"], found["across"], strict=True)]
    # (N - 1) / N of the model comes from others, in each of the three times that it is sent.
    assert bytes_of[0] < bytes_of[1] < bytes_of[0] * (511 / 512) / (7 / 8) * 1.001
    assert 0 < found["across_in_groups"][1] < found["across"][1]
    assert found["memory"][1] < found["memory"][0]
    # A manifest has a line for each file.
    assert found["manifest"][1] - found["manifest"][0] < 504 * 120 / 1e6
