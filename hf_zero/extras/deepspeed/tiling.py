"""deepspeed.zero's TiledLinear: a linear layer that is computed tile by tile, by layers of torch or of Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.access.full import gathered_params
from hf_zero.errors import ConfigError


class TiledLinear(nn.Module):
    """A linear layer in `out_splits` rows and `in_splits` columns of tiles, the first of which are the larger ones.

    A tile is `linears[row][column]`. Stage 3 gathers the tiles of a layer of the model together.

    Args:
        in_features, out_features, bias: See torch.nn.Linear.
        input_is_already_split: The forward is given the parts of its input.
        combine_out_splits: False returns the parts of the output, and not one tensor.
        linear_cls: Makes a tile, with `kwargs`.
        init_linear: A layer of the full size whose values the tiles start from. All ranks must construct it then.
    Raises:
        ConfigError: There are more parts than features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, parts, size in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= parts <= size:
                raise ConfigError(f"TiledLinear({name}={parts}): expected a number from 1 to {size}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        widths, heights = _sizes(in_features, in_splits), _sizes(out_features, out_splits)
        last = in_splits - 1  # the bias is added once
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == last, **kwargs)
                for column, width in enumerate(widths)
            )
            for height in heights
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        is_split = self.input_is_already_split and self.in_splits > 1
        parts: Any = input_ if is_split else input_.tensor_split(self.in_splits, dim=-1)  # type: ignore[union-attr]
        outputs = [self._add([tile(part) for tile, part in zip(row, parts, strict=True)]) for row in self._rows()]
        return self._join(outputs) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a layer of the full size, those of rank 0. All ranks must call."""
        with gathered_params(other), gathered_params(self, write_rank=0):
            rows = other.weight.tensor_split(self.out_splits)
            biases = [None] * self.out_splits if other.bias is None else other.bias.tensor_split(self.out_splits)
            for tiles, row, bias in zip(self._rows(), rows, biases, strict=True):
                for tile, values in zip(tiles, row.tensor_split(self.in_splits, dim=1), strict=True):
                    tile.weight.copy_(values)
                if tiles[-1].bias is not None:
                    tiles[-1].bias.copy_(bias)

    def _rows(self) -> list[Any]:
        return list(self.linears)

    def _add(self, outputs: list[Any]) -> Any:
        """Return the output of a row from those of its tiles."""
        return sum(outputs)

    def _join(self, outputs: list[Any]) -> Any:
        """Return the output of the layer from those of its rows."""
        return torch.cat(outputs, dim=-1)


class TiledLinearReturnBias(TiledLinear):
    """A TiledLinear of layers that return (output, bias), as Megatron's do; so does its forward."""

    def _add(self, outputs: list[Any]) -> Any:
        return sum(output for output, _ in outputs), outputs[-1][1]

    def _join(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([output for output, _ in outputs], dim=-1), torch.cat(biases, dim=-1) if biases else None


def _sizes(total: int, parts: int) -> list[int]:
    """Return the sizes that torch.tensor_split gives."""
    return [total // parts + (number < total % parts) for number in range(parts)]
