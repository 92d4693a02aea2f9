"""The command line: exit status, one line on stderr for a mistake, JSON for programs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hf_zero.checkpoint import consolidate as script
from hf_zero.checkpoint.format import manifest_path, zero_folder
from hf_zero.extras.cli import report
from hf_zero.extras.cli.main import COMMANDS, main
from hf_zero.extras.cli.text import format_bytes, plural
from tests.harness.checkpoints import make_model, save

Capture = pytest.CaptureFixture[str]


def fails(capsys: Capture, *arguments: object) -> tuple[int, str]:
    """Exit status and the line on stderr; nothing may be on stdout."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as left:
        assert isinstance(left.code, int)
        status = left.code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("hf-zero")
    return status, captured.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "hf-zero: error: the following arguments are required: COMMAND (see hf-zero --help)"),
        ("consolidat", "invalid choice: 'consolidat'"),
        ("consolidate", "hf-zero consolidate: error: the following arguments are required: CKPT"),
        ("consolidate c --shard-size lots", "'lots' is not a size such as 5GB, 500MB or 2GiB"),
        ("consolidate c --shard-size 0", "'0' is not a size"),
        ("consolidate c --dtype int8", "invalid choice: 'int8'"),
        ("consolidate c w.bin --shard-size 1GB", "--shard-size is for a folder, and w.bin is one file"),
        ("inspect c --verfy", "unrecognized arguments: --verfy"),
        ("report now", "unrecognized arguments: now"),
    ],
)
def test_bad_usage_is_status_2(capsys: Capture, arguments: str, text: str) -> None:
    status, line = fails(capsys, *arguments.split())
    assert status == 2
    assert text in line
    assert "--help)" in line


def test_failed_jobs_are_status_1(capsys: Capture, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", make_model(), 2)
    folder = tmp_path / "checkpoint-2"
    path = zero_folder(folder) / "rank-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    for command in (["inspect", folder, "--verify"], ["consolidate", folder]):
        status, line = fails(capsys, *command)
        assert status == 1
        assert f"{path} is damaged: wrong checksum, block 0 of " in line
    path.unlink()
    for name in ("inspect", "consolidate"):
        status, line = fails(capsys, name, folder)
        assert status == 1
        assert line.startswith(f"hf-zero {name}: error: {folder} is not complete: {path} is missing")
        assert line.endswith(f"The newest complete checkpoint beside it is {tmp_path}/checkpoint-1.\n")
    manifest_path(folder).unlink()
    for arguments in (["inspect", folder], ["consolidate", tmp_path, "--tag", "checkpoint-2"]):
        status, line = fails(capsys, *arguments)
        assert status == 1
        assert f"{folder}/zero/manifest.json is missing" in line
    status, line = fails(capsys, "inspect", tmp_path / "nowhere")
    assert status == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_help_shows_examples_of_every_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert command.NAME in overview
        with pytest.raises(SystemExit) as left:
            main([command.NAME, "--help"])
        assert left.value.code == 0
        text = capsys.readouterr().out
        examples = command.EXAMPLES.strip().splitlines()
        assert examples
        for example in examples:
            assert example.startswith(f"hf-zero {command.NAME}")
            assert f"  {example}\n" in text


def test_consolidate(capsys: Capture, tmp_path: Path) -> None:
    folder, out = tmp_path / "run" / "step-5", tmp_path / "out"
    save(folder, make_model(), 2)
    assert main(["consolidate", str(folder.parent), "--tag", "step-5", "--dtype", "bf16"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"are in {folder}/consolidated\n" in captured.out
    assert f"no config.json in {folder}" in captured.out
    (folder / "config.json").write_text("{}")
    assert main(["consolidate", str(folder), "--shard-size", "1kB", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["out"] == str(out)
    assert summary["files"] == sorted(path.name for path in out.glob("*.safetensors"))
    assert len(summary["files"]) > 1
    assert summary["dtypes"] == ["bfloat16", "bool", "float32", "float64", "int64"]


def test_force_replaces_an_earlier_output_only(capsys: Capture, tmp_path: Path) -> None:
    folder, out = tmp_path / "c", tmp_path / "out"
    save(folder, make_model(1), 2)
    assert main(["consolidate", str(folder), str(out), "--shard-size", "1kB"]) == 0
    capsys.readouterr()
    assert fails(capsys, "consolidate", folder, out) == (
        1,
        f"hf-zero consolidate: error: {out} exists already: choose another place, or replace it with --force\n",
    )
    path = zero_folder(folder) / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    status, _ = fails(capsys, "consolidate", folder, out, "--force")
    assert status == 1
    assert (out / "model.safetensors.index.json").exists(), "the earlier output is back after a failure"
    path.write_bytes(content)
    assert main(["consolidate", str(folder), str(out), "--force"]) == 0
    capsys.readouterr()
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    (out / "notes.md").write_text("mine")
    for place, text in ((out, "it also holds notes.md"), (tmp_path, "holds the checkpoint itself")):
        status, line = fails(capsys, "consolidate", folder, place, "--force")
        assert status == 1
        assert text in line
    single = tmp_path / "w.safetensors"
    single.write_text("old")
    assert main(["consolidate", str(folder), str(single), "--force"]) == 0
    assert load_file(single)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "out", "w.safetensors"]


def test_inspect(capsys: Capture, tmp_path: Path) -> None:
    model = make_model()
    save(tmp_path / "c", model, 3)
    assert main(["inspect", str(tmp_path / "c"), "--verify", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["stage"], summary["world_size"], summary["global_step"]) == (3, 3, 20)
    assert summary["parameters"] == sum(param.numel() for param in model.params.values())
    frozen = sum(param.numel() for name, param in model.params.items() if name.startswith("embedding"))
    assert summary["trainable_parameters"] == summary["parameters"] - frozen
    assert summary["verified"] is True
    assert summary["state"]["exp_avg float64"] == 7
    assert summary["bytes"] == sum(path.stat().st_size for path in zero_folder(tmp_path / "c").glob("rank-*"))
    assert main(["inspect", str(tmp_path / "c")]) == 0
    text = capsys.readouterr().out
    for part in (
        "stage 3, in 3 parts",
        f"{summary['parameters']:,} in 32 tensors, 1 tied name",
        "rank-00002.safetensors",
    ):
        assert part in text
    assert "not compared (--verify does)" in text


def test_report(capsys: Capture) -> None:
    assert main(["report", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"].startswith("2.")
    assert facts["torch"]["backends"]["gloo"] is True
    assert set(facts["torch"]["built_for"]) >= {"cuda", "hip", "xpu"}, "what torch.version has"
    assert facts["torch"]["devices"] == [] or facts["torch"]["devices"][0]["name"]
    assert facts["cpu"]["cores"] >= 1
    assert facts["native_library"].endswith(".so") and facts["io_engine"] in ("io_uring", "threads")
    assert main(["report"]) == 0
    assert "native library" in capsys.readouterr().out


def test_commands_for_files_do_not_load_torch(tmp_path: Path) -> None:
    save(tmp_path / "c", make_model(), 2)
    code = """
        import sys
        from hf_zero.extras.cli.main import main
        for arguments in (["inspect", "c", "--verify"], ["consolidate", "c"]):
            assert main(arguments) == 0
        assert not {"torch", "transformers"} & set(sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_error_of_no_file_keeps_its_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is told in a line; an operation on a descriptor that is closed is a defect."""

    def run(args: object) -> None:
        os.write(descriptor, b"text")

    monkeypatch.setattr(report, "run", run)
    descriptor = os.open("/dev/full", os.O_WRONLY)
    assert main(["report"]) == 1
    assert capsys.readouterr().err.splitlines() == ["hf-zero report: error: [Errno 28] No space left on device"]
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["report"])


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    save(tmp_path / "c", make_model(), 2)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = f"{sys.executable} -m hf_zero.extras.cli.main inspect c --json | true"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_appears_after_two_seconds_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        now = 100.0
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr("time.monotonic", lambda: now)  # noqa: B023
        draw = script.progress_bar("reading")
        now += 1.9
        draw(10**9, 4 * 10**9)
        assert stream.getvalue() == ""
        now += 0.2
        draw(2 * 10**9, 4 * 10**9)
        draw(2 * 10**9, 4 * 10**9)  # not again at once
        draw(4 * 10**9, 4 * 10**9)
        bar = f"\rreading [{'#' * 15}{' ' * 15}] 2.00 of 4.00 GB"
        assert stream.getvalue() == (bar + script.CLEAR_LINE if shown else "")


def test_sizes_are_read_and_written() -> None:
    for text, size in (("5GB", 5e9), ("500 mb", 5e8), ("2GiB", 2**31), ("1.5k", 1500), ("123", 123), ("10B", 10)):
        assert script.parse_bytes(text) == size
    texts = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 999_600: "1 MB", 269_030_016: "269 MB", 1.5e13: "15 TB"}
    for count, text in texts.items():
        assert format_bytes(count) == text
    assert [plural(1, "file"), plural(2000, "file")] == ["1 file", "2,000 files"]


# -------------------------------------------------------------------- files that are none
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
CONTENTS = {
    "deep": DEEP.encode(),
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "empty": b"",
    "NUL bytes": b"\0" * 64,
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "a long number": b'{"a": ' + b"9" * 10_000 + b"}",
    "a float out of range": b'{"a": 1e999}',
    "no object": b"[1, 2]",
    "a folder": None,
}


def put(path: Path, content: bytes | None) -> Path:
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", CONTENTS)
def test_files_that_are_none_are_said_in_a_line(name: str, capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, make_model(), 1)
    file = put(tmp_path / "file.json", CONTENTS[name])
    yaml = put(tmp_path / "file.yaml", CONTENTS[name])
    lines: list[list[object]] = [
        ["consolidate", folder, tmp_path / "out", "--names", file],
        ["estimate", file if name != "a folder" else tmp_path / "nowhere"],
        ["config", "check", file],
        ["convert", "config", file],
        ["convert", "config", yaml],
        ["convert", "from-hf", file, tmp_path / "out"],
        ["convert", "from-deepspeed", file, tmp_path / "out"],
        ["convert", "from-universal", file, tmp_path / "out"],
        ["convert", "from-dcp", file, tmp_path / "out"],
        ["inspect", file],
    ]
    for line in lines:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in line])
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        captured = capsys.readouterr()
        assert status in (1, 2), (line, captured)
        assert captured.err.startswith("hf-zero") or line[0] == "config", (line, captured)
        assert "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CONTENTS)
def test_damage_of_the_files_of_a_checkpoint_is_said_in_a_line(name: str, capsys: Capture, tmp_path: Path) -> None:
    """The damaged file may be any: of the manifest, a rank file, the configuration, and of `latest`."""
    content = CONTENTS[name]
    header = b"" if content is None else len(content).to_bytes(8, "little") + content + b"\0" * 8
    for number, where in enumerate(("zero/manifest.json", "zero/rank-00000.safetensors", "config.json", "latest")):
        folder = tmp_path / f"checkpoint-{number}"
        save(folder, make_model(), 1)
        path = folder / where
        if path.exists():
            path.unlink()
        put(path, content if content is None or "rank" not in where else header)
        if (where, name) in (("latest", "a folder"), ("config.json", "a float out of range")):
            continue  # there is no such file then; Python's JSON has infinity
        status, line = fails(capsys, "consolidate", folder, tmp_path / "out")
        assert status == 1 and str(path) in line, (where, line[:300])
        assert len(line) < 2000 and not (tmp_path / "out").exists()


def test_names_of_another_checkpoint(capsys: Capture, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", make_model(), 1)
    file = tmp_path / "names.json"
    file.write_text('{"model.embed.weight": "0.weight"}')
    status, line = fails(capsys, "consolidate", tmp_path / "checkpoint", tmp_path / "out", "--names", file)
    assert status == 1 and "--names: none of its 1 names (model.embed.weight, ...) is in the checkpoint" in line
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------- the end of a consolidate
SLOWLY = """
import signal, sys, time
import hf_zero.checkpoint.consolidate as script
from hf_zero.extras.cli.main import main
write = script.write_file
def slowly(path, *given, **more):
    write(path, *given, **more)
    print("written", flush=True)
    time.sleep(60)
script.write_file = slowly
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup's this one
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("force", [False, True])
def test_a_signal_leaves_nothing_or_the_next_run_removes_it(
    number: signal.Signals, force: bool, tmp_path: Path, capsys: Capture
) -> None:
    save(tmp_path / "checkpoint", make_model(), 1)
    line = ["consolidate", str(tmp_path / "checkpoint"), str(tmp_path / "out"), *(["--force"] if force else [])]
    if force:
        assert main(line) == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    job = subprocess.Popen([sys.executable, "-c", SLOWLY, *line], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None and job.stdout.readline() == "written\n"
    assert len([*tmp_path.iterdir()]) == len(before) + 1
    began = time.monotonic()
    job.send_signal(number)
    status = job.wait(timeout=30)
    assert status != 0 and time.monotonic() - began < 20
    if number != signal.SIGKILL:
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert main(line) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]
    assert load_file(tmp_path / "out" / "model.safetensors")
