"""The architecture, as far as a program can check it: rooms, who imports whom, and what belongs into one only."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_zero"
# hf_zero.conversion: the package has a link to the folder, which a wheel follows.
CONVERSION = ROOT / "conversion"
MAX_FUNCTION_LINES = 60

# Rooms from the lowest up: a room imports from rooms before it, in functions too. CONTRIBUTING.md tells of them.
CORE = """errors layout progress lazy logs config native fp8 distributed storage sharding runtime optim checkpoint
    engine access hf""".split()
ANNEXES = "pages monitors activations estimate conversion pipeline deepspeed launcher cli run".split()
ROOMS = [*CORE, *ANNEXES, "__init__"]
FILES_BESIDE_THE_ROOMS = set(
    "__init__.py errors.py estimate.py layout.py lazy.py logs.py pipeline.py progress.py run.py py.typed".split()
)
# Knows transformers and what is around it; rooms below do not.
HUGGING_FACE = "hf"
# Has the names that DeepSpeed's engine has; other files use ZeroEngine's own.
DEEPSPEEDS_NAMES = "engine/deepspeed_names.py"
# Files here are named as a command, or as DeepSpeed names them.
NAMED_BY_OTHERS = ("cli", "deepspeed")
# Lists the modules that declare blocks of the configuration; one of them is a pipeline's.
NAMES_BLOCKS = "hf_zero/config/keys.py"
CALLS_COLLECTIVES = "distributed"
NAMES_CUDA = "hf_zero/native/pinning.py"
# These run where nothing but the files of a checkpoint is there.
OFFLINE = ("checkpoint/folders.py", "checkpoint/consolidate.py")
# Runs without hf_zero too, as a part of the script that lies in every checkpoint, and prints.
STAND_ALONE = "hf_zero/checkpoint/consolidate.py"
OFFLINE_PACKAGES = frozenset(["numpy", "safetensors", "tqdm"])

COLLECTIVES = frozenset(
    """all_gather all_gather_into_tensor all_gather_single all_gather_coalesced all_gather_object all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object
    irecv isend monitored_barrier recv recv_object_list reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor scatter scatter_object_list send send_object_list batch_isend_irecv""".split()
)


@dataclass(frozen=True)
class Import:
    """One imported module, as an absolute dotted name."""

    module: str
    line: int
    at_start: bool  # when the file is loaded, not when a function of it is called


def sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *CONVERSION.rglob("*.py")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == CONVERSION.name:
        parts = (PACKAGE.name, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(path: Path) -> Iterator[Import]:
    """Every import in the file, those inside functions and under TYPE_CHECKING included."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) not in late)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                module = full if base.startswith("hf_zero") and is_module(full) else base
                yield Import(module, node.lineno, id(node) not in late)


def room_of(module: str) -> str:
    """The name in ROOMS that a module of hf_zero belongs to."""
    parts = [part for part in module.split(".")[1:] if part != "extras"]
    return parts[0] if parts else "__init__"


def test_every_module_is_in_a_room() -> None:
    assert len(sources()) > 20, "vacuous: the package was not found"
    rooms = {room_of(module_name(path)) for path in sources()}
    assert rooms == set(ROOMS), "add a room to ROOMS here and to the table in CONTRIBUTING.md"
    beside = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert beside == FILES_BESIDE_THE_ROOMS, "a file belongs into a room"


def test_the_core_imports_no_annex() -> None:
    """Neither when it is loaded nor in a function, nor by name: annexes are registered in hf_zero/__init__.py."""
    wrong = [
        f"{name_of(path)}:{imported.line} imports {imported.module}"
        for path in sources()
        if room_of(module_name(path)) in CORE
        for imported in imports_of(path)
        if imported.module.split(".")[0] == "hf_zero" and room_of(imported.module) not in CORE
    ]
    wrong += [
        f"{name_of(path)}:{node.lineno} names {node.value}"
        for path in sources()
        if room_of(module_name(path)) in CORE and name_of(path) != NAMES_BLOCKS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("hf_zero.extras")
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_point_down() -> None:
    wrong = []
    for path in sources():
        room = room_of(module_name(path))
        for imported in imports_of(path):
            if imported.module.split(".")[0] != "hf_zero":
                continue
            other = room_of(imported.module)
            if other != room and ROOMS.index(other) >= ROOMS.index(room):
                wrong.append(f"{name_of(path)}:{imported.line} imports {imported.module}")
    assert not wrong, "imports from a higher room:\n" + "\n".join(wrong)


def test_names_of_files_are_unique() -> None:
    where: dict[str, list[str]] = {}
    for path in sources():
        room = room_of(module_name(path))
        if path.stem not in ("__init__", "base") and room not in NAMED_BY_OTHERS:
            where.setdefault(path.stem, []).append(name_of(path))
    twice = [names for names in where.values() if len(names) > 1]
    assert not twice, f"one name for different things: {twice}"


def test_no_import_cycles() -> None:
    """The cycles within a room count too, and those by imports inside functions: files that need each other are one
    idea, or lack one.
    """
    graph = {
        module_name(path): {
            imported.module
            for imported in imports_of(path)
            if imported.module.startswith("hf_zero.") and imported.module != module_name(path)
        }
        for path in sources()
    }
    assert sum(map(len, graph.values())) > 500, "vacuous: imports were not found"
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for other in sorted(graph.get(module, ())):
            visit(other, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_hugging_face_is_imported_at_the_top_only() -> None:
    wrong = [
        f"{name_of(path)}:{imported.line} imports {imported.module}"
        for path in sources()
        if ROOMS.index(room_of(module_name(path))) < ROOMS.index(HUGGING_FACE)
        for imported in imports_of(path)
        if imported.module.split(".")[0] in ("transformers", "accelerate", "peft", "trl", "datasets")
    ]
    assert not wrong, "\n".join(wrong)


def methods_of(name: str, class_name: str) -> set[str]:
    """Methods and properties that a class of hf_zero defines itself, by the file's name and its own."""
    (found,) = [
        node for node in tree_of(PACKAGE / name).body if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


def test_deepspeeds_names_of_the_engine_are_in_one_file() -> None:
    """Elsewhere an engine is used, and told of in messages, by ZeroEngine's own names."""
    names = methods_of(DEEPSPEEDS_NAMES, "DeepSpeedNames")
    assert {"train_batch_size", "zero_optimization_stage", "save_16bit_model"} <= names, "vacuous: no names were found"
    used = re.compile(rf"engine\.({'|'.join(sorted(names))})\b")
    others = [path for path in sources() if path != PACKAGE / DEEPSPEEDS_NAMES]
    wrong = [
        f"{name_of(path)}: {match[0]}" for path in others for match in used.finditer(path.read_text(encoding="utf-8"))
    ]
    wrong += [
        f"{name_of(path)}:{node.lineno} def {node.name}"
        for path in others
        if room_of(module_name(path)) == "engine"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert not wrong, f"DeepSpeed's names of an engine outside hf_zero/{DEEPSPEEDS_NAMES}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_tools_need_files_only(name: str) -> None:
    """Checked through everything that they import of hf_zero, so that no heavy import comes in by a side door."""
    seen: set[Path] = set()
    waiting = [PACKAGE / name]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for imported in imports_of(path):
            if not imported.at_start:
                continue
            top = imported.module.split(".")[0]
            where = f"{name_of(path)}:{imported.line} imports {imported.module}"
            if top != "hf_zero":
                assert top in sys.stdlib_module_names or top in OFFLINE_PACKAGES, where
                continue
            assert room_of(imported.module) in ("checkpoint", "errors", "layout"), where
            inner = ROOT.joinpath(*imported.module.split("."))
            waiting.append(inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py"))


def test_collectives_are_called_in_one_room() -> None:
    wrong = []
    for path in sources():
        if room_of(module_name(path)) == CALLS_COLLECTIVES:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
                if ast.unparse(node.value) in ("dist", "torch.distributed", "distributed", "c10d"):
                    wrong.append(f"{name_of(path)}:{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("torch.distributed", "accelerate")
            ):
                names = [alias.name for alias in node.names if alias.name in COLLECTIVES]
                wrong += [f"{name_of(path)}:{node.lineno} {name}" for name in names]
    assert not wrong, "call hf_zero.distributed.comm instead:\n" + "\n".join(wrong)


def test_cuda_is_named_in_one_file() -> None:
    """Everywhere else torch.accelerator is asked: what goes for CUDA alone is untested, and missing on the others."""
    wrong, found = [], 0
    for path in sources():
        named = list(_names_cuda(tree_of(path)))
        if name_of(path) == NAMES_CUDA:
            found = len(named)
        else:
            wrong += [f"{name_of(path)}:{line}" for line in named]
    assert found > 3, "vacuous: CUDA was not found where it is"
    assert not wrong, f"use torch.accelerator, or let {NAMES_CUDA} do it:\n" + "\n".join(wrong)


def _names_cuda(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of code with torch.cuda, "cuda" or "cuda:0". Keys and variables that others have named are not
    that.
    """
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        names = [getattr(node, "attr", None), getattr(node, "id", None)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [getattr(node, "module", None) or ""]
            names += [part for name in [*module, *(alias.name for alias in node.names)] for part in name.split(".")]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names.append(node.value.partition(":")[0])
        if "cuda" in names:
            yield node.lineno  # type: ignore[attr-defined]


def test_functions_are_short() -> None:
    wrong = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{name_of(path)}:{node.lineno} {node.name} has {num_lines} lines")
    assert not wrong, "more than one idea in one place:\n" + "\n".join(wrong)


def test_only_the_command_line_prints() -> None:
    prints = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        if room_of(module_name(path)) != "cli" and name_of(path) != STAND_ALONE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints, "use logging.getLogger(__name__):\n" + "\n".join(prints)


def test_every_file_says_what_it_owns_in_ascii() -> None:
    wrong = []
    for path in sources():
        if not path.read_bytes().isascii():
            wrong.append(f"{name_of(path)} holds characters outside ASCII")
        if tree_of(path).body and not ast.get_docstring(tree_of(path)):
            wrong.append(f"{name_of(path)} has no docstring")
        if any(isinstance(node, ast.FunctionDef) and node.name == "__del__" for node in ast.walk(tree_of(path))):
            wrong.append(f"{name_of(path)} cleans up in __del__: do it in a method that is called")
    assert not wrong, "\n".join(wrong)
