"""Parallel text for the recipe: what Django and Wagtail write on a screen, in English and as it is translated."""

from __future__ import annotations

import gettext
import importlib.util
import zlib
from pathlib import Path

PACKAGES = ("django", "wagtail")  # Not imported: their catalogues are read.
HELD_OUT = 10  # One sentence of that many is kept for evaluation.
Pair = dict[str, str]  # Language -> sentence.


def load_pairs(source: str, target: str) -> tuple[list[Pair], list[Pair]]:
    """All sentences that both languages have, in two parts: to train on, and held out. The same in every process."""
    catalogues = {language: catalogue(language) for language in (source, target) if language != "en"}
    shared = sorted(set.intersection(*(set(one) for one in catalogues.values())))
    if not shared:
        raise SystemExit(f"{' and '.join(PACKAGES)} have no sentences in both {source!r} and {target!r}.")
    parts: tuple[list[Pair], list[Pair]] = ([], [])
    for key in shared:
        pair = {
            language: catalogues[language][key] if language in catalogues else key for language in (source, target)
        }
        parts[zlib.crc32(key.encode()) % HELD_OUT == 0].append(pair)
    return parts


def catalogue(language: str) -> dict[str, str]:
    """The English sentences of the packages, and their translations."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(
                "The sentences are those of two packages: pip install --no-deps Django==5.2.19 wagtail==8.0.1"
            )
        folder = Path(spec.submodule_search_locations[0])
        for path in sorted(folder.glob(f"**/locale/{language}/LC_MESSAGES/*.mo")):
            with path.open("rb") as file:
                messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            for message, text in messages.items():
                english = message[0] if isinstance(message, tuple) else message  # Plural forms have a number.
                english = english.split("\x04")[-1]  # A context comes before it.
                if english.strip() and text.strip():
                    found.setdefault(english, text)
    return found
