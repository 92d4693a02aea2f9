"""SUPPORTED.md says what the tables in the code say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_zero.config.keys import OBEYED, help_of, root, statuses
from hf_zero.config.schema import find

HERE = Path(__file__).resolve()
CORPUS = HERE.parents[1] / "data" / "ds_configs"
FRAGMENTS = "As By For How If In Of On Only That Those To What When Where Whether Which Who Why With".split()


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_tables", HERE.parents[2] / "scripts" / "config_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["config_tables"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_of_keys_is_current(tables: ModuleType) -> None:
    written, public = tables.current()
    assert written.rstrip() == tables.key_tables().rstrip(), "run python scripts/config_tables.py"
    assert public.count("\n|") > 80
    named = set(re.findall(r"`([\w.]+)`", written))
    assert len([name for name in named if find(root(), name) is not None]) > 150


def test_every_obeyed_key_has_one_whole_sentence() -> None:
    """It says what the key does: an order ("Train in bf16."), or the thing that the value is ("The number of ...")."""
    obeyed = [path for path, one in statuses() if one.verdict == OBEYED]
    assert len(obeyed) > 170
    for path in obeyed:
        text = help_of(path)
        assert re.fullmatch(r"[A-Z][^.]*(\.\w[^.]*)*\.", text), (
            f"{path}: one sentence, from a capital to a full stop: {text}"
        )
        first, *rest = text.split()
        assert first not in FRAGMENTS and len(rest) >= 2 and len(text) <= 110, f"{path}: {text}"
    texts = [help_of(path) for path in obeyed if not path.startswith(("tensorboard.", "csv_monitor."))]
    assert len(set(texts)) == len(texts), "keys that do different things say different things"


def test_the_blocks_that_are_declared_elsewhere_are_read_without_torch() -> None:
    code = (
        "import sys; from hf_zero.config.keys import DECLARED, root; root()\n"
        "assert all(module in sys.modules for module in DECLARED); print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "False\n"


def test_the_table_of_public_configurations_is_current(tables: ModuleType) -> None:
    _, public = tables.current()
    fresh = tables.corpus_table(CORPUS)
    assert public.rstrip() == fresh.rstrip(), "run python scripts/config_tables.py --corpus tests/data/ds_configs"
