"""The rooms of hf_zero, from the lowest up, and which imports which.

    python scripts/import_graph.py                  # of this checkout
    python scripts/import_graph.py /tmp/before      # of another one
    python scripts/import_graph.py --json

A room is a folder of hf_zero or of hf_zero/extras, or a file beside them. Imports inside functions count. An arrow is
one room that imports another; rooms that reach each other in both directions are a circle; the floor of a room is one
above the highest that it imports.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "hf_zero"
Graph = dict[str, dict[str, int]]  # room -> room that it imports -> import statements


def imported_modules(tree: ast.Module, root: Path) -> Iterator[str]:
    """Dotted names of what a file imports from hf_zero."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(f"{PACKAGE}."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                place = root.joinpath(*full.split("."))
                is_module = place.is_dir() or place.with_suffix(".py").is_file()
                yield full if is_module else str(node.module)


def room_of(module: str) -> str:
    parts = [part for part in module.split(".")[1:] if part != "extras"]
    return parts[0] if parts else "__init__"


def import_graph(root: Path) -> Graph:
    graph: Graph = defaultdict(lambda: defaultdict(int))
    for path in sorted((root / PACKAGE).rglob("*.py")):
        room = room_of(".".join(path.relative_to(root).with_suffix("").parts))
        graph[room]  # a room that imports nothing is one too
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")), root):
            if room_of(module) != room:
                graph[room][room_of(module)] += 1
    return {room: dict(others) for room, others in graph.items()}


def circles(graph: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """The sets of rooms that reach each other, as sorted lists."""
    reach = {room: _reachable(graph, room) for room in graph}
    groups = {tuple(sorted(other for other in reach[room] if room in reach.get(other, ()))) for room in graph}
    return [list(group) for group in sorted(groups) if group]


def _reachable(graph: Mapping[str, Mapping[str, int]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting.extend(graph.get(room, ()))
    return seen


def floors(graph: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The floor of every room; rooms of a circle share one."""
    in_circle = {room: tuple(group) for group in circles(graph) for room in group}
    known: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in known:
            members = in_circle.get(room, (room,))
            below = {other for member in members for other in graph.get(member, ())} - set(members)
            height = 1 + max((floor(other) for other in below), default=-1)
            known.update(dict.fromkeys(members, height))
        return known[room]

    for room in graph:
        floor(room)
    return known


def summary(root: Path) -> dict[str, object]:
    graph = import_graph(root)
    files = list((root / PACKAGE).rglob("*.py"))
    return {
        "rooms": len(graph),
        "floors": 1 + max(floors(graph).values()),
        "arrows": sum(len(others) for others in graph.values()),
        "circles": circles(graph),
        "files": len(files),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        "graph": graph,
    }


def text(root: Path) -> str:
    found = summary(root)
    graph, height = import_graph(root), floors(import_graph(root))
    lines = [
        f"{found['rooms']} rooms on {found['floors']} floors, {found['arrows']} arrows, {found['files']} files, "
        f"{found['lines']} lines",
        f"circles: {found['circles'] or 'none'}",
        "",
    ]
    for room in sorted(graph, key=lambda one: (height[one], one)):
        lines.append(f"{height[room]:2} {room:<16} {', '.join(sorted(graph[room])) or '-'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("checkout", type=Path, nargs="?", default=here, help="default: this one")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    args = parser.parse_args()
    if not (args.checkout / PACKAGE).is_dir():
        parser.error(f"{args.checkout} is no checkout of hf_zero")
    print(json.dumps(summary(args.checkout), indent=2) if args.json else text(args.checkout))


if __name__ == "__main__":
    main()
