"""Lets mkdocstrings read this repository's docstrings, whose sections follow each other without an empty line."""

from __future__ import annotations

import re
from typing import Any

import griffe


class SectionsApart(griffe.Extension):
    """Puts an empty line before every section of a docstring, as griffe's parser wants it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of `obj`, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\n(?=(Args|Returns|Yields|Raises):\n)", "\n\n", obj.docstring.value)
