"""Turns what was read into a ResolvedConfig: "auto" and defaults filled in, conflicts and refusals collected.

Every problem is found before anything is raised, so that one message has them all. The order of work is the order of
the methods of `_Resolver.run`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.autofill import (
    ABSENT,
    NEEDS_ARGUMENTS,
    RULES,
    Arguments,
    Rule,
    bucket_sizes,
    complete_batch,
    equal,
    hidden_size,
)
from hf_zero.config.conditions import (
    ACCUMULATION,
    BATCH_KEYS,
    FORCE,
    OFFLOAD_PARAM,
    STAGE,
    TRAIN,
    has_bf16_masters,
    medium,
    runs_in_torch,
)
from hf_zero.config.cross_checks import MOMENTS, cross_problems, refusals
from hf_zero.config.keys import root, typed_blocks
from hf_zero.config.notices import getter, notices
from hf_zero.config.parse import Parsed
from hf_zero.config.problems import Problem, Problems
from hf_zero.config.resolved import DEFAULT, FILE, LossScaling, Precision, ResolvedConfig
from hf_zero.config.schema import AUTO, BadValue, Block, Key, find, look_up, put, show, values_of, walk

# Origins of values, beside FILE and DEFAULT. AUTO_* were "auto" in the file.
ARGUMENTS = "TrainingArguments"
INFERRED = "inferred"  # from the other batch numbers
AUTO_FILLED = "auto"
AUTO_PARAMETERS = "auto (from parameters)"
AUTO_DEFAULT = "auto (default)"
AUTO_CLIPPING = "auto (accelerate's value: no max_grad_norm is given)"
BELOW_STAGE_3 = "no effect below stage 3"

CLIPPING = "gradient_clipping"
PARAM_DEVICE = f"{OFFLOAD_PARAM}.device"
# accelerate puts this for "auto" where there are no TrainingArguments.
CLIPPING_WITHOUT_ARGUMENTS = 1.0


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The arguments, model and ranks that a configuration is resolved against."""

    args: Any = None
    model: Any = None
    world_size: int = 1
    num_training_steps: int | None = None
    client_optimizer: bool = False  # the caller brings the optimizer, so an optimizer block is not built
    client_scheduler: bool = False  # the same of the scheduler; or it is built later, when its numbers are known
    makes_loader: bool | None = None  # hf_zero makes the loader; None: not known
    file_only: bool = False  # look at the file alone: nothing that ranks and arguments would give


@dataclass(frozen=True)
class Outcome:
    """The problems, and the configuration that stands if there are none."""

    problems: tuple[Problem, ...]
    config: ResolvedConfig | None


def resolve(parsed: Parsed, around: Surroundings) -> Outcome:
    """Resolve what was read against its surroundings. Nothing given is changed."""
    return _Resolver(parsed, around).run()


class _Resolver:
    def __init__(self, parsed: Parsed, around: Surroundings) -> None:
        self.parsed = parsed
        self.around = around
        self.arguments = Arguments(around.args, around.world_size, around.num_training_steps)
        self.problems = Problems(parsed.source, parsed.lines, parsed.problems)
        self.values: dict[str, Any] = copy.deepcopy(parsed.values)  # nested; becomes free of "auto"
        self.origins: dict[str, str] = {path: FILE for path, _ in _leaves(parsed.values)}

    def run(self) -> Outcome:
        self._fill_from_arguments()
        self._fill_from_model()
        self._check_types()
        self._drop_leftover_auto()
        self._fill_defaults()
        self._keep_parameters_below_stage_3()
        self._fill_batch()
        refused = refusals(self.values, self.problems)
        cross_problems(getter(self._get, self._facts()), self.around.args, self.problems)
        problems = tuple(self.problems.without_details_of(refused))
        return Outcome(problems, None if problems else self._config())

    def _set(self, path: str, value: Any, origin: str) -> None:
        put(self.values, path, value)
        self.origins[path] = origin

    def _get(self, path: str) -> Any:
        return look_up(self.values, path)

    def _check_types(self) -> None:
        """Add what is missing or contradictory in blocks with a type. "auto" may still stand in them."""
        for name, known in typed_blocks():
            block = self._get(name)
            if not isinstance(block, Mapping):
                continue
            if "type" not in block:
                if not self.problems.has(name):
                    self.problems.add(name, dict(block), "the type is missing", known.missing)
                continue
            for fault in known.faults(block["type"], block.get("params", {})) if known.faults is not None else ():
                if not self.problems.has(path := f"{name}.params.{fault.name}"):
                    self.problems.add(path, fault.value, fault.wrong, fault.remedy)

    # TrainingArguments

    def _fill_from_arguments(self) -> None:
        for rule in RULES:
            if rule.path == "amp.enabled" and "fp16" in self.values:
                continue
            argument = self.arguments.value(rule)
            if argument is ABSENT:
                continue
            argument = _canonical(rule.path, argument)
            given = self._get(rule.path)
            if given == AUTO:
                self._set(rule.path, argument, AUTO_FILLED)
            elif given is None:
                if rule.fills_missing and not self.problems.has(rule.path):  # it is not missing, but wrong
                    self._set(rule.path, argument, ARGUMENTS)
            elif rule.batch and self.arguments.read("auto_find_batch_size"):
                self._set(rule.path, argument, ARGUMENTS)
            elif rule.must_match and self._takes_argument(rule.path) and not equal(rule.normal(given), argument):
                self._mismatch(rule, given, argument)
        if self.arguments.read("save_on_each_node"):
            self._set("checkpoint.use_node_local_storage", True, ARGUMENTS)
        untested = self._get("zero_allow_untested_optimizer")
        if self.around.args is not None and "optimizer" not in self.values and untested is None:
            self._set("zero_allow_untested_optimizer", True, ARGUMENTS)

    def _takes_argument(self, path: str) -> bool:
        """Whether "auto" may stand there: a type may have a parameter of its own by the name of a shared one."""
        block, _, name = path.partition(".params.")
        known = dict(typed_blocks()).get(block)
        entry = None if known is None else known.params_of(self._get(f"{block}.type")).keys.get(name)
        return not isinstance(entry, Key) or entry.auto

    def _mismatch(self, rule: Rule, given: Any, argument: Any) -> None:
        theirs = f"TrainingArguments {rule.argument}={show(argument)}"
        self.problems.add_text(
            rule.path,
            f"zero {rule.path}={show(given)} vs {theirs}: expected the same.",
            f'Set {rule.path} to "auto", or make the two equal.',
        )

    # The model

    def _fill_from_model(self) -> None:
        stage = self._get(STAGE) or 0
        wanted = [path for path in bucket_sizes(1, 3) if self._get(path) == AUTO]
        size = hidden_size(self.around.model) if wanted else None
        if size is None:
            return
        sizes = bucket_sizes(size.value, stage)
        for path in wanted:
            if path in sizes:
                self._set(path, sizes[path], AUTO_PARAMETERS if size.from_parameters else AUTO_FILLED)

    # Defaults

    def _drop_leftover_auto(self) -> None:
        for path, value in list(_leaves(self.values)):
            entry = _key(path)
            if entry is None or not entry.auto or value != AUTO:
                continue
            self._check_needs(path)
            if path == CLIPPING:
                self._set(path, CLIPPING_WITHOUT_ARGUMENTS, AUTO_CLIPPING)
            elif entry.default is None:
                block, _, name = path.rpartition(".")
                del (self._get(block) if block else self.values)[name]
                del self.origins[path]
            else:
                self._set(path, entry.default, AUTO_DEFAULT)

    def _check_needs(self, path: str) -> None:
        if path not in NEEDS_ARGUMENTS or self.around.file_only:
            return
        if self.around.client_optimizer and path.startswith("optimizer."):
            return
        if self.around.client_scheduler and path.startswith("scheduler."):
            return
        wrong = "it takes its value from TrainingArguments, which do not give it here: expected a number"
        if self.around.args is not None and path.endswith("_steps"):
            wrong = "the number of training steps is not known here: expected a number"
        self.problems.add(path, "auto", wrong, "Write the number.")

    def _fill_defaults(self) -> None:
        for path, entry in _always(root()):
            if self._get(path) is None:
                self._set(path, entry.default, DEFAULT)

    def _keep_parameters_below_stage_3(self) -> None:
        """DeepSpeed takes offload_param at every stage and offloads at stage 3; a notice says so."""
        if self._get(STAGE) != 3 and not medium(self._get, OFFLOAD_PARAM).is_device:
            self._set(PARAM_DEVICE, "none", BELOW_STAGE_3)

    def _fill_batch(self) -> None:
        if any(map(self.problems.has, BATCH_KEYS)):
            return
        world = self.around.world_size
        train, micro, accumulation = (self._get(path) for path in BATCH_KEYS)
        if self.around.file_only:
            self._check_batch_of_any_world(train, micro, accumulation)
            return
        if train is None and micro is None and accumulation is not None and self.around.args is None:
            self.problems.add(
                ACCUMULATION,
                accumulation,
                "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
                f"Write one of the two beside it; alone it says nothing of the samples in a step over {world} ranks.",
            )
            return
        numbers = complete_batch(train, micro, accumulation, world)
        for path, value in zip(BATCH_KEYS, (numbers.train, numbers.micro, numbers.accumulation), strict=True):
            if path in numbers.inferred:
                self._set(path, value, INFERRED)
            elif path in numbers.defaulted:
                self._set(path, value, DEFAULT)
        if not numbers.multiplies_up(world):
            given = next((path for path in BATCH_KEYS if self.origins.get(path) == FILE), TRAIN)
            self.problems.add(given, self._get(given), numbers.problem(world), numbers.remedy(world))

    def _check_batch_of_any_world(self, train: Any, *factors: Any) -> None:
        """Add a problem where the file's numbers fit no world size. A number may be missing, or "auto"."""
        step = math.prod(factor for factor in factors if isinstance(factor, int))
        if isinstance(train, int) and step and train % step:
            nearest = max(1, round(train / step)) * step
            self.problems.add(
                TRAIN,
                train,
                f"each rank takes {step} samples a step (train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps), and no number of ranks takes {train} together",
                f"Set train_batch_size to a multiple of {step}, such as {nearest}, or leave it out.",
            )

    def _config(self) -> ResolvedConfig:
        settings = {path: self._get(path) for path, _ in _leaves(self.values)}
        order = {path: place for place, (path, _) in enumerate(walk(root()))}
        settings = dict(sorted(settings.items(), key=lambda item: order.get(item[0], len(order))))
        values = self.values
        optimizer, scheduler = values.get("optimizer"), values.get("scheduler")
        return ResolvedConfig(
            **values_of(ResolvedConfig, values),
            stage=self._get(STAGE),
            world_size=self.around.world_size,
            precision=precision_of(values),
            grad_accum_dtype=self._get("data_types.grad_accum_dtype"),
            force_native_adam=values[FORCE] and not runs_in_torch(self._get),
            bf16_masters=has_bf16_masters(self._get),
            moments_16bit=self._get(MOMENTS) is False,
            optimizer=_in_form(optimizer) if optimizer else None,
            scheduler=copy.deepcopy(scheduler) if scheduler else None,
            settings=settings,
            origins={path: self.origins.get(path, FILE) for path in settings},
            raw=copy.deepcopy(self.parsed.raw),
            source=self.parsed.source,
            notices=(*self.parsed.notices, *self._notices(), *self._clipping_notice()),
        )

    def _notices(self) -> list[str]:
        """The lines about keys that were given and do nothing, as far as that is known without the engine."""
        given = dict(_leaves(self.parsed.values))
        left_open = [path for path, value in given.items() if value == AUTO and self.around.file_only]
        return notices(given, getter(self._get, self._facts(), left_open))

    def _facts(self) -> dict[str, Any]:
        """The facts of the run; a PipelineModule's settings replace the block's."""
        facts: dict[str, Any] = {}
        model = self.around.model
        if model is not None:
            facts |= {"@model": type(model).__name__, "@pipeline": hasattr(model, "num_pipeline_stages")}
        if facts.get("@pipeline"):
            facts["pipeline.virtual_stages"] = model.virtual_stages
        if self.around.args is not None or self.around.makes_loader is not None:
            facts["@loader"] = bool(self.around.makes_loader)
            facts["@trainer"] = self.around.args is not None
        return facts

    def _clipping_notice(self) -> list[str]:
        if self.origins[CLIPPING] != AUTO_CLIPPING:
            return []
        return [
            f'{CLIPPING} = "auto" is {CLIPPING_WITHOUT_ARGUMENTS} here, as with accelerate: there are no '
            "TrainingArguments with a max_grad_norm. Gradients are clipped to it; write the number, or 0 for none"
        ]


def _in_form(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An `optimizer` block in the form of a class of torch.optim or hf_zero.optim."""
    kind = dict(typed_blocks())["optimizer"].types[optimizer["type"]]
    return kind.block(optimizer["type"], optimizer.get("params", {}))


def precision_of(values: Mapping[str, Any]) -> Precision:
    """The precision that resolved values ask for; cross_checks.py says what cannot be asked for together."""
    autocast = None
    if look_up(values, "torch_autocast.enabled"):
        autocast = look_up(values, "torch_autocast.dtype") or "bfloat16"
    if look_up(values, "fp16.enabled"):
        scaling = LossScaling(**values_of(LossScaling, values["fp16"]))
        return Precision("float16", autocast, scaling, skip_nonfinite=True)
    if look_up(values, "bf16.enabled"):
        return Precision("bfloat16", autocast, skip_nonfinite=look_up(values, "bf16.check_grad_overflow") is True)
    level = (look_up(values, "amp.opt_level") or "O1") if look_up(values, "amp.enabled") is True else None
    if level in ("O1", "O2", "O3"):
        fixed = look_up(values, "amp.loss_scale")
        if fixed is None and level == "O3":
            fixed = 1.0  # as apex
        scaling = LossScaling.of_torch() if fixed in (None, "dynamic") else LossScaling(static=float(fixed))
        if level == "O1":
            return Precision(None, "float16", scaling, skip_nonfinite=True)
        return Precision("float16", None, scaling, skip_nonfinite=True)
    scaled = autocast == "float16"
    return Precision(None, autocast, LossScaling.of_torch() if scaled else None, skip_nonfinite=scaled)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every value below nested blocks with its dotted path. A block without known keys is one value."""
    result: list[tuple[str, Any]] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        entry = find(root(), path)
        if isinstance(entry, Block) and entry.keys and isinstance(value, Mapping):
            result.extend(_leaves(value, f"{path}."))
        else:
            result.append((path, value))
    return result


def _always(block: Block, prefix: str = "") -> list[tuple[str, Key]]:
    """The keys whose default belongs to every resolved configuration."""
    result: list[tuple[str, Key]] = []
    for name, entry in block.keys.items():
        if isinstance(entry, Key):
            result.append((f"{prefix}{name}", entry))
        elif isinstance(entry, Block) and entry.always:
            result.extend(_always(entry, f"{prefix}{name}."))
    return result


def _key(path: str) -> Key | None:
    entry = find(root(), path)
    return entry if isinstance(entry, Key) else None


def _canonical(path: str, value: Any) -> Any:
    """An argument's value in the form that the file's value has."""
    entry = _key(path)
    try:
        return value if entry is None else entry.check(value)
    except BadValue:
        return value
