"""The docs site builds strictly, and its search finds every public name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_zero
import hf_zero.pipeline

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_public_name_is_found(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    # The page shows one entry for each address, the last one.
    headings = {
        name
        for title in {entry["location"]: entry["title"] for entry in entries}.values()
        for name in title.split(", ")
    }
    public = [f"hf_zero.{name}" for name in hf_zero.__all__]
    public += [f"hf_zero.pipeline.{name}" for name in dir(hf_zero.pipeline)]
    assert [name for name in public if name not in headings] == []


@pytest.mark.slow
def test_nothing_comes_from_the_network(site: Path) -> None:
    loaded = r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*rel=\"?stylesheet[^>]*https?:|@import[^;]*https?:"
    assert [
        page.name for page in [*site.rglob("*.html"), *site.rglob("*.css")] if re.search(loaded, page.read_text())
    ] == []
