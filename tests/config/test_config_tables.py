"""SUPPORTED.md says what the tables in the code say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_zero.config.keys import root
from hf_zero.config.schema import find

HERE = Path(__file__).resolve()
CORPUS = HERE.parents[1] / "data" / "ds_configs"


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


def test_the_table_of_public_configurations_is_current(tables: ModuleType) -> None:
    _, public = tables.current()
    fresh = tables.corpus_table(CORPUS)
    assert public.rstrip() == fresh.rstrip(), "run python scripts/config_tables.py --corpus tests/data/ds_configs"
