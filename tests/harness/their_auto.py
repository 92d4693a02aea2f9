"""Runs transformers' own resolver and ours on the same random inputs: python -m tests.harness.their_auto SEED COUNT.

For a process of its own, with a stand-in `deepspeed` on its path, because transformers asks for that package before it
resolves anything. Prints one JSON object: what was compared, and every difference.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import transformers
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from hf_zero.config.parse import parse
from hf_zero.config.resolve import Surroundings, _Resolver
from hf_zero.config.schema import look_up, put

# path -> (the arguments' value, another one)
Case = tuple[Any, dict[str, Any], Any, int]


class ManyRanks:
    """TrainingArguments of a run with more ranks than this process has."""

    def __init__(self, args: Any, world_size: int) -> None:
        self._args, self.world_size = args, world_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def random_arguments(draw: random.Random) -> Any:
    args = transformers.TrainingArguments(
        output_dir="unused",
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=draw.randint(1, 16),
        gradient_accumulation_steps=draw.randint(1, 6),
        max_grad_norm=draw.choice([0.0, 0.25, 1, 1.0, 5.0]),
        learning_rate=draw.choice([0.0, 1e-5, 3e-4, 10 ** draw.uniform(-6, -1)]),
        adam_beta1=draw.choice([0.8, 0.9, draw.random()]),
        adam_beta2=draw.choice([0.95, 0.999, draw.random()]),
        adam_epsilon=draw.choice([1e-8, 1e-6, 0.0]),
        weight_decay=draw.choice([0, 0.01, 0.1]),
        warmup_steps=draw.choice([0, 0.03, 0.5, 1, 7, 500]),
        save_on_each_node=draw.random() < 0.2,
        auto_find_batch_size=draw.random() < 0.2,
    )
    for name in draw.choice([(), ("bf16",), ("fp16",), ("bf16_full_eval",), ("fp16_full_eval",)]):
        setattr(args, name, True)  # set afterwards: the constructor refuses fp16 on a CPU
    return ManyRanks(args, draw.choice([1, 2, 3, 8]))


def random_model(draw: random.Random) -> Any:
    width, other = draw.randint(1, 9000), draw.randint(1, 9000)
    inner = SimpleNamespace(hidden_size=other)
    config = draw.choice(
        [
            SimpleNamespace(hidden_size=width),
            SimpleNamespace(hidden_sizes=[other, width, 16]),
            SimpleNamespace(hidden_size=width, text_config=inner),
            SimpleNamespace(hidden_sizes=[width, 3], text_config=inner),
            SimpleNamespace(text_config=inner),
            SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=[other, width])),
        ]
    )
    return SimpleNamespace(config=config, parameters=lambda: iter(()))


def said_by(args: Any, steps: int) -> dict[str, Any]:
    """Return what the arguments say for each key that is compared, written without looking at our rules."""
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_batch_size": args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "scheduler.params.total_num_steps": steps,
        "scheduler.params.warmup_num_steps": max(1, args.get_warmup_steps(steps)),
        "fp16.enabled": args.fp16 or args.fp16_full_eval,
        "bf16.enabled": args.bf16 or args.bf16_full_eval,
    }


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [value[0] / 2 + 0.25, value[1]]
    return value + 1 if isinstance(value, int) else value / 2 + 1e-3


SIZES = "reduce_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold"


def random_config(draw: random.Random, args: Any, steps: int) -> dict[str, Any]:
    """Each key is "auto", missing, equal to the arguments, or different from them."""
    config: dict[str, Any] = {"zero_optimization": {"stage": draw.choice([0, 1, 2, 3, 3])}}
    if draw.random() < 0.8:
        config["optimizer"] = {"type": draw.choice(["Adam", "AdamW"]), "params": {}}
    if draw.random() < 0.8:
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {}}
    for path, value in said_by(args, steps).items():
        block = path.partition(".")[0]
        if block in ("optimizer", "scheduler") and block not in config:
            continue
        kind = draw.choices(["auto", "missing", "equal", "other"], [50, 20, 20, 10])[0]
        if kind != "missing":
            put(config, path, {"auto": "auto", "equal": value, "other": another(value)}[kind])
    for name in SIZES.split():
        kind = draw.choices(["auto", "missing", "given"], [60, 20, 20])[0]
        if kind != "missing":
            config["zero_optimization"][name] = "auto" if kind == "auto" else draw.randint(1, 10**9)
    return config


def leaves(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in config.items():
        found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


def compare(case: Case, counts: Counter[str]) -> list[str]:
    """The differences between their resolver and ours that no rule below explains."""
    args, given, model, steps = case
    theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(given))
    theirs.trainer_config_process(args, auto_find_batch_size=args.auto_find_batch_size)
    raised = False
    try:
        theirs.trainer_config_finalize(args, model, steps)
    except ValueError:
        raised = True
    around = Surroundings(args=args, model=model, world_size=args.world_size, num_training_steps=steps)
    ours = _Resolver(parse(given), around)
    ours.run()
    found = []
    for path, value in leaves(given):
        want, got = look_up(theirs.config, path), look_up(ours.values, path)
        if want == "auto":
            # Difference: they leave "auto" standing where no rule fills it (DeepSpeed then takes its default).
            counts["left over"] += 1
            if got == "auto" or ours.origins[path] != "auto (default)":
                found.append(f"{path}: left at {got!r}")
        elif args.auto_find_batch_size and path in ("train_micro_batch_size_per_gpu", "train_batch_size"):
            # Difference: they keep the file's number, which is not the one that training then uses.
            counts["auto_find_batch_size"] += 1
            if got != said_by(args, steps)[path]:
                found.append(f"{path}: {got!r} under auto_find_batch_size")
        elif got != want or type(got) not in (type(want), float):
            found.append(f"{path}: {want!r} there, {got!r} here")
        elif value == "auto":
            counts["filled"] += 1
            if ours.origins[path] != "auto":
                found.append(f"{path}: origin {ours.origins[path]}")
    saves = look_up(theirs.config, "checkpoint.use_node_local_storage") or False
    if (look_up(ours.values, "checkpoint.use_node_local_storage") or False) != saves:
        found.append("checkpoint.use_node_local_storage")
    mismatches = sorted(line.removeprefix("- ds ").partition("=")[0] for line in theirs.mismatches)
    ours_differ = sorted(one.key for one in ours.problems.found if " vs TrainingArguments " in one.text)
    counts["mismatches"] += len(mismatches)
    counts["several at once"] += len(mismatches) > 1
    if mismatches != ours_differ or raised != bool(mismatches):
        found.append(f"mismatches: {mismatches} there, {ours_differ} here")
    return found


def main(seed: int, count: int) -> None:
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    differences = []
    for number in range(count):
        args, steps = random_arguments(draw), draw.choice([1, 10, 333, 1000])
        case = (args, random_config(draw, args, steps), random_model(draw), steps)
        differences += [f"case {number}: {line}" for line in compare(case, counts)]
        counts["cases"] += 1
    print(json.dumps({"counts": counts, "differences": differences[:20]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
