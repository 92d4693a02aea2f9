"""Sets plans of memory beside what training takes: stages 0-3 with every choice of offload, fresh processes each.

    python scripts/estimate_check.py                       # 134 M parameters, 2 ranks on the CPU, all choices
    python scripts/estimate_check.py --stages 3 --offload none,cpu --dtype bf16

Live tensors are the memory behind every tensor that Python reaches between steps. The peak is the growth of the
process's resident memory (VmHWM) over what it had after imports and a small training that loads every library; on a
GPU, torch.cuda.max_memory_allocated instead. Exit status 1 where a plan is off by more than
--live or --peak percent.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from benchlib import ModelSize

SMALL = ModelSize(64, 128, 2, 2, 128)
MEDIA = ("none", "cpu", "nvme")


def live_bytes() -> int:
    """The bytes that the tensors span that Python reaches, on any device, shared memory once.

    Their storages are larger: a block on huge pages has up to 2 MB before or after it that nobody touches.
    """
    gc.collect()
    spans: dict[int, tuple[int, int]] = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not found.is_meta and found.numel():
            if found.dtype == torch.uint8 and found._base is None:
                continue  # the mapping that a block was cut out of
            storage = found.untyped_storage()
            last = sum((size - 1) * stride for size, stride in zip(found.shape, found.stride(), strict=True))
            low = int(found.storage_offset()) * found.element_size()
            high = min(low + (int(last) + 1) * found.element_size(), storage.nbytes())
            before = spans.get(storage.data_ptr(), (low, high))
            spans[storage.data_ptr()] = (min(low, before[0]), max(high, before[1]))
    return sum(max(high - low, 0) for low, high in spans.values())


def steps(size: ModelSize, config: dict[str, Any], shape: tuple[int, int], count: int) -> Any:
    import hf_zero

    model = size.build()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    del model, optimizer
    for step in range(count):
        batch = {
            name: tensor.to(engine.device)
            for name, tensor in benchlib.make_batch(size.vocab, shape, dist.get_rank(), step).items()
        }
        loss = engine(**batch).loss
        engine.backward(loss)
        del loss
        engine.step()
    engine.finish_updates()
    return engine


def run_case(args: argparse.Namespace) -> list[dict[str, Any]]:
    config = configuration(args, args.case)
    steps(SMALL, config, (1, 8), 2).teardown()
    tensors = live_bytes()
    before = benchlib.restart_peak()
    engine = steps(ModelSize.of(args), config, (args.batch, args.seq), args.steps)
    mine = {
        "report": engine.memory_report(),
        "live": live_bytes() - tensors,
        "peak": benchlib.resident("VmHWM") - before,
        "cuda": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def configuration(args: argparse.Namespace, case: str) -> dict[str, Any]:
    stage, optimizer, param = case.split(",")
    zero = {
        "stage": int(stage),
        "offload_optimizer": {"device": optimizer, "nvme_path": args.folder},
        "offload_param": {"device": param, "nvme_path": args.folder, "max_in_cpu": 0},
    }
    config = {"train_micro_batch_size_per_gpu": args.batch, "gradient_clipping": 1.0, "zero_optimization": zero}
    if args.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def make_plan(args: argparse.Namespace, case: str) -> tuple[Any, int]:
    """(the plan of rank 0, the number of parameters), from sizes alone."""
    from hf_zero.config import ZeroConfig
    from hf_zero.estimate import measure, plan_model

    with torch.device("meta"):
        model = ModelSize.of(args).build()
    config = ZeroConfig.load(configuration(args, case)).resolve(
        model=model, world_size=args.world, client_optimizer=True
    )
    ids = torch.zeros(args.batch, args.seq, dtype=torch.long, device="meta")
    on_host = not torch.cuda.is_available()
    profile = measure(model, config, {"input_ids": ids, "labels": ids}, on_host=on_host)
    plan = plan_model(model, config, on_host=on_host, profile=profile)
    return plan, sum(param.numel() for param in model.parameters())


def cases(args: argparse.Namespace) -> list[str]:
    media = args.offload.split(",")
    found = []
    for stage in map(int, args.stages.split(",")):
        for optimizer in media if stage else ["none"]:
            for param in media if stage == 3 else ["none"]:
                found.append(f"{stage},{optimizer},{param}")
    return found


def compare(args: argparse.Namespace, case: str) -> tuple[list[str], bool]:
    """A row of the table, and whether the plan holds."""
    plan, _ = make_plan(args, case)
    arguments = [*sys.argv, "--case", case, "--folder", args.folder]
    rank = benchlib.launch(arguments, args.world, timeout_s=args.timeout, threads=args.threads)[0]
    same = all(plan.report[kind] == rank["report"][kind] for kind in plan.report)
    peak, planned_peak = rank["peak"], plan.memory_peak
    row = [case.replace(",", " "), "equal" if same else "DIFFERS"]
    within = same
    pairs = [(plan.between, rank["live"], args.live)]
    if rank["cuda"]:
        pairs.append((plan.device_peak, rank["cuda"], args.peak))
    else:
        pairs.append((planned_peak, peak, args.peak))
    for planned, measured, limit in pairs:
        off = 100 * (planned / measured - 1)
        row += [f"{planned / 1e6:.0f}", f"{measured / 1e6:.0f}", f"{off:+.1f} %"]
        within = within and abs(off) <= limit
    row += [" ".join(f"{peak / 1e6:.0f}" for peak in plan.phases.values())]
    return row, within


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", default="0,1,2,3")
    add("--offload", default=",".join(MEDIA), help="media to try for optimizer states and for parameters")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--world", type=int, default=2)
    add("--steps", type=int, default=3, help="gathers go ahead from the third step on")
    add("--batch", type=int, default=2)
    add("--seq", type=int, default=256)
    add("--live", type=float, default=10.0, help="percent that live tensors may be off")
    add("--peak", type=float, default=20.0, help="percent that the peak may be off")
    add("--folder", default="", help="where nvme's files go (default: a temporary folder)")
    add("--case", default="", help=argparse.SUPPRESS)
    benchlib.size_arguments(parser, ModelSize(768, 2048, 12, 12, 32000))
    benchlib.common_arguments(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse(sys.argv[1:])
    if benchlib.in_rank():
        benchlib.run_rank(lambda: run_case(args))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or folder
        numel = make_plan(args, "0,none,none")[1]
        print(", ".join(f"{key} {value}" for key, value in benchlib.environment().items()))
        print(f"{numel / 1e6:.0f} M parameters, {args.dtype}, {args.world} ranks, {args.batch} x {args.seq} tokens\n")
        rows, all_within = [], True
        for case in cases(args):
            row, within = compare(args, case)
            rows.append(row)
            all_within = all_within and within
            print(" | ".join(row), file=sys.stderr, flush=True)
    head = ["stage, optimizer, parameters", "report", "live plan", "MB", "off", "peak plan", "MB", "off"]
    table = benchlib.table([*head, "start, step, update"], rows)
    benchlib.tell(args, {"rows": rows, "within": all_within}, table)
    if not all_within:
        sys.exit(f"a plan is off by more than {args.live} % (live tensors) or {args.peak} % (peak)")


if __name__ == "__main__":
    main()
