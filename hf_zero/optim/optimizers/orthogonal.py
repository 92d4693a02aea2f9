"""The nearest orthogonal matrix, nearly: five Newton-Schulz steps (Jordan 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math

import torch

METHODS = ("gram", "standard")
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic a x + b x^3 + c x^5
_STEPS = 5
_EPS = 1e-7
_GRAM_RESTART = 2  # the step before which the Gram matrix is made anew, as its errors grow


def orthogonalized(matrix: torch.Tensor, method: str) -> torch.Tensor:
    """U S' V^T for `matrix` = U S V^T [..., rows, columns], with all of S' between about 0.7 and 1.2.

    Args:
        method: "standard" iterates on the matrix, in bf16. "gram" iterates on the small Gram matrix, in fp16 on
            accelerators, else fp32. fp64 stays fp64. The result has the type of the computation.
    """
    dtype = _compute_dtype(matrix, method)
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    if method == "standard":
        x = x.to(dtype)
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + _EPS)).to(dtype)
    wide = x.size(-1) > x.size(-2)
    x = _by_gram(x) if method == "gram" and wide else _by_matrix(x)
    return x.mT if tall else x


def _compute_dtype(matrix: torch.Tensor, method: str) -> torch.dtype:
    if matrix.dtype == torch.float64:
        return torch.float64
    if method == "standard":
        return torch.bfloat16
    return torch.float32 if matrix.device.type == "cpu" else torch.float16


def _by_matrix(x: torch.Tensor) -> torch.Tensor:
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x


def _by_gram(x: torch.Tensor) -> torch.Tensor:
    """The same polynomials as products of small matrices: x_k = q x_0, and the Gram matrix of x_k is q gram q."""
    one = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    q, gram = one, x @ x.mT
    for step in range(_STEPS):
        if step == _GRAM_RESTART:
            x = q @ x
            q, gram = one, x @ x.mT
        factor = _A * one + _B * gram + _C * gram @ gram
        q = factor @ q
        if step not in (_GRAM_RESTART - 1, _STEPS - 1):
            gram = factor @ gram @ factor
    return q @ x


def rows_to_columns(rows: int, columns: int) -> float:
    """The factor that makes the update's size independent of a tall matrix's shape."""
    return math.sqrt(max(1.0, rows / columns))
