"""Gives mkdocs the pages of the docs site: the Markdown files of the repository, and an API reference.

The address of a page is its path in the repository, so a link between two files works on the site as on GitHub. The
reference names what the public modules export, so no list of names has to be kept.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Not what lies deeper in a recipe: runs leave model cards there.
PAGES = ("*.md", "docs/*.md", "recipes/*.md", "recipes/*/*.md", "conversion/README.md", "hf_zero/config/SUPPORTED.md")
PUBLIC_MODULES = ("hf_zero", "hf_zero.optim", "hf_zero.pipeline", "hf_zero.estimate")

# A search for a message leads to its remedy, one for a key to its sentence, before pages that only mention it.
SEARCH_BOOSTS = {
    "docs/troubleshooting.md": 20,
    "hf_zero/config/SUPPORTED.md": 2,
    "RESULTS.md": 0.5,
    "CHANGELOG.md": 0.5,
}

# Page -> its title, and prefixes of the modules whose names it has, in that order; the first one that fits counts.
REFERENCE = {
    "api/trainer.md": ("Trainer, Accelerate and models", ("hf_zero.hf.trainer.", "hf_zero.hf.")),
    "api/engine.md": (
        "Engine",
        ("hf_zero.engine.initialize", "hf_zero.engine.", "hf_zero.config", "hf_zero.distributed."),
    ),
    "api/values.md": ("Sharded values", ("hf_zero.access.",)),
    "api/weights.md": ("Weights of a checkpoint", ("hf_zero.checkpoint.", "hf_zero.extras.deepspeed.zero_to_fp32")),
    "api/errors.md": ("Errors and logs", ("hf_zero.errors", "hf_zero.logs")),
    "api/optim.md": ("Optimizers and schedules", ("hf_zero.optim.",)),
    "api/pipeline.md": ("Pipelines", ("hf_zero.extras.pipeline.",)),
    "api/estimate.md": ("Memory estimates", ("hf_zero.estimate",)),
    "api/more.md": ("Other names", ("hf_zero",)),
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all pages, what they link to, and the reference."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    pages = {page for pattern in PAGES for page in ROOT.glob(pattern)}
    for path in sorted(pages | {target for page in pages for target in linked_files(page)}):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for name, text in reference_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def linked_files(page: Path) -> set[Path]:
    """The pictures and scripts of the repository that `page` links to."""
    targets = (page.parent / target for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text()))
    return {target.resolve() for target in targets if target.is_file() and target.suffix != ".md"}


def reference_pages() -> dict[str, str]:
    """Name -> text of the pages of the reference."""
    public_names = defaultdict(list)  # of one object, where it lies -> which of its names are public
    for public in map(importlib.import_module, PUBLIC_MODULES):
        for name in public.__all__ if hasattr(public, "__all__") else public._EXPORTS:
            module = getattr(public, "_EXPORTS", {}).get(name, public.__name__)
            public_names[f"{module}.{name}"].append(f"{public.__name__}.{name}")
    pages = {page: f"# {title}\n" for page, (title, _) in REFERENCE.items()}
    places = [(page, prefix) for page, (_, prefixes) in REFERENCE.items() for prefix in prefixes]
    for path in sorted(public_names, key=lambda path: _place(path, places)):
        names, page = public_names[path], places[_place(path, places)][0]
        anchors = "".join(f"[](){{#{name}}}" for name in names)
        pages[page] += f"\n{anchors}\n\n::: {path}\n    options:\n      heading: {', '.join(names)}\n"
    return pages


def _place(path: str, places: Sequence[tuple[str, str]]) -> int:
    return next(number for number, (_, prefix) in enumerate(places) if path.startswith(prefix))


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Write "json zero3.json" behind a fence in mkdocs' way, as a title; "run" is a word for the tests alone."""
    page.meta["search"] = {"boost": SEARCH_BOOSTS.get(page.file.src_uri, 1)}
    markdown = re.sub(r"^```(\w+) run$", r"```\1", markdown, flags=re.MULTILINE)
    return re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
