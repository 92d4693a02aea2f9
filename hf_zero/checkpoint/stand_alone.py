"""The stand-alone script that lies in every checkpoint: consolidate.py with what it imports of hf_zero, in one file.

The files are joined as they are: their imports come first, once each, and every docstring of a file becomes a comment.
A test executes the result where nothing but numpy can be imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from hf_zero.checkpoint.consolidate import DEEPSPEEDS_NAME

SCRIPT_NAME = "consolidate.py"
PARTS = ("layout.py", "checkpoint/format.py", "checkpoint/rank_reader.py", f"checkpoint/{SCRIPT_NAME}")
_SHEBANG = "#!/usr/bin/env python3\n"


def scripts(folder: Path, names: Sequence[str] = (SCRIPT_NAME, DEEPSPEEDS_NAME)) -> dict[Path, bytes]:
    """Return copies of the script in `folder`; under DeepSpeed's name it does what DeepSpeed's own does."""
    return {folder / name: f"{'' if name == SCRIPT_NAME else _SHEBANG}{script()}".encode("ascii") for name in names}


@functools.cache
def script() -> str:
    """The text of the script."""
    modules: set[str] = set()  # imported whole
    names: dict[str, set[str]] = {}  # module -> what is imported from it
    body = ""
    docstring = ""
    for part in PARTS:
        text = importlib.resources.files("hf_zero").joinpath(part).read_text(encoding="ascii")
        tree = ast.parse(text)
        found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in found:
            if isinstance(node, ast.Import):
                modules.add(ast.unparse(node))
            elif node.module and node.module != "__future__" and not node.module.startswith("hf_zero"):
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
        docstring = ast.get_docstring(tree) or ""
        note = f"# {'=' * 68} hf_zero/{part}\n"
        if part != PARTS[-1]:
            note += "".join(f"# {line}".rstrip() + "\n" for line in docstring.splitlines())
        body += f"\n\n{note}" + "".join(text.splitlines(keepends=True)[found[-1].end_lineno :])
    lines = [
        *sorted(modules),
        *(f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)),
    ]
    head = "\n".join(["from __future__ import annotations", "", *lines])
    return f'"""{docstring}\n"""\n\n{head}\n{body}'
