"""Tests that hf_zero can be installed without a compiler, elsewhere than on Linux, and beside the right versions."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_zero.hf.versions import SUPPORTED

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = "/nowhere/c++"

# Two ranks train at every stage, save, load and train on; then each asks for what needs the library.
_PROGRAM = """
import sys
import torch
from torch import nn
import hf_zero

assert hf_zero.__file__.startswith(sys.prefix), hf_zero.__file__
torch.distributed.init_process_group("gloo")
rank, folder = torch.distributed.get_rank(), sys.argv[1]
batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) for step in range(4)]

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def start(zero, optimizer=torch.optim.AdamW):
    model = net()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    return hf_zero.initialize(model=model, optimizer=optimizer(model.parameters(), lr=1e-2), config=config)[0]

def train(engine, steps):
    losses = []
    for step in steps:
        loss = engine(batches[step][2 * rank : 2 * rank + 2]).square().mean()
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(loss := loss.detach())
        losses.append(float(loss) / 2)
    return losses

model, wanted = net(), []
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in batches:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted.append(loss.item())

for stage in range(4):
    engine = start({"stage": stage})
    found = train(engine, [0, 1])
    engine.save_checkpoint(f"{folder}/{stage}")
    engine.destroy()
    engine = start({"stage": stage})
    engine.load_checkpoint(f"{folder}/{stage}")
    found += train(engine, [2, 3])
    engine.destroy()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-6)

for block in {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}:
    try:
        start({"stage": 3, "offload_optimizer": block})
        sys.exit(f"rank {rank}: {block} was not refused")
    except (hf_zero.NativeError, hf_zero.OffloadError) as error:
        line = f"rank {rank} refused {block['device']}: {error}".replace("\\n", " ")
        print(line + "\\n", end="")  # one write: ranks share the output
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built with cmake and no compiler, installed beside the packages of this environment."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("install")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("cmake", "ninja", "make"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    if not (programs / "cmake").exists():
        pytest.skip("needs cmake: pip gets it for a build, and this one is without a network")
    env = {**os.environ, "CXX": NO_COMPILER, "PATH": str(programs)}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run(
        [*pip, "wheel", "--no-build-isolation", "--no-deps", "-C", f"build-dir={folder}/build", "-w", folder, ROOT],
        env=env,
    )
    _run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
    # A path alone, whose own .pth files are not read: the editable hf_zero of this environment stays out.
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
    _run(
        [*pip, "--python", folder / "venv" / "bin" / "python", "install", "--no-deps", *folder.glob("*.whl")], env=env
    )
    return folder


def _run(command: list[str | Path], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_build_without_a_compiler_is_hf_zero_without_its_library(build: Path) -> None:
    (wheel,) = build.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hf_zero"}, "nothing else at the top"
    assert "hf_zero/native/library.py" in names and "hf_zero/conversion/__init__.py" in names
    assert not [name for name in names if name.endswith((".so", ".cpp", ".h"))]
    report = _run([build / "venv" / "bin" / "hf-zero", "report"])
    assert re.search(r"native library +missing: a C\+\+ compiler and pip install -e \.", report), report


@pytest.mark.slow
def test_all_but_offload_works_without_the_library(build: Path) -> None:
    program = build / "program.py"
    program.write_text(_PROGRAM)
    python = build / "venv" / "bin" / "python"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    said = _run([python, *launch, program, build / "checkpoints"])
    for rank in range(2):
        for device in ("cpu", "nvme"):
            (refusal,) = re.findall(rf"rank {rank} refused {device}: (.*)", said)
            assert "native library (libhf_zero_native.so) is missing" in refusal, refusal
            assert "apt-get install g++" in refusal and "pip install -e ." in refusal, refusal


@pytest.mark.slow
def test_a_compiler_that_comes_later_is_found(tmp_path: Path) -> None:
    """It is found in a folder, too, in which CMake has noted that there is none."""
    pytest.importorskip("scikit_build_core")
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    configure: list[str | Path] = ["cmake", "-S", ROOT / "hf_zero" / "native", "-B", tmp_path]
    first = _run(configure, env={**os.environ, "CXX": NO_COMPILER})
    assert "There is no C++ compiler that works" in first and "apt-get install g++" in " ".join(first.split())
    assert "hf_zero_native" not in _run(["cmake", "--build", tmp_path, "--target", "help"])
    _run(configure)
    assert "hf_zero_native" in _run(["cmake", "--build", tmp_path, "--target", "help"])


@pytest.mark.slow
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_elsewhere_nothing_is_built(system: str, tmp_path: Path) -> None:
    """Only scikit-build-core's rules see the other system; no cmake and no compiler can be found."""
    pytest.importorskip("scikit_build_core")
    script = f"""
import sys, types
from scikit_build_core.settings import skbuild_overrides
skbuild_overrides.sys = types.ModuleType("sys")
skbuild_overrides.sys.__dict__.update(vars(sys), platform={system!r})
import os
from scikit_build_core.build import build_wheel, get_requires_for_build_wheel
os.chdir({str(ROOT)!r})
assert get_requires_for_build_wheel() == []
print(build_wheel({str(tmp_path)!r}))
"""
    said = _run([sys.executable, "-c", script], env={"PATH": "/nowhere"})
    assert said.split()[-1] == "hf_zero-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("package", "found"), [("transformers", "4.57.6"), ("transformers", "5.25.0"), ("accelerate", "1.10.1")]
)
def test_another_version_is_refused_in_one_sentence(tmp_path: Path, package: str, found: str) -> None:
    """Only the metadata is another version's: nothing of the package is imported before it is read."""
    metadata = tmp_path / f"{package}-{found}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {found}\n", encoding="ascii")
    command = [sys.executable, "-c", "from hf_zero import Trainer"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.stderr.splitlines()[-1] == (
        f"hf_zero.errors.ConfigError: hf_zero does not run with {package} {found}: install what it was run with, "
        f'pip install "{package}{SUPPORTED[package]}".'
    )


def test_bounds_are_those_that_the_error_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="ascii"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = [re.fullmatch(r"([\w-]+)(.*)", requirement).groups() for one in lists for requirement in one]
    for package, bounds in SUPPORTED.items():
        assert {found for name, found in declared if name == package} == {bounds}, package
