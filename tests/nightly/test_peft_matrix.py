"""Every tuner and initialisation of PEFT at every stage, on a base that was loaded in shards, beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf import peft_matrix


@pytest.mark.parametrize("kind", [kind for kind in peft_matrix.KINDS if kind not in peft_matrix.NOT_HERE])
def test_kind(kind: str, tmp_path: Path) -> None:
    peft_matrix.check(kind, tmp_path, [0, 1, 2, 3])
