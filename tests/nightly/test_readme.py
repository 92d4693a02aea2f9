"""README's blocks run one after the other, as they stand, in a fresh clone: nothing is there but Python and git."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_the_first_program_runs_from_the_clone_on(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "hf_zero")], check=True, timeout=120)
    readme = (tmp_path / "hf_zero" / "README.md").read_text()
    install = re.search(r"```bash\n(python -m venv .*?)```", readme, re.DOTALL)
    first = re.search(r"`(cd recipes/first_steps)`.*?```bash run\n(.*?)```", readme, re.DOTALL)
    printed = re.search(r"The last line prints `([^`]+)`", readme)
    assert install is not None and first is not None and printed is not None
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")  # the build without CUDA, where there is one
    names = ("HOME", "PATH", "LANG", "PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["PIP_CONSTRAINT"] = str(tmp_path / "constraints.txt")
    script = "\n".join(["set -ex", install[1], first[1], first[2]])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path / "hf_zero",
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1] == printed[1]
    model = tmp_path / "hf_zero" / "recipes" / "first_steps" / "my-model"
    python = tmp_path / "hf_zero" / ".venv" / "bin" / "python"
    count = "from transformers import AutoModelForCausalLM as A; print(A.from_pretrained({!r}).num_parameters())"
    loaded = subprocess.run(
        [python, "-c", count.format(str(model))], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(loaded.stdout) == 722_048
