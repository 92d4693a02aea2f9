"""Docstrings and comments stand alone. `pytest tests/test_sentences.py -k ROOM` lists the fragments of a room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# These hang on words that are not there: "Of all parameters.", "What is kept."
HANGING = set("As How Made Of That Those What Where Which Who Whoever Whom Whose Why".split())
# A comment may open with these where a verb follows, "Without GPUs, slots are processes.", a docstring may not.
OPENING = set(
    """After Around At Before Below Beside Between Beyond By During For From In Inside Into On Out Outside Over Per
    Since So Through To Under Until Upon When While With Within Without""".split()
)
VERB = re.compile(
    r"\b(is|are|was|were|has|have|had|do|does|did|can|cannot|may|must|will|would|should|could|[a-z]+s)\b"
)
# A noun without its article, "Bytes of ...", is the name of a class or file; of a function it says nothing.
BARE = re.compile(r"(?!(All|Both|Each|Most|None|One|Some|Two) of|(Check|Note|See) that)\w+ (of|per|that|whose)\b")
LOWER_CASE_NAMES = ("accelerate", "torch", "transformers")


def sentence_of(text: str) -> tuple[str, str]:
    """The first word, and the text up to the first full stop or colon."""
    first = " ".join(re.split(r"(?<=[.:;?])\s|\n\n", text.strip(), maxsplit=1)[0].split())
    return re.split(r"[\s,:]", first, maxsplit=1)[0], first


def stands_alone(text: str, node: ast.AST) -> bool:
    word, sentence = sentence_of(text)
    function = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
    if word == "Whether":
        return function is not None and function.returns is not None and ast.unparse(function.returns) == "bool"
    if sentence.startswith("Inside, "):
        return True  # what a context manager does
    if word.islower() and word.isalpha() and word not in LOWER_CASE_NAMES:
        return False
    return word not in HANGING | OPENING and not (function and BARE.match(sentence))


def fragments(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and not stands_alone(text, node):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {sentence_of(text)[1]}"
    for block in re.finditer(r"(?m)(?:^[ \t]*#.*\n)+", source):
        word, sentence = sentence_of(re.sub(r"(?m)^[ \t]*#", "", block[0]))
        if word in HANGING or (word in OPENING and not VERB.search(sentence)):
            yield f"{path.relative_to(ROOT)}:{source.count(chr(10), 0, block.start()) + 1}: # {sentence}"


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    tops = ("hf_zero", "conversion", "recipes", "scripts", "tests")
    for path in sorted(path for top in tops for path in (ROOT / top).rglob("*.py")):
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "extras"]
        found.setdefault(parts[1] if parts[0] == "hf_zero" else parts[0], []).append(path)
    return found


@pytest.mark.parametrize("room", sorted(rooms()))
def test_docstrings_and_comments_stand_alone(room: str) -> None:
    found = [line for path in rooms()[room] for line in fragments(path)]
    listing = f"{len(found)} fragments\n" + "\n".join(found)
    assert not found, listing
