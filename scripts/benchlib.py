"""Shared parts of the benchmark scripts: ranks on this machine, memory, the model, measuring in turn, and statistics.

Absolute times on a shared machine are worth little, so variants are measured in one run, a few steps each in turn, and
compared round by round: what slows the machine down for a while slows both sides of a ratio.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parent.parent
_RESULT = "HF_ZERO_BENCH_RESULT"
_PR_SET_PDEATHSIG = 1
# A rank that waits for one that failed gets this long to say so itself.
_GRACE_S = 5.0


# ---------------------------------------------------------------- ranks
def in_rank() -> bool:
    """Whether this process is one of the ranks that `launch` started, or torchrun on several hosts."""
    return _RESULT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def launch(arguments: Sequence[str], world_size: int, *, timeout_s: float, threads: int) -> Any:
    """Run this script once per rank; return what rank 0 passed to `run_rank`. Raises SystemExit if a rank fails."""
    from hf_zero.extras.launcher.node import free_port

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        env = dict(
            os.environ,
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            OMP_NUM_THREADS=str(threads),
            MKL_NUM_THREADS=str(threads),
            GLOO_SOCKET_IFNAME="lo",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            PYTHONPATH=os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        )
        env[_RESULT] = str(result)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                own = dict(env, RANK=str(rank), LOCAL_RANK=str(rank))
                ranks.append(subprocess.Popen([sys.executable, *arguments], env=own))
            problem = _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if problem or not result.exists():
            codes = [process.returncode for process in ranks]
            sys.exit(f"{Path(arguments[0]).name}: {problem or 'no result'}; exit codes {codes}")
        return json.loads(result.read_text())


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait until all ranks have ended; what went wrong, or nothing."""
    while True:
        codes = [process.poll() for process in ranks]
        if all(code == 0 for code in codes):
            return ""
        if any(codes):
            time.sleep(_GRACE_S)
            return "a rank failed"
        if time.monotonic() > deadline:
            return "the time limit (--timeout) is over"
        time.sleep(0.05)


def run_rank(work: Callable[[], Any], device: str = "cpu") -> Any:
    """Join the group, work, and leave, as a rank. Rank 0's result goes to `launch`, or is returned under torchrun.

    `device`: "cpu" (gloo), "accelerator" (each rank its own, with its backend), or "lag", to rehearse that.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives a killed launcher
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    join(device)
    result = work()
    is_first = dist.get_rank() == 0
    if is_first and _RESULT in os.environ:
        Path(os.environ[_RESULT]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    return result if is_first and _RESULT not in os.environ else None


def join(device: str) -> None:
    if device == "cpu":
        dist.init_process_group("gloo")
        return
    from smoke_checks import place

    import hf_zero

    if place.prepare(device) is None:
        sys.exit("torch finds no accelerator here that it can use")
    hf_zero.init_distributed()


def compute_device(device: str) -> torch.device:
    """The device of this rank, once it has joined."""
    return torch.device("cpu") if device == "cpu" else _accelerator()


def _accelerator() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def run_job(
    python: str, ranks: int, arguments: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> None:
    """Run a script under torchrun, by any interpreter. Raises SystemExit with its last words if it fails."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    call = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *arguments]
    done = subprocess.run(
        call, env={**os.environ, **own, **(env or {})}, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        sys.exit(f"{' '.join(call)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def has_deepspeed(python: str) -> bool:
    """Whether the interpreter has DeepSpeed; the versions, or that it is missing, are printed."""
    call = [python, "-c", "import deepspeed, torch; print(deepspeed.__version__, torch.__version__)"]
    done = subprocess.run(call, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True)
    if done.returncode:
        print(f"DeepSpeed is not installed for {python} (extra [peers], or --peers-python): it is left out")
    else:
        print(f"DeepSpeed and its torch: {done.stdout.splitlines()[-1]}")
    return done.returncode == 0


# ---------------------------------------------------------------- memory
def resident(field: str = "RssAnon", pid: int | str = "self") -> int:
    """Return the bytes of a field of /proc/PID/status: VmRSS, VmHWM (the peak), RssAnon; 0 after the process's end."""
    found = re.search(rf"^{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found[1]) << 10 if found else 0


def restart_peak() -> int:
    """Let VmHWM start from the resident bytes of now, and return these."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return resident("VmRSS")


def anonymous_peak() -> int:
    """Return the peak resident bytes since `restart_peak`, without those of libraries and of files' cached pages."""
    return resident("VmHWM") - resident("RssFile") - resident("RssShmem")


def tell(args: argparse.Namespace, result: Mapping[str, Any], text: str) -> None:
    """Print `text`, and with --json FILE write the result there; "-" prints the result instead."""
    if args.json:
        data = json.dumps({"settings": vars(args), "environment": environment(), **result}, indent=1)
        if args.json == "-":
            print(data)
            return
        Path(args.json).write_text(data + "\n")
    print(text)


# ---------------------------------------------------------------- model and data
@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A Llama with random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelSize:
        """The size that the arguments of `size_arguments` name."""
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})

    def build(self, seed: int = 0) -> torch.nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocab,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            use_cache=False,
        )
        model: torch.nn.Module = LlamaForCausalLM(config)
        return model.train()


def make_batch(vocab: int, shape: tuple[int, int], rank: int, step: int) -> dict[str, torch.Tensor]:
    """Random tokens, different on every rank and in every step, the same for every variant."""
    generator = torch.Generator().manual_seed(100_003 * rank + step)
    ids = torch.randint(0, vocab, shape, generator=generator)
    return {"input_ids": ids, "labels": ids}


# ---------------------------------------------------------------- measuring
class Variant(Protocol):
    """One way to train; `forward`, `backward` and `update` together are a step.

    What a step leaves running is waited for by `finish`, if there is one; that counts into the last step of a round.
    """

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def update(self) -> None: ...


class ZeroLoop:
    """The plain loop of hf_zero, or of another library with these calls."""

    library = "hf_zero"

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
        initialize = importlib.import_module(self.library).initialize
        self.engine = initialize(model=model, optimizer=optimizer, config=config)[0]

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


PASSES = ("forward", "backward", "update")


@dataclasses.dataclass
class Series:
    """The measures of one variant: on one rank, and after `over_ranks` on all of them."""

    wall_s: list[list[float]] = dataclasses.field(default_factory=list)  # [round][step]; the slowest rank's
    passes_s: list[list[list[float]]] = dataclasses.field(default_factory=list)  # [round][step][PASSES], CPU
    cpu_s: list[float] = dataclasses.field(default_factory=list)  # [round], per step; the sum over ranks
    faults: list[float] = dataclasses.field(default_factory=list)  # [round], minor page faults per step; the sum
    busy_s: list[float] = dataclasses.field(default_factory=list)  # [round], per step; of all cores, by anybody
    losses: list[float] = dataclasses.field(default_factory=list)  # of every step since the start; the mean
    sent: list[float] = dataclasses.field(default_factory=list)  # [round], bytes per step that leave rank 0's host

    def round_s(self) -> list[float]:
        return [statistics.median(steps) for steps in self.wall_s]

    def pass_s(self, number: int) -> float:
        """CPU seconds of one of PASSES, the least of all steps: other processes only add to it."""
        return min(step[number] for steps in self.passes_s for step in steps)

    def mean_round_s(self) -> list[float]:
        """The mean of every round, for variants where work of one step is done in another one."""
        return [statistics.mean(steps) for steps in self.wall_s]

    def step_s(self) -> float:
        return statistics.median(value for steps in self.wall_s for value in steps)


def measure_in_turn(
    variants: Mapping[str, Variant],
    batch_of: Callable[[str, int], dict[str, torch.Tensor]],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    say: Callable[[str], None],
) -> dict[str, Series]:
    """Let every variant take `steps` steps per round, in reversed order every other round. All ranks must call."""
    series = {name: Series() for name in variants}
    for name, variant in variants.items():
        for _ in range(warmup):
            batch = batch_of(name, len(series[name].losses))
            loss = variant.forward(batch)
            variant.backward(loss)
            variant.update()
            series[name].losses.append(loss.item())
        say(f"warmed up {name}")
    gc.collect()
    gc.freeze()  # the collector need not walk through the other variants' objects in every measured step
    names = list(variants)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            batches = [batch_of(name, len(series[name].losses) + i) for i in range(steps)]
            _measure(variants[name], batches, series[name])
        say(f"round {number + 1} of {rounds}")
    return {name: _over_ranks(mine) for name, mine in series.items()}


def _measure(variant: Variant, batches: Sequence[dict[str, torch.Tensor]], series: Series) -> None:
    losses, wall, passes = [], [], []
    dist.barrier()
    before, busy, sent = resource.getrusage(resource.RUSAGE_SELF), _busy_s(), _sent_bytes()
    for batch in batches:
        dist.barrier()
        start, times = time.perf_counter(), [time.process_time()]
        loss = variant.forward(batch)
        times.append(time.process_time())
        variant.backward(loss)
        times.append(time.process_time())
        variant.update()
        times.append(time.process_time())
        losses.append(loss.detach())
        wall.append(time.perf_counter() - start)
        passes.append([after - before for before, after in itertools.pairwise(times)])
    if hasattr(variant, "finish"):
        start = time.perf_counter()
        variant.finish()
        wall[-1] += time.perf_counter() - start
    if losses[-1].device.type != "cpu":  # the host runs ahead: what is left counts into the last step
        start = time.perf_counter()
        torch.accelerator.synchronize()
        wall[-1] += time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    series.busy_s.append((_busy_s() - busy) / len(batches))
    series.wall_s.append(wall)
    series.passes_s.append(passes)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    series.cpu_s.append(cpu / len(batches))
    series.faults.append((after.ru_minflt - before.ru_minflt) / len(batches))
    series.losses.extend(loss.item() for loss in losses)
    dist.barrier()
    series.sent.append((_sent_bytes() - sent) / len(batches))


def _sent_bytes() -> int:
    """The bytes that have left this host: through all of its interfaces but the loopback."""
    return sum(one.bytes_sent for name, one in psutil.net_io_counters(pernic=True).items() if name != "lo")


def _over_ranks(mine: Series) -> Series:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    rounds = zip(*(rank.wall_s for rank in everyone), strict=True)
    passes = zip(*(rank.passes_s for rank in everyone), strict=True)
    return Series(
        [[max(step) for step in zip(*steps, strict=True)] for steps in rounds],
        [[[max(one) for one in zip(*ranks, strict=True)] for ranks in zip(*steps, strict=True)] for steps in passes],
        [sum(values) for values in zip(*(rank.cpu_s for rank in everyone), strict=True)],
        [sum(values) for values in zip(*(rank.faults for rank in everyone), strict=True)],
        mine.busy_s,
        [statistics.mean(values) for values in zip(*(rank.losses for rank in everyone), strict=True)],
        mine.sent,
    )


def _busy_s() -> float:
    """The seconds that the cores of this machine have worked since boot."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def cores_of_others(series: Iterable[Series]) -> float:
    """The cores that others kept busy meanwhile: the noise of the run. Median over blocks."""
    blocks = [
        (busy - cpu) / statistics.mean(wall)
        for one in series
        for busy, cpu, wall in zip(one.busy_s, one.cpu_s, one.wall_s, strict=True)
    ]
    return max(0.0, statistics.median(blocks))


def nbytes(tensors: Iterable[Any]) -> int:
    """The bytes of memory behind `tensors` on this rank, shared memory once; DTensors count their local part."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


# ---------------------------------------------------------------- reporting
def paired(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def spread(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Quartiles over rounds of the ratio within a round."""
    ratios = sorted(a / b for a, b in zip(values, base, strict=True))
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text columns; the first one is left-justified."""
    lines = [list(head), *map(list, rows)]
    width = [max(len(line[i]) for line in lines) for i in range(len(head))]
    done = []
    for line in lines:
        cells = [line[0].ljust(width[0]), *(cell.rjust(width[i]) for i, cell in enumerate(line) if i)]
        done.append("  ".join(cells).rstrip())
    return "\n".join([done[0], "-" * len(done[0]), *done[1:]])


def environment() -> dict[str, Any]:
    """Versions and machine, for the head of a report."""
    versions = {}
    for package in ("torch", "transformers"):
        versions[package] = importlib.metadata.version(package)
    import hf_zero

    return {
        "hf_zero": hf_zero.__version__,
        **versions,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def size_arguments(parser: argparse.ArgumentParser, default: ModelSize) -> None:
    for name, value in dataclasses.asdict(default).items():
        parser.add_argument(f"--{name}", type=int, default=value)


def common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of a rank")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the whole run")
    parser.add_argument("--json", metavar="FILE", help="write settings and every measured value there ('-': stdout)")
