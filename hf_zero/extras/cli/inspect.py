"""`hf-zero inspect`: what a checkpoint folder holds, from its manifest; with --verify, whether it is undamaged."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.consolidate import progress_bar
from hf_zero.checkpoint.file_list import Listed, changed_files, read_list
from hf_zero.checkpoint.folders import chosen, offering, read_manifest
from hf_zero.checkpoint.format import Manifest, manifest_path
from hf_zero.checkpoint.published_weights import damaged_files
from hf_zero.checkpoint.rank_reader import RankFiles
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.text import format_bytes, plural, print_table

NAME = "inspect"
SUMMARY = "show layout, sizes and versions of a checkpoint, and check that it is complete"
EXAMPLES = """
hf-zero inspect outputs/checkpoint-500
hf-zero inspect outputs/checkpoint-500 --verify
hf-zero inspect outputs/checkpoint-500 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=Path, help="checkpoint folder: with zero/manifest.json in it"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all files and compare their checksums, those beside zero/ too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    folder = chosen(args.checkpoint)
    if not manifest_path(folder).exists() and (listed := read_list(folder)) is not None:
        return _run_on_weights(folder, listed, args)
    manifest = read_manifest(folder)
    with offering(folder), closing(RankFiles(folder, manifest)) as files:
        if args.verify:
            _verify(files, manifest)
        else:
            files.header(0)
    listed = read_list(folder)
    if args.verify:
        _verify_beside(folder, listed)
    summary = summarize(folder, manifest, verified=args.verify)
    summary["files_beside"] = None if listed is None else len(listed)
    if args.json:
        print(json.dumps(summary))
    else:
        _print(summary)


def summarize(folder: Path, manifest: Manifest, *, verified: bool) -> dict[str, Any]:
    trainable = {slot.name for layout in manifest.layouts if layout.trainable for slot in layout.slots}
    numels = {info.name: math.prod(info.shape) for info in manifest.params}
    state = Counter(f"{kind} {dtype}" for kinds in manifest.kinds.values() for kind, dtype in kinds.items())
    return {
        "checkpoint": str(folder),
        "format_version": manifest.format_version,
        "hf_zero_version": manifest.hf_zero_version,
        "saved_at": datetime.fromtimestamp(manifest.saved_at, timezone.utc).isoformat(timespec="seconds"),
        "global_step": manifest.global_step,
        "stage": manifest.stage,
        "world_size": manifest.world_size,
        "parameters": sum(numels.values()),
        "trainable_parameters": sum(numels[name] for name in trainable),
        "parameter_tensors": len(numels),
        "dtypes": dict(Counter(info.dtype for info in manifest.params)),
        "tied": dict(manifest.tied),
        "buffers": len(manifest.buffers),
        "state": dict(state),  # "exp_avg float32" -> tensors that have it
        "units": [
            {
                "name": layout.name,
                "trainable": layout.trainable,
                "tensors": len(layout.slots),
                "numel": layout.numel,
                "padded_numel": layout.padded_numel,
                "buckets": layout.num_buckets,
            }
            for layout in manifest.layouts
        ],
        "files": [{"name": file.name, "size": file.size} for file in manifest.files],
        "bytes": sum(file.size for file in manifest.files),
        "verified": verified,
    }


def _run_on_weights(folder: Path, listed: dict[str, Listed], args: argparse.Namespace) -> None:
    """A folder of save_only_model: a list of files, and no sharded state."""
    if args.verify:
        _verify_beside(folder, listed)
    summary = {"checkpoint": str(folder), "files_beside": len(listed), "verified": args.verify}
    if args.json:
        print(json.dumps(summary))
        return
    print_table(
        [
            ("checkpoint", f"{folder}, weights only: it has no optimizer state"),
            ("files", _beside(len(listed))),
            *(("", f"{name}  {format_bytes(one.size)}") for name, one in listed.items()),
            ("checksums", "all right" if args.verify else "not compared (--verify does)"),
        ]
    )


def _verify_beside(folder: Path, listed: dict[str, Listed] | None) -> None:
    """Raise CheckpointError that names every file beside `zero/` that is damaged, or is not as it was written."""
    problems = changed_files(folder, listed or {}) | damaged_files(folder)
    if problems:
        raise CheckpointError("; ".join(f"{folder / name} {text}" for name, text in problems.items()))


def _verify(files: RankFiles, manifest: Manifest) -> None:
    draw = progress_bar("checking")
    total = sum(file.size for file in manifest.files)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        draw(done, total)

    files.verify(range(manifest.world_size), advance)


def _print(summary: dict[str, Any]) -> None:
    state = [f"{kind} of {plural(count, 'tensor')}" for kind, count in summary["state"].items()]
    padding = sum(unit["padded_numel"] - unit["numel"] for unit in summary["units"])
    tied = f", {plural(len(summary['tied']), 'tied name')}" if summary["tied"] else ""
    print_table(
        [
            ("checkpoint", summary["checkpoint"]),
            ("written", f"{summary['saved_at']} by hf_zero {summary['hf_zero_version']}"),
            ("format version", str(summary["format_version"])),
            ("step", str(summary["global_step"])),
            ("saved at", f"stage {summary['stage']}, in {plural(summary['world_size'], 'part')}"),
            ("parameters", f"{summary['parameters']:,} in {plural(summary['parameter_tensors'], 'tensor')}{tied}"),
            ("  trainable", f"{summary['trainable_parameters']:,}"),
            ("  types", ", ".join(f"{dtype} ({count})" for dtype, count in summary["dtypes"].items())),
            ("buffers", str(summary["buffers"])),
            ("state", "; ".join(state)),
            ("units", f"{len(summary['units'])}, {plural(padding, 'element')} of padding"),
            ("files", f"{len(summary['files'])}, {format_bytes(summary['bytes'])}"),
            *(("", f"{file['name']}  {format_bytes(file['size'])}") for file in summary["files"]),
            ("files beside", _beside(summary["files_beside"])),
            ("checksums", "all right" if summary["verified"] else "not compared (--verify does)"),
        ]
    )


def _beside(count: int | None) -> str:
    return "without a list of checksums" if count is None else f"{count}, in checksums.json"
