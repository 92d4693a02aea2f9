"""Tokens per second of stages 0-3 beside torch's DDP and FSDP2, by bench_step.py. Its losses are judged."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from smoke_checks import ranks
from smoke_checks.place import LAG
from smoke_checks.rows import NOT_SEEN, OK, Row

OURS, THEIRS = ("zero0", "zero1", "zero2", "zero3"), ("ddp", "fsdp2")
SIZES = {
    "full": "--hidden 2048 --intermediate 5632 --layers 12 --heads 16 --vocab 32768 --seq 1024 --rounds 5 --steps 4",
    "tiny": "--hidden 16 --intermediate 32 --layers 2 --heads 2 --vocab 32 --seq 8 --rounds 1 --steps 2 --warmup 1",
}


def check(device: str, size: str, count: int, folder: Path, limit_s: float) -> Iterator[Row]:
    variants = OURS if device == LAG else THEIRS + OURS
    out = folder / "bench_step.json"
    command = [sys.executable, str(ranks.REPOSITORY / "scripts" / "bench_step.py"), *SIZES[size].split()]
    command += ["--device", device, "--world", str(count), "--variants", ",".join(variants), "--json", str(out)]
    command += ["--dtype", "bf16", "--timeout", str(limit_s)]
    done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["it printed nothing"]
    verdict = next((line for line in lines if line.startswith("losses over")), lines[-1])
    yield Row.judged("bench_step.py: all train alike", done.returncode == 0, verdict[:300])
    if device == LAG:
        yield Row("speed of DDP and FSDP2", NOT_SEEN, "torch's own do not run on the lag device")
    if out.exists():
        result = json.loads(out.read_text())
        tokens = result["settings"]["micro_batch"] * result["settings"]["seq"] * count
        for name, series in result["series"].items():
            seconds = statistics.median(value for steps in series["wall_s"] for value in steps)
            yield Row(f"speed, {name}", OK, f"{tokens / seconds:.0f} tokens/s, {seconds * 1e3:.1f} ms a step")
