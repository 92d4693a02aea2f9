"""What a model of transformers or PEFT gets in front of its own methods while its parameters are in shards."""

from __future__ import annotations

from hf_zero.engine.engine import ZeroEngine
from hf_zero.hf.models.generation import install_generate
from hf_zero.hf.models.resizing import install_resize
from hf_zero.hf.models.saving import install_save_pretrained


def install_on_model(engine: ZeroEngine) -> None:
    """Let saving, generating and resizing work on shards; until the engine, and what replaces it, leaves the model."""
    if _install not in engine.installs:
        engine.install(_install)


def _install(engine: ZeroEngine) -> None:
    if not engine.is_sharded:
        return
    install_save_pretrained(engine.module, engine)
    install_generate(engine.module, engine)
    install_resize(engine.module, engine)
