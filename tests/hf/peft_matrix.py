"""Every tuner of the installed PEFT on a base in shards: trained, saved, merged, and loaded again.

One process does the same with plain PEFT, torch and transformers, over the batches of all ranks. `KINDS` names the
configurations; the tests check that they cover what the installed PEFT has.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from peft.tuners.lora.corda import preprocess_corda
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_zero
from tests.harness.ranks import run_ranks

VOCAB, WIDTH, LENGTH, ROWS, STEPS = 64, 32, 10, 2, 3
RATE = 0.05
TARGETS = ["q_proj", "v_proj"]
Make = Callable[[], Any]


def _kind(config: str, *, targets: Any = TARGETS, **arguments: Any) -> Make:
    more = {} if targets is None else {"target_modules": targets}
    return functools.partial(getattr(peft, config), task_type="CAUSAL_LM", **more, **arguments)


def _prompt(config: str, **arguments: Any) -> Make:
    return _kind(config, targets=None, num_virtual_tokens=4, **arguments)


_lora = functools.partial(_kind, "LoraConfig", r=4)

# name -> its configuration; the peft type is the configuration's own.
KINDS: dict[str, Make] = {
    "lora": _lora(),
    "lora_gaussian": _lora(init_lora_weights="gaussian"),
    "lora_orthogonal": _lora(init_lora_weights="orthogonal"),
    "lora_dora": _lora(use_dora=True),
    "lora_all": _lora(targets="all-linear", use_dora=True, lora_bias=False),
    "lora_embedding": _lora(targets=["embed_tokens", "q_proj"]),
    "lora_tokens": _lora(trainable_token_indices=[3, 5]),
    "lora_modules_to_save": _lora(modules_to_save=["lm_head"]),
    "lora_pissa": _lora(init_lora_weights="pissa"),
    "lora_pissa_niter": _lora(init_lora_weights="pissa_niter_4"),
    "lora_olora": _lora(init_lora_weights="olora"),
    "lora_mica": _lora(init_lora_weights="mica"),
    "lora_kasa": _lora(kasa_config=peft.KasaConfig()),
    "lora_eva": _lora(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0)),
    "lora_corda": _lora(init_lora_weights="corda"),
    "lora_alora": _lora(alora_invocation_tokens=[3]),
    "lora_velora": _lora(velora_config=peft.VeloraConfig()),
    "lora_monteclora": _lora(monteclora_config=peft.MontecloraConfig()),
    "lora_bdlora": _lora(use_bdlora=peft.BdLoraConfig(target_modules_bd_a=TARGETS, nblocks=2)),
    "adalora": _kind("AdaLoraConfig", target_r=4, init_r=6, total_step=10),
    "adamss": _kind("AdamssConfig", r=8, num_subspaces=2),
    "adaption_prompt": _kind("AdaptionPromptConfig", targets=None, adapter_len=4, adapter_layers=2),
    "beft": _kind("BeftConfig", targets=["v_proj"]),
    "boft": _kind("BOFTConfig", boft_block_size=4),
    "c3a": _kind("C3AConfig", targets=["o_proj"], block_size=8),
    "cartridge": _prompt("CartridgeConfig"),
    "cpt": _prompt("CPTConfig", cpt_token_ids=[3, 4, 5, 6], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4]),
    "deft": _kind("DeftConfig", r=4),
    "delora": _kind("DeloraConfig", r=4),
    "fourierft": _kind("FourierFTConfig", n_frequency=20),
    "frod": _kind("FrodConfig", sparse_rate=0.2, progressbar=False),
    "glora": _kind("GloraConfig", r=4),
    "gralora": _kind("GraloraConfig", r=4, gralora_k=2),
    "hira": _kind("HiraConfig", r=4),
    "hra": _kind("HRAConfig", r=4),
    "ia3": _kind("IA3Config", targets=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lily": _kind("LilyConfig", r=4),
    "ln_tuning": _kind("LNTuningConfig", targets=["input_layernorm"]),
    "loha": _kind("LoHaConfig", r=4),
    "lokr": _kind("LoKrConfig", r=4),
    "miss": _kind("MissConfig", r=4),
    "miss_bat": _kind("MissConfig", r=4, init_weights="bat"),
    "multitask_prompt_tuning": _prompt("MultitaskPromptTuningConfig"),
    "oft": _kind("OFTConfig", oft_block_size=4),
    "osf": _kind("OSFConfig", effective_rank=8),
    "p_tuning": _prompt("PromptEncoderConfig", encoder_hidden_size=8),
    "peanut": _kind("PeanutConfig", r=4),
    "poly": _kind("PolyConfig", r=4, n_skills=2, n_tasks=1),
    "prefix_tuning": _prompt("PrefixTuningConfig"),
    "prompt_tuning": _prompt("PromptTuningConfig", prompt_tuning_init="SAMPLE_VOCAB"),
    "psoft": _kind("PsoftConfig", r=4),
    "pvera": _kind("PveraConfig", r=4),
    "randlora": _kind("RandLoraConfig", r=4),
    "road": _kind("RoadConfig", group_size=8),
    "shadow": _kind("ShadowConfig", r=4, shadow_dropout=0.0),
    "shira": _kind("ShiraConfig", r=2, random_seed=3),
    "supertuning": _kind("SupertuningConfig", sparsity=0.9),
    "tinylora": _kind("TinyLoraConfig", u=4),
    "trainable_tokens": _kind("TrainableTokensConfig", targets=["embed_tokens"], token_indices=[3, 5]),
    "unilora": _kind("UniLoraConfig", r=4, theta_d_length=16),
    "vblora": _kind("VBLoRAConfig", r=4, num_vectors=8, vector_length=8),
    "vera": _kind("VeraConfig", r=4),
    "waveft": _kind("WaveFTConfig", n_frequency=20),
    "xlora": _kind("XLoraConfig", targets=None, hidden_size=WIDTH, xlora_size=8, xlora_dropout_p=0.0),
}
# These are not compared, and this is why.
NOT_HERE = {
    "adamss": "needs scikit-learn",
    "lora_monteclora": "draws its noise from a stream of its own, so that two forwards differ from one on each rank",
    "lora_loftq": "needs bitsandbytes",
    "shadow": "fails in PEFT 0.21 with transformers 5.24: 'ShadowCarrier' object has no attribute 'view'",
}


def save_base(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    for number in range(2):
        expert = get_peft_model(copy.deepcopy(model), _lora(init_lora_weights=False)())
        expert.save_pretrained(folder.with_name(f"expert_{number}"))


def batch(kind: str, step: int, share: slice) -> dict[str, Any]:
    tokens = torch.randint(0, VOCAB, (2 * ROWS, LENGTH), generator=torch.Generator().manual_seed(step))[share]
    if kind == "lora_alora":
        tokens[:, 2] = 3  # the token from which on the adapter is active
    inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    if kind in ("poly", "multitask_prompt_tuning"):
        inputs["task_ids"] = torch.zeros(len(tokens), dtype=torch.int64)
    if kind == "cpt":
        inputs["input_type_mask"] = torch.full_like(tokens, 4)
    return inputs


@dataclasses.dataclass
class Outcome:
    """The outcome of one kind; texts instead of what raised."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    saved: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    loaded: torch.Tensor | None = None  # logits of the adapter that was saved, on a base that was loaded again
    merged: dict[str, torch.Tensor] | str = ""
    merged_logits: torch.Tensor | None = None
    start: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class Runs:
    """One kind, from the load of the base to the merge."""

    def __init__(self, kind: str, folder: Path, stage: int | None) -> None:
        self._kind, self._folder, self._stage = kind, folder, stage
        self._shares = [slice(0, ROWS), slice(ROWS, 2 * ROWS)]  # of the rows of a batch, one for each rank
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        self.config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0}

    def base(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self._folder / "base", dtype=torch.float32)
        model.config.use_cache = False  # X-LoRA refuses it
        return model

    def _place(self, model: nn.Module, optimizer: Any = None) -> Any:
        """Return what is called instead of the model."""
        if self._stage is None:
            return model
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=self.config)[0]
        self._shares = [slice(engine.rank * ROWS, (engine.rank + 1) * ROWS)]
        return engine

    def _weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        engine = hf_zero.engine_of(model)
        state = model.state_dict() if engine is None else engine.full_state_dict(keep=True)
        return {name: value.detach().clone() for name, value in state.items()}

    def _logits(self, model: Any) -> torch.Tensor:
        """Return the logits of all rows, on every rank."""
        model.eval()
        with torch.no_grad():
            inputs = {name: value for name, value in batch(self._kind, 9, slice(None)).items() if name != "labels"}
            logits: torch.Tensor = model(**inputs).logits
        return logits.clone()

    def outcome(self) -> Outcome:
        found = Outcome()
        model = self.adapted()
        model.train()
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(params, lr=RATE)
        placed = self._place(model, optimizer)
        found.start = self._weights(model)
        for step in range(STEPS):
            loss = self._forward_and_backward(placed, step)
            if self._stage is None:
                found.norms.append(nn.utils.clip_grad_norm_(params, float("inf")).item())
                optimizer.step()
                optimizer.zero_grad()
            else:
                placed.step()
                found.norms.append(placed.get_global_grad_norm())
            found.losses.append(loss)
        found.weights = self._weights(model)
        saved = self._folder / f"adapter_{self._stage}"
        model.save_pretrained(saved)
        barrier(self._stage)
        found.saved = load_file(saved / "adapter_model.safetensors")
        self._merge(model, found)
        trainable = not model.active_peft_config.is_prompt_learning  # which PEFT cannot load for training
        again = PeftModel.from_pretrained(self.base(), saved, is_trainable=trainable)
        placed = self._place(again)
        found.loaded = self._logits(placed)
        return found

    def adapted(self) -> Any:
        base = self.base()
        config = KINDS[self._kind]()
        torch.manual_seed(1)
        examples = [batch(self._kind, 20 + number, slice(1)) for number in range(6)]
        if self._kind == "xlora":
            config.adapters = {str(number): str(self._folder / f"expert_{number}") for number in range(2)}
        if self._kind == "lora_corda":
            with hf_zero.gathered_params(base):
                preprocess_corda(base, config, run_model=lambda: [base(**one) for one in examples])
        model = get_peft_model(base, config)
        if self._kind == "lora_corda":
            config.init_lora_weights = True  # a base that is loaded again has not been decomposed
        if self._kind == "lora_eva":
            peft.initialize_lora_eva_weights(model, examples, gather_distributed_inputs=False, show_progress_bar=False)
        return model

    def _forward_and_backward(self, placed: Any, step: int) -> float:
        """The mean loss over the ranks' shares: some routers look at all rows of a forward together."""
        total = torch.zeros(())
        for share in self._shares:
            torch.manual_seed(step)  # for what draws in every forward
            loss = placed(**batch(self._kind, step, share)).loss
            (loss / len(self._shares)).backward()
            total += loss.detach() / len(self._shares)
        return total.item() if self._stage is None else mean_over_ranks(total).item()

    def _merge(self, model: Any, found: Outcome) -> None:
        model.eval()
        try:
            merged = model.merge_and_unload()
        except (AttributeError, NotImplementedError, ValueError) as error:
            found.merged = f"{type(error).__name__}: {error}"
            return
        found.merged = self._weights(merged)
        found.merged_logits = self._logits(merged)

    def after_a_merge(self) -> list[dict[str, torch.Tensor]]:
        """Weights: an adapter merged in place, unmerged, merged for good; a second one trained on what came out."""
        found = []
        model = self.adapted()
        self.train(model)
        model.merge_adapter(safe_merge=True)
        found.append(self._weights(model))
        model.unmerge_adapter()
        found.append(self._weights(model))
        base = model.merge_and_unload()
        found.append(self._weights(base))
        torch.manual_seed(1 if self._stage is None else 1 + dist.get_rank())  # rank 0's random numbers count
        second = get_peft_model(base, KINDS["lora_pissa_niter"]())
        self.train(second)
        found.append(self._weights(second))
        return found

    def train(self, model: Any) -> None:
        model.train()
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=RATE)
        placed = self._place(model, optimizer)
        for step in range(2):
            self._forward_and_backward(placed, step)
            if self._stage is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                placed.step()


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()


def barrier(stage: int | None) -> None:
    if stage is not None:
        dist.barrier()


def in_shards(kind: str, folder: Path, stages: list[int], run: Callable[[Runs], Any] = Runs.outcome) -> list[Any]:
    """Return on every rank of a job: what `run` gives at each stage."""
    found = []
    for stage in stages:
        runs = Runs(kind, folder, stage)
        hf_zero.HfZeroConfig(runs.config)
        try:
            found.append(run(runs))
        except Exception as error:
            error.add_note(f"{kind}, stage {stage}")
            raise
        finally:
            hf_zero.disable()
    return found


def check(kind: str, folder: Path, stages: list[int]) -> None:
    """Compare what the ranks of a job give at these stages with one process. The base is saved under `folder`."""
    save_base(folder / "base")
    want = Runs(kind, folder, None).outcome()
    moved = [name for name, value in want.weights.items() if not torch.equal(value, want.start[name])]
    assert moved and not any(value.isnan().any() for value in want.weights.values()), "vacuous: nothing was trained"
    for outcomes in run_ranks(in_shards, 2, kind, folder, stages, timeout=60 + 30 * len(stages)):
        for stage, got in zip(stages, outcomes, strict=True):
            for field in dataclasses.fields(Outcome):
                name = field.name
                mine, theirs = getattr(got, name), getattr(want, name)
                if isinstance(theirs, str) or theirs is None:
                    assert mine == theirs, (kind, stage, name)
                else:
                    close(mine, theirs, f"{kind}, stage {stage}, {name}")


def close(mine: Any, theirs: Any, label: str) -> None:
    assert not isinstance(theirs, dict) or list(mine) == list(theirs), label
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7, msg=lambda text: f"{label}: {text}")
