"""One HTML file that shows its data: text, styles and a small script are inside, nothing is loaded.

The data is JSON in `<script type="application/json" id="data">`; page.js draws every section of it by its `kind`:

| kind | data | drawn as |
|---|---|---|
| table | columns: [name, unit]; rows | a table |
| pairs | rows: name, planned, measured | two bars for each row |
| area | at_ms; series: name, values in bytes | areas on each other, over the time |
| strip | units: name, kind, gathered, numel | one bar, as wide as there are elements |
| timeline | lanes; ranks: rank, ms, spans | spans of time in lanes |

Units of figures: "bytes", "count", "ms", "text".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError

Section = dict[str, Any]
_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def table(title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]], note: str = "") -> Section:
    """`columns`: name and unit of each."""
    return {"kind": "table", "title": title, "note": note, "columns": [*columns], "rows": [[*row] for row in rows]}


def page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """The text of the file. `facts`: name and value of what stands under the title."""
    data = {"title": title, "facts": [*facts], "sections": [*sections]}
    # Without a "<", no string of the JSON can end the script or begin a comment in it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    return _FRAME.format(title=escaped, style=_resource("page.css"), data=text, script=_resource("page.js"))


def write_page(path: Path, text: str) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}. Name another file.") from error


def _resource(name: str) -> str:
    return resources.files("hf_zero.extras.pages").joinpath(name).read_text(encoding="utf-8")
