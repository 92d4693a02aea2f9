"""The architecture, as far as a program can check it: layers, sizes, and what belongs into one file only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_zero"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# From the lowest row up. A file imports from lower rows only, or from its own package.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        """accelerator cluster config digests distributed_calls errors host layout model_states processes""".split()
    ),
    frozenset(
        """native comm connections engine_group failure_reason gloo_messages link operation_log pending presence
        scratch waiting""".split()
    ),
    frozenset(["store"]),
    frozenset(["shards"]),
    frozenset(["runtime"]),
    frozenset(["optim"]),
    frozenset(["checkpoint", "estimate"]),
    frozenset(
        """engine engine_state module_calls script_calls access fragments ema weight_copy loading renewal recovery
        construction duplication script_arguments""".split()
    ),
    frozenset(["initializer", "hf", "cli", "run", "utils", "launcher", "ops", "zero"]),
    frozenset(["__init__"]),  # the public names, above all of them
)
HF_LAYER = 8
# Same-row imports between different files that the design asks for: (importer, imported).
SIDEWAYS = frozenset(
    [
        ("accelerator", "host"),
        ("config", "errors"),
        ("native", "errors"),
        ("distributed_calls", "processes"),
        ("processes", "errors"),
        ("engine", "module_calls"),
        ("engine", "script_calls"),
        ("module_calls", "script_calls"),
        ("script_calls", "engine_state"),
        ("processes", "cluster"),
        ("cluster", "errors"),
        ("comm", "native"),
        ("comm", "pending"),
        ("comm", "presence"),
        ("comm", "engine_group"),
        ("comm", "gloo_messages"),
        ("engine_group", "failure_reason"),
        ("engine_group", "gloo_messages"),
        ("engine_group", "link"),
        ("engine_group", "operation_log"),
        ("engine_group", "pending"),
        ("operation_log", "pending"),
        ("comm", "scratch"),
        ("link", "connections"),
        ("link", "waiting"),
        ("waiting", "connections"),
        ("access", "construction"),
        ("access", "engine"),
        ("fragments", "access"),
        ("ema", "engine"),
        ("ema", "access"),
        ("weight_copy", "engine"),
        ("renewal", "engine"),
        ("recovery", "engine"),
        ("construction", "engine"),
        ("duplication", "engine"),
        ("engine", "duplication"),
        ("loading", "engine"),
        ("initializer", "hf"),
        ("zero", "hf"),
        ("zero", "initializer"),
        ("run", "hf"),
        ("cli", "hf"),
        ("cli", "launcher"),
    ]
)
# These run where nothing but the files of a checkpoint is there.
OFFLINE = ("checkpoint/manifest.py", "checkpoint/consolidate.py")
# A copy of it lies in every checkpoint and runs without hf_zero, so it cannot be cut in two.
MAX_LINES_STAND_ALONE = {"hf_zero/checkpoint/consolidate.py": 720}
OFFLINE_PACKAGES = frozenset(["numpy", "safetensors", "tqdm"])

CALL_COLLECTIVES = ("hf_zero/comm.py", "hf_zero/engine_group.py", "hf_zero/gloo_messages.py")
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
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
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


def unit_of(module: str) -> str:
    """The name in LAYERS that a module of hf_zero belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def layer_of(unit: str) -> int:
    for number, units in enumerate(LAYERS):
        if unit in units:
            return number
    raise AssertionError(f"hf_zero/{unit} is in no layer: add it to LAYERS here and to the table in README.md")


def test_every_module_has_a_layer() -> None:
    assert len(sources()) > 20, "vacuous: the package was not found"
    for path in sources():
        layer_of(unit_of(module_name(path)))


def test_imports_point_down() -> None:
    wrong = []
    for path in sources():
        unit = unit_of(module_name(path))
        for imported in imports_of(path):
            if imported.module.split(".")[0] != "hf_zero":
                continue
            other = unit_of(imported.module)
            if other != unit and layer_of(other) >= layer_of(unit) and (unit, other) not in SIDEWAYS:
                wrong.append(f"{name_of(path)}:{imported.line} imports {imported.module}")
    assert not wrong, "imports from the same row or a higher one:\n" + "\n".join(wrong)


def test_no_import_cycles() -> None:
    """Also within one package: in a cycle, which file is loaded first decides whether it works."""
    graph = {
        module_name(path): {
            imported.module
            for imported in imports_of(path)
            if imported.at_start and imported.module.startswith("hf_zero.") and imported.module != module_name(path)
        }
        for path in sources()
    }
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
        if layer_of(unit_of(module_name(path))) < HF_LAYER
        for imported in imports_of(path)
        if imported.module.split(".")[0] in ("transformers", "accelerate", "peft", "trl", "datasets")
    ]
    assert not wrong, "\n".join(wrong)


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
            unit = unit_of(imported.module)
            assert unit == "checkpoint" or layer_of(unit) == 0, where
            inner = ROOT.joinpath(*imported.module.split("."))
            waiting.append(inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py"))


def test_collectives_are_called_in_comm_only() -> None:
    wrong = []
    for path in sources():
        if name_of(path) in CALL_COLLECTIVES:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
                if ast.unparse(node.value) in ("dist", "torch.distributed", "distributed", "c10d"):
                    wrong.append(f"{name_of(path)}:{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                names = [alias.name for alias in node.names if alias.name in COLLECTIVES]
                wrong += [f"{name_of(path)}:{node.lineno} {name}" for name in names]
    assert not wrong, "call hf_zero.comm instead:\n" + "\n".join(wrong)


def test_files_and_functions_are_short() -> None:
    wrong = []
    for path in sources():
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_LINES_STAND_ALONE.get(name_of(path), MAX_FILE_LINES):
            wrong.append(f"{name_of(path)} has {num_lines} lines")
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
        if unit_of(module_name(path)) != "cli" and name_of(path) not in MAX_LINES_STAND_ALONE
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
