"""Documents stay true: links lead somewhere, commands parse, code compiles, examples run.

Every fenced block says its language. A word behind the language names a file (`json zero3.json`), and `bash run` marks
commands that the slow test really runs, in an empty folder, with the page's files in it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_zero.extras.cli.main import build_parsers
from tests.harness import torchao_path
from tests.harness.scripts import run_hf_zero, run_script

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RESULTS.md")),
    *GUIDES,
    *sorted([*ROOT.glob("recipes/*.md"), *ROOT.glob("recipes/*/*.md")]),  # deeper lies what runs have left
    ROOT / "conversion" / "README.md",
]
RUN_PER_CHANGE = ("README", "launching", "pipeline")  # the examples of other guides run at night
LANGUAGES = {"python", "json", "yaml", "bash", "text"}
README_LINES = 150
OPENING_LINES = 12  # an example begins within so many lines of a guide's title
GLOSSARY_TERMS = 25


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=label)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the word behind it, its text and the line it begins at."""

    language: str
    word: str
    text: str
    line: int


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    found, opened, lines = [], None, page.read_text().splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        language, _, word = lines[opened][3:].partition(" ")
        found.append(Block(language, word, "\n".join(lines[opened + 1 : number]) + "\n", opened + 1))
        opened = None
    assert opened is None, f"{page}:{opened}: the block has no end"
    return tuple(found)


@functools.cache
def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Inline code."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


# -------------------------------------------------------------------- form
def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@each_page
def test_pages_are_ascii(page: Path) -> None:
    odd = {character for character in page.read_text() if ord(character) > 127}
    assert not odd, odd


@each_page
def test_every_block_says_its_language(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{label(page)}:{block.line}: ```{block.language}"


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_guides_begin_with_an_example(page: Path) -> None:
    assert blocks(page)[0].line <= OPENING_LINES


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_readme_names_every_guide(page: Path) -> None:
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()


def test_the_glossary_is_short() -> None:
    section = re.search(r"^## Glossary\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.M)
    assert section is not None
    rows = [line for line in section[1].splitlines() if line.startswith("| ")][1:]
    assert 10 <= len(rows) <= GLOSSARY_TERMS, len(rows)


# -------------------------------------------------------------------- links
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, prose(page)) == []


def test_broken_links_are_found() -> None:
    readme = ROOT / "README.md"
    assert broken_links(readme, "[a](docs/none.md) [b](#no-such-heading) [c](docs/offload.md#keys)") == [
        "docs/none.md",
        "#no-such-heading",
    ]


FOLDERS = ("scripts/", "recipes/", "conversion/", "docs/", "tests/", "hf_zero/")


@each_page
def test_paths_of_the_repository_exist(page: Path) -> None:
    """Words such as scripts/test.sh, in prose and in blocks."""
    for word in re.findall(r"(?<![\w/.])[\w./-]+", page.read_text()):
        path = word.rstrip(".")
        if path.startswith(FOLDERS) and not path.endswith("/") and "." in Path(path).name:
            assert (ROOT / path).exists() or (page.parent / path).exists(), f"{label(page)}: {path}"


# -------------------------------------------------------------------- Python
def dotted(node: ast.expr) -> list[str]:
    """["hf_zero", "zero", "Init"] of an attribute chain; [] of anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def resolve(names: Iterable[str]) -> Any:
    """The object behind a dotted name of hf_zero; raises AttributeError or ImportError where there is none."""
    path, *rest = names
    value: Any = importlib.import_module(path)
    for name in rest:
        path += f".{name}"
        try:
            value = getattr(value, name)
        except AttributeError:
            if not isinstance(value, type(sys)):
                raise
            value = importlib.import_module(path)
    return value


def check_names(source: str) -> None:
    """Raise Wrong where the source takes from hf_zero what is not there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_zero":
            for alias in node.names:
                resolve([*(node.module or "").split("."), alias.name])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hf_zero":
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.Attribute) and dotted(node)[:1] == ["hf_zero"]:
            resolve(dotted(node))


@each_page
def test_python_compiles_and_its_names_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{label(page)}:{block.line}", "exec")
            check_names(block.text)


@each_page
def test_names_in_inline_code_exist(page: Path) -> None:
    for span in spans(page):
        for name in re.findall(r"(?<![\w./-])hf_zero(?:\.[A-Za-z]\w*)+(?![\w*/])", span):
            if not name.endswith((".md", ".lines", ".start")):  # the last two are loggers
                resolve(name.split("."))
        if match := re.fullmatch(r"from (hf_zero[\w.]*) import ([\w, ]+)", span):
            check_names(match[0])


def test_wrong_names_are_found() -> None:
    for source in ("from hf_zero import Trianer", "import hf_zero\nhf_zero.no_such_name()", "import hf_zero.nothing"):
        with pytest.raises((AttributeError, ImportError)):
            check_names(source)


# -------------------------------------------------------------------- JSON
DEEPSPEED_KEYS = {"zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "train_micro_batch_size_per_gpu"}


@each_page
def test_json_is_a_valid_configuration(page: Path) -> None:
    from hf_zero import ZeroConfig

    for block in blocks(page):
        if block.language == "json":
            content = json.loads(block.text)
            if DEEPSPEED_KEYS & set(content):
                ZeroConfig.load(content)


def test_wrong_configurations_are_found() -> None:
    from hf_zero import ConfigError, ZeroConfig

    with pytest.raises(ConfigError, match="gradient_clipping"):
        ZeroConfig.load({"zero_optimization": {"stage": 3}, "gradient_cliping": 1.0})


# -------------------------------------------------------------------- commands
class Parsed(Exception):
    """Raised instead of going on after the arguments are parsed."""


@contextlib.contextmanager
def only_parsing() -> Iterator[None]:
    """Programs end by `Parsed` when their arguments are parsed, and by SystemExit when these are wrong."""

    def stop_after(real: Any) -> Any:
        def parse(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            raise Parsed

        return parse

    with contextlib.ExitStack() as stack:
        for name in ("parse_args", "parse_intermixed_args"):
            real = getattr(argparse.ArgumentParser, name)
            stack.enter_context(mock.patch.object(argparse.ArgumentParser, name, stop_after(real)))
        yield


@functools.cache
def training_options() -> frozenset[str]:
    """The options of a Trainer script that takes TrainingArguments, and those that DeepSpeed's scripts have."""
    import transformers

    import hf_zero

    parsers = (
        transformers.HfArgumentParser(hf_zero.TrainingArguments),
        hf_zero.add_config_arguments(argparse.ArgumentParser()),
    )
    return frozenset(option for parser in parsers for action in parser._actions for option in action.option_strings)


@functools.cache
def script_options(script: str) -> frozenset[str]:
    """The options that `SCRIPT --help` names."""
    done = io.StringIO()
    with contextlib.redirect_stdout(done), contextlib.suppress(SystemExit), program(script, ["--help"]):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return frozenset(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", done.getvalue()))


@contextlib.contextmanager
def program(script: str, arguments: list[str]) -> Iterator[None]:
    path = [str(ROOT / Path(script).parent), str(ROOT), *sys.path]
    with mock.patch.object(sys, "argv", [script, *arguments]), mock.patch.object(sys, "path", path):
        yield


def complete(words: list[str]) -> bool:
    return not any("..." in word for word in words)


class Wrong(AssertionError):
    """A command that would not run."""


def check_options(words: list[str], known: Iterable[str], what: str) -> None:
    for word in words:
        option = word.split("=")[0]
        if re.fullmatch(r"--?[A-Za-z][\w-]*", option) and option not in set(known):
            raise Wrong(f"{what} has no option {option}")


def check_hf_zero(words: list[str], page: Path) -> None:
    from hf_zero.extras.cli.main import main

    if not words or words[0] == "...":
        return
    if words[0] == "launch":
        split = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
        if split is not None:
            check_script(words[split:], page)
    if words[:2] == ["config", "resolve"]:
        split = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
        help_text = run_help(main, ["config", "resolve", "--help"])
        known = {*re.findall(r"--[\w-]+", help_text), *training_options()}
        check_options([word for word in words[split:] if word != "..."], known, "hf-zero config resolve")
        return
    if complete(words):
        run_parser(main, words, "hf-zero")
    else:
        check_options(words[1:], re.findall(r"--?[\w-]+", run_help(main, [words[0], "--help"])), f"hf-zero {words[0]}")


def run_help(main: Any, arguments: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(arguments)
    return text.getvalue()


def run_parser(main: Any, arguments: list[str], what: str) -> None:
    """`main(arguments)` until its arguments are parsed."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), only_parsing():
        try:
            main(arguments)
        except Parsed:
            return
        except SystemExit as left:
            if left.code:
                raise Wrong(f"{what} {shlex.join(arguments)}: {errors.getvalue()}") from None


def check_script(words: list[str], page: Path) -> None:
    """A script and its arguments: one of the repository, one of the page, or one that stands for the reader's."""
    script, *arguments = words
    if script == "-m":
        check_module(arguments, page)
    elif script == "hf-zero":
        check_hf_zero(arguments, page)
    elif script.startswith(("scripts/", "recipes/")):
        if not (ROOT / script).is_file():
            raise Wrong(f"there is no {script}")
        check_options([word for word in arguments if word != "..."], script_options(script), script)
    elif script.endswith(".py"):
        own = [block.text for block in blocks(page) if block.language == "python" and block.word == script]
        known = set(re.findall(r"\"(--[\w-]+)\"", own[0])) if own else set()
        check_options([word for word in arguments if word != "..."], known | training_options(), script)
    elif not re.fullmatch(r"\.\.\.|--.*|[A-Z_]+", script):
        raise Wrong(f"{script}: what is run?")


def check_module(words: list[str], page: Path) -> None:
    name, *arguments = words
    if name == "hf_zero.run":
        import hf_zero.run

        run_parser(hf_zero.run.main, arguments, "hf_zero.run")
        split = next((n for n, word in enumerate(arguments) if word.endswith(".py")), None)
        if split is not None:
            check_script(arguments[split:], page)
    elif name.startswith("recipes."):
        check_script([name.replace(".", "/") + ".py", *arguments], page)
    elif name not in ("pytest", "venv", "tests.test_public_surface", "my_package.train"):
        raise Wrong(f"python -m {name}: what is this?")


def check_launcher(parser: argparse.ArgumentParser, words: list[str], page: Path, what: str) -> None:
    """Check a line of torchrun or accelerate launch: their own options up to the script, then the script's."""
    known = {option: action for action in parser._actions for option in action.option_strings}
    while words and words[0].startswith("-") and words[0] != "-m":
        option, equals, _ = words.pop(0).partition("=")
        if option not in known:
            raise Wrong(f"{what} has no option {option}")
        if known[option].nargs != 0 and not equals:
            words.pop(0)
    if words and words != ["..."]:
        check_script(words if words[0] != "..." else words[1:], page)


SHELL = {
    "export",
    "cd",
    ".",
    "source",
    "pip",
    "git",
    "mkdir",
    "mkdocs",
    "nvidia-smi",
    "sbatch",
    "srun",
    "ruff",
    "bash",
    "mpirun",
}


def check_command(line: str, page: Path) -> None:
    """One command line. Raises Wrong."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_0-9]+=\S*", words[0]):
        words.pop(0)
    if not words:
        return
    first, *rest = words
    if first == "hf-zero":
        check_hf_zero(rest, page)
    elif first == "torchrun":
        from torch.distributed.run import get_args_parser

        check_launcher(get_args_parser(), rest, page, first)
    elif words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        check_launcher(launch_command_parser(), rest[1:], page, "accelerate launch")
    elif first == "python":
        check_script(rest, page)
    elif first.startswith(("scripts/", ".ci/")):
        if not os.access(ROOT / first, os.X_OK):
            raise Wrong(f"there is no program {first}")
        known = re.findall(r"--[\w-]+", (ROOT / first).read_text())
        check_options([word for word in rest if word.startswith("--")], known, first)
    elif first not in SHELL:
        raise Wrong(f"{first}: an unknown program")


def commands(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [part for line in lines for part in re.split(r"&&|\|\|", line) if part.strip()]


@each_page
def test_commands_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language == "bash":
            for line in commands(block):
                try:
                    check_command(line, page)
                except Wrong as error:
                    raise AssertionError(f"{label(page)}:{block.line}: {line.strip()}\n{error}") from None


@each_page
def test_commands_in_inline_code_parse(page: Path) -> None:
    """A command's name alone is also right."""
    for span in spans(page):
        if re.fullmatch(r"hf-zero( [a-z-]+)+|python -m hf_zero\.\w+", span):
            check_command(f"{span} --help", page)
        elif re.match(r"hf-zero [a-z]|python scripts/|python -m hf_zero|torchrun \S+ \S|scripts/\w+\.sh", span):
            check_command(span, page)


@pytest.mark.parametrize(
    "line",
    [
        "hf-zero estimate config.json --gpu 8",
        "hf-zero estmate config.json",
        "hf-zero config resolve zero3.json --learning_rat 2e-5",
        "hf-zero launch --num_gpu 2 train.py",
        "hf-zero launch --num_gpus 2 train.py --zeroo zero3.json",
        "python scripts/bench_step.py --round 3",
        "python scripts/no_such_script.py",
        "torchrun --nproc_per_node 2 recipes/causal_lm/train.py --blocklength 3",
        "torchrun --nproc 2 train.py --zero_3 zero3.json",
        "torchrun --no_such_option 2 train.py",
        "accelerate launch --num_procs 2 train.py",
        "torchrun --nproc_per_node 2 -m hf_zero.run --config zero3.json script.py",
        "scripts/test.sh --quick",
        "scripts/nothing.sh",
        "hfzero report",
    ],
)
def test_wrong_commands_are_found(line: str) -> None:
    with pytest.raises(Wrong):
        check_command(line, ROOT / "README.md")


# -------------------------------------------------------------------- running
RUNNABLE = [
    page for page in [ROOT / "README.md", *GUIDES] if page.is_file() and any(b.word == "run" for b in blocks(page))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=label(page), marks=[] if page.stem in RUN_PER_CHANGE else pytest.mark.nightly)
        for page in RUNNABLE
    ],
)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """The examples run as printed, on CPU processes. A text block right behind a command is what it prints."""
    if "torchao" in page.read_text():  # it says that this is to be installed
        for package in torchao_path.FOLDER.glob("torchao*"):
            (tmp_path / package.name).symlink_to(package)
    for block in blocks(page):
        if block.word and block.word != "run":
            (tmp_path / block.word).write_text(block.text)
    for block, following in itertools.zip_longest(blocks(page), blocks(page)[1:]):
        if block.language == "bash" and block.word == "run":
            out = "".join(run_forked(shlex.split(line), tmp_path) for line in block.text.splitlines())
            expected = following.text if following is not None and following.language == "text" else ""
            for wanted in expected.splitlines():
                assert wanted in out, f"{wanted!r} was not printed:\n{out}"


def run_forked(line: list[str], folder: Path) -> str:
    """`hf-zero launch` starts the ranks that it would start, any other command is a process: forked, without the
    imports of a fresh one, which cost more than the example. The launch lines of README are launched for real."""
    assert line[0] == "hf-zero", line
    if line[1] == "launch":
        options = build_parsers().commands["launch"].parse_args(line[2:])
        script, arguments = folder / options.script, options.script_arguments
        ran = run_script(script, *arguments, folder=folder, processes=options.num_gpus, ACCELERATE_USE_CPU="true")
    else:
        ran = run_hf_zero(*line[1:], folder=folder)
    assert not any(ran.status), f"{line}\n{ran.out}\n{ran.err}"
    return ran.out


@pytest.mark.slow
def test_the_picture_is_current(tmp_path: Path) -> None:
    """Its numbers are those that hf-zero estimate gives now; README says the command that draws it again."""
    drawn, kept = tmp_path / "memory.svg", ROOT / "docs" / "images" / "memory_by_stage.svg"
    run_hf_zero("estimate", kept.with_name("llama-7b.json"), "--gpus", 8, "--plot", drawn, folder=tmp_path)
    words, expected = (re.findall(r"<text[^>]*>([^<]*)<", file.read_text()) for file in (kept, drawn))
    assert words == expected and len([word for word in words if word.endswith(" GB")]) == 14


def test_the_first_programs_are_those_of_the_recipe() -> None:
    """README and three guides show the files whole, so that a reader may copy them or run them where they are."""
    shown = 0
    for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("trainer", "accelerate", "trl"))):
        for block in blocks(page):
            file = ROOT / "recipes" / "first_steps" / block.word
            if block.word and file.is_file():
                assert block.text == file.read_text(), f"{label(page)}: {block.word}"
                shown += 1
    assert shown == 8


def test_every_guide_runs_its_example() -> None:
    assert set(GUIDES) <= set(RUNNABLE)
