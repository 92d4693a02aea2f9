"""The conditions that the effect of a key depends on beside its own value: other keys, or facts of the run.

A key names its conditions (`Count(..., when=(STAGE_3,))`); `notices.py` has a line for given keys without effect.
Facts of a run have names that begin with "@", and are known to some callers only:

| fact | value | known to |
|---|---|---|
| @pipeline | whether the model is a PipelineModule | who resolves with a model |
| @loader | whether hf_zero makes the loader | `initialize`, Trainer and Accelerate |
| @trainer | whether Trainer has the loop | as @loader |
| @device | the type of the device, such as "cpu" | the engine |
| @whole_units | whether one collective moves a whole unit: on every backend but gloo | the engine |
"""

from __future__ import annotations

from hf_zero.config.media import MEDIA, Medium
from hf_zero.config.schema import Get, When

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
OFFLOAD_PARAM, OFFLOAD_OPTIMIZER = f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer"
FORCE = "zero_force_ds_cpu_optimizer"
ACTIVATIONS = "activation_checkpointing"
PARAMS = "optimizer.params"
BF16_MASTERS, BF16_STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
BATCH_KEYS = TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# Types whose offloaded states are updated by native code.
NATIVE = ("Adam", "AdamW")
# The most elements of a tile of the native update: enough for a disk's full rate, and a few tiles are little memory.
MAX_TILE_NUMEL = 1 << 22


class Unknown(Exception):
    """The value or fact that a condition asks for is not known here, so the condition gives no notice."""


def is_known(get: Get, fact: str) -> bool:
    """Whether a fact is known, and true."""
    try:
        return bool(get(fact))
    except Unknown:
        return False


def medium(get: Get, block: str) -> Medium:
    """The medium that an offload block names; the device where it names none."""
    return MEDIA[get(f"{block}.device") or "none"]


def runs_in_torch(get: Get) -> bool:
    """Whether an optimizer block asks for what only torch updates, wherever its states are."""
    kind = get("optimizer.type")
    return kind is not None and (kind not in NATIVE or get(f"{PARAMS}.torch_adam") is True)


def updates_natively(get: Get) -> bool:
    """Whether native code updates offloaded states, and not torch on the host."""
    where = medium(get, OFFLOAD_OPTIMIZER)
    return where.needs_folder or (where.is_host and get(FORCE) is not False and not runs_in_torch(get))


def has_bf16_masters(get: Get) -> bool:
    """Whether master weights are the parameters, in bf16."""
    return all(get(key) is True for key in ("bf16.enabled", BF16_MASTERS))


def _is_cast(get: Get) -> bool:
    levels = get("amp.enabled") is True and get("amp.opt_level") in ("O2", "O3")
    return levels or any(get(f"{name}.enabled") is True for name in ("bf16", "fp16"))


def _uses_disk(get: Get) -> bool:
    return any(medium(get, block).needs_folder for block in (OFFLOAD_PARAM, OFFLOAD_OPTIMIZER))


def _smaller_bucket(own: str, other: str) -> When:
    return When(
        lambda get: get("@whole_units") or get(f"{ZERO}.{own}") <= get(f"{ZERO}.{other}"),
        f"the smaller one of it and {other} holds for both",
    )


STAGE_3 = When(lambda get: get(STAGE) == 3, "the stage is {stage}, and this is about stage 3")
SHARDED = When(lambda get: get(STAGE) > 0, "nothing is sharded at stage 0")
STAGES_1_2 = When(
    lambda get: get(STAGE) in (1, 2),
    "the stage is {stage}, and only at stages 1 and 2 parameters are all-gathered after a step",
)
PARAMS_AWAY = When(
    lambda get: get(STAGE) == 3,
    "the stage is {stage}, and below stage 3 parameters stay unsharded on the device (offload_optimizer works at "
    "stages 1 to 3)",
)
PARAMS_OFFLOADED = When(lambda get: not medium(get, OFFLOAD_PARAM).is_device, "parameters are not offloaded")
PARAMS_ON_DISK = When(lambda get: medium(get, OFFLOAD_PARAM).needs_folder, "parameters are not on a disk")
OFFLOADED = When(lambda get: not medium(get, OFFLOAD_OPTIMIZER).is_device, "the optimizer is not offloaded")
PINS = When(
    lambda get: not medium(get, OFFLOAD_OPTIMIZER).is_device or get("checkpoint.async") is True,
    "the optimizer is not offloaded, and no checkpoint is written in the background",
)
OPTIMIZER_ON_DISK = When(
    lambda get: medium(get, OFFLOAD_OPTIMIZER).needs_folder, "the optimizer's states are not on a disk"
)
OPTIMIZER_ON_HOST = When(
    lambda get: medium(get, OFFLOAD_OPTIMIZER).is_host,
    'it chooses who updates states in the host\'s memory (offload_optimizer.device = "cpu")',
)
ANY_DISK = When(_uses_disk, "nothing is on a disk")
NO_DISK = When(lambda get: not _uses_disk(get), 'with a device = "nvme" what is saved is on the disk')
TILES = When(
    lambda get: not updates_natively(get) or get(f"{ZERO}.sub_group_size") <= MAX_TILE_NUMEL,
    f"a tile of the native update has at most {MAX_TILE_NUMEL} elements",
)
DELAYED = When(lambda get: get(f"{OFFLOAD_OPTIMIZER}.delayed_update") is True, "delayed_update is not on")
ACCELERATOR = When(lambda get: get("@device") != "cpu", "the device is the CPU, which copies nothing to another one")
REDUCE_BUCKETS = _smaller_bucket("reduce_bucket_size", "allgather_bucket_size")
REDUCE_COPIES = When(
    lambda get: not get("@whole_units") or get("communication_data_type") is not None,
    "on this backend a reduce of a whole unit needs no copy to be bounded (communication_data_type would make one)",
)
GATHER_BUCKETS = _smaller_bucket("allgather_bucket_size", "reduce_bucket_size")
GATHERS_IN_PARTS = When(lambda get: not get("@whole_units"), "on this backend one all-gather moves a whole unit")
CASTS = When(_is_cast, "no parameter is cast to 16 bits")
IN_BF16 = When(lambda get: get("bf16.enabled") is True, "bf16.enabled is not true")
DYNAMIC_SCALE = When(lambda get: not get("fp16.loss_scale"), "fp16.loss_scale is fixed")
HYSTERESIS = When(lambda get: get(STAGE) > 0, "at stage 0 every overflow lowers the scale, as with DeepSpeed")
HAS_HYSTERESIS = When(lambda get: get("fp16.hysteresis") > 1, "fp16.hysteresis is 1")
FP8 = When(lambda get: get("msamp.enabled") is True, "msamp.enabled is not true")
SCALED_LEVEL = When(lambda get: get("amp.opt_level") != "O0", "amp.opt_level = O0 computes in fp32")
PRINTS = When(lambda get: get("steps_per_print") > 0, "steps_per_print is not given, so no line is printed")
SOME_OPS = When(lambda get: get("comms_logger.prof_all") is False, "comms_logger.prof_all is on")
CONTIGUOUS_INPUTS = When(
    lambda get: get(f"{ACTIVATIONS}.contiguous_memory_optimization") is True, "contiguous_memory_optimization is off"
)
TRAINER = When(
    lambda get: get("@trainer"),
    "it is for Trainer; a loop of your own goes on in torch.distributed.algorithms.join.Join([engine])",
)
OWN_LOADER = When(
    lambda get: get("@loader"),
    "no loader is made of training_data here; the script's own, or TrainingArguments.dataloader_drop_last, decides",
)
