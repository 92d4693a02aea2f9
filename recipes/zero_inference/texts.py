"""Prompts to batches and batches to texts: the same for the model in shards and for the plain one it is compared with.

Nothing of hf_zero is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Batch = list[str]


def peak_memory() -> int:
    """The most bytes that this process held, imports included. getrusage's figure counts the parent's peak too."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@dataclass(frozen=True)
class Written:
    """The text that was written to one prompt."""

    prompt: str
    text: str  # without the prompt and the special tokens
    tokens: int  # new ones, the end of text included


@dataclass(frozen=True)
class Options:
    """The options of generate; the names are those of transformers' `generate`."""

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_p: float
    num_beams: int
    seed: int
    chat: bool  # put prompts into the tokenizer's chat template

    def arguments(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "top_p": self.top_p} if self.do_sample else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.do_sample,
            "num_beams": self.num_beams,
            **sampling,
        }


def prepare_tokenizer(tokenizer: Any) -> Any:
    """Let `tokenizer` pad on the left: a decoder goes on at the end of each row, so padding must not stand there."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def deal(prompts: Sequence[str], world_size: int, batch_size: int) -> list[list[Batch]]:
    """Return the batches of every rank: prompt i belongs to rank i modulo `world_size`. Ranks may get none."""
    shares = [list(prompts[rank::world_size]) for rank in range(world_size)]
    return [[share[at : at + batch_size] for at in range(0, len(share), batch_size)] for share in shares]


def write(model: Any, tokenizer: Any, batch: Batch, options: Options, *, number: int) -> list[Written]:
    """Let `model` go on from each prompt of `batch`, the `number`-th of this run: its seed comes from the number."""
    prompts = [_render(tokenizer, prompt) for prompt in batch] if options.chat else batch
    # The text of the template has its special tokens already.
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not options.chat)
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    torch.manual_seed(options.seed + number)
    with torch.no_grad():
        output = model.generate(**inputs, **options.arguments(), pad_token_id=tokenizer.pad_token_id)
    new = output[:, inputs["input_ids"].shape[1] :]
    return [
        Written(prompt, tokenizer.decode(row, skip_special_tokens=True), _length(row, _ends(model, tokenizer)))
        for prompt, row in zip(batch, new.tolist(), strict=True)
    ]


def _render(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _ends(model: Any, tokenizer: Any) -> set[int]:
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    return set(found) if isinstance(found, list) else {found}


def _length(row: list[int], ends: set[int]) -> int:
    """Tokens up to the first end of text; behind it is padding."""
    return next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
