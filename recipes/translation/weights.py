"""Compares the weights of files and folders, tensor by tensor, with those of the first one.

python recipes/translation/weights.py fp32.safetensors outputs/translation/stage3 fp32/pytorch_model.bin
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("paths", type=Path, nargs="+")


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        path = path / "model.safetensors"
    weights: dict[str, torch.Tensor] = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    return weights


paths = parser.parse_args().paths
first = read(paths[0])
for path in paths:
    weights = read(path)
    types = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in weights.values())
    shared = weights.keys() & first.keys()
    rounded = all(torch.equal(first[name].to(weights[name].dtype), weights[name]) for name in shared)
    most = max(float((first[name].double() - weights[name].double()).abs().max()) for name in shared)
    print(
        f"{path}: {dict(types)}, {len(shared)} of {len(first)} tensors, largest difference {most:.3g}, "
        f"{'the same' if rounded else 'NOT the same'} after rounding to the type of the tensor"
    )
