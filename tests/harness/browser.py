"""Looks at an HTML page in headless Chromium: the document as its script left it."""

from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hf_zero.extras.cli.text import format_bytes

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --window-size=1240,1500 --dump-dom""".split()
_TIMEOUT_S = 60


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Return the elements below this one, in order; `data_kind="table"` asks for an attribute `data-kind`."""
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        found = []
        for child in self.children:
            if child.tag == tag and wanted.items() <= child.attributes.items():
                found.append(child)
            found += child.all(tag, **attributes)
        return found


class _Tree(html.parser.HTMLParser):
    """The tree of a document that a browser has written: every element is closed, but for those that hold nothing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("document", {})
        self._open = [self.root]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(made)
        if tag not in ("meta", "link", "br", "img", "input"):
            self._open.append(made)

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data


@dataclass(frozen=True)
class Seen:
    document: Element
    data: dict[str, Any]  # the JSON in the page

    def sections(self, kind: str) -> list[tuple[dict[str, Any], Element]]:
        """Return the data of each section of a kind, and what was drawn of it."""
        drawn = self.document.all("section", data_kind=kind)
        given = [section for section in self.data["sections"] if section["kind"] == kind]
        assert len(drawn) == len(given)
        return list(zip(given, drawn, strict=True))


def look_at(page: Path, folder: Path) -> Seen:
    """Start a browser once. Skips the test where there is none."""
    browser = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium is installed, which the page would be looked at in")
    command = [browser, *_FLAGS, f"--user-data-dir={folder / 'browser'}", page.as_uri()]
    # A group of its own: run() ends the browser by its process id at the time limit, and its children end with it.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, start_new_session=True)
    assert ended.returncode == 0, ended.stderr
    document = _Tree(ended.stdout).root
    (data,) = document.all("script", type="application/json")
    return Seen(document, json.loads(data.text))


def check_tables(seen: Seen) -> None:
    """Every cell of every table is the JSON's number, as it is shown to people."""
    for given, drawn in seen.sections("table"):
        body = [list(row.all("td")) for row in drawn.all("tr")[1:]]
        assert [[cell.attributes["title"] for cell in row] for row in body] == [
            ["null" if value is None else f"{value}" for value in row] for row in given["rows"]
        ]
        for row, values in zip(body, given["rows"], strict=True):
            for cell, value, (_, unit) in zip(row, values, given["columns"], strict=True):
                if unit == "bytes" and value is not None:
                    assert cell.text == format_bytes(value)
                elif unit == "count":
                    assert cell.text == f"{value:,}"
                elif unit == "text":
                    assert cell.text == value
