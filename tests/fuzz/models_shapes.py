"""Odd parameters: shapes, types, sharing, layers of torch that hold their weights in ways of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.fuzz.registry import VOCAB, WIDTH, Block, Net, add, around, call_tokens


class Scalar(nn.Module):
    """A 0-dim parameter, as CLIP's logit_scale, and one element in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale.exp() + self.shift)


class ScalarRoot(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature.exp()


class OnlyScalars(nn.Module):
    """Nothing but 0-dim parameters: fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b


class Empty(nn.Module):
    """A parameter without elements beside others."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.linear = None if alone else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.linear is None else torch.tanh(self.linear(x))) + self.nothing.sum()


class Mixed(nn.Module):
    """fp32 and fp64 parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH).float()
        self.high = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.high(torch.tanh(self.low(x.float())).double())).to(x.dtype)


class MixedNet(Net):
    """The first block in fp64, the others in fp32."""

    def __init__(self) -> None:
        super().__init__([Mixed(), Mixed()])
        self._no_split_modules = ("Mixed",)
        self.inp.double()
        self.head.double()


class Counted(nn.Module):
    """Parameters that are no floats beside those that are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(WIDTH) < 0.7, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x[:, self.order])) * self.mask


class Strided(nn.Module):
    """Parameters that are not contiguous: a transpose, and every second column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter((torch.randn(13, WIDTH) * 0.3).t())
        self.spread = nn.Parameter((torch.randn(13, 2 * WIDTH) * 0.3)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.turned) @ self.spread


class Lists(nn.Module):
    """A ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH) * 0.3, "b": torch.randn(WIDTH, WIDTH) * 0.3})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.several:
            x = torch.tanh(x @ weight)
        return x @ self.named["b"] + self.named["a"]


class Tied(nn.Module):
    """Embedding and head are one parameter; with `layers`, two layers share one too."""

    _no_split_modules = ("Block",)

    def __init__(self, layers: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        if layers:
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.blocks[2].norm = self.blocks[1].norm

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, padding=1)
        self.norm = nn.GroupNorm(1, 5)
        self.back = nn.ConvTranspose2d(5, 3, 2, stride=2)
        self.head = nn.Conv1d(3, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = F.relu(self.norm(self.conv(x.view(1, 1, 4, WIDTH))))
        return self.head(self.back(image).flatten(0, 1).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], layers: int) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, num_layers=layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x.unsqueeze(1))[0].squeeze(1)


class Attention(nn.Module):
    """MultiheadAttention reads out_proj.weight without calling out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unsqueeze(0)
        return self.attention(y, y, y, need_weights=False)[0].squeeze(0)


class Encoder(nn.Module):
    """torch's own layer; in eval mode it has a fast path that takes all weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 1, 13, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.unsqueeze(0)).squeeze(0)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH, mode="mean")
        self.mix = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.bag(tokens)
        return self.mix(y, y.flip(0))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class Normed(nn.Module):
    """BatchNorm: its running statistics are of the rank's own batches, rank 0's are the model's."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), frozen
        self.train()

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        if self.frozen:
            self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def _weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def _orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def _spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def _old_weight_norm() -> nn.Module:
    """The deprecated form: a pre-hook sets module.weight before each forward."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def _shared_modules() -> nn.Module:
    """One Linear in two blocks, and one block in two places."""
    net = Net([Block(), Block(), Block()])
    net.blocks[1].up = net.blocks[0].up
    net.blocks.append(net.blocks[2])
    return net


def _single_linear() -> nn.Module:
    return nn.Linear(WIDTH, 3)


add("net", Net)
add("linear", _single_linear)
add("scalars in units", around(Scalar))
add("scalar in root", ScalarRoot)
add("only scalars", OnlyScalars)
add("empty alone", around(lambda: Empty(True)), traits="empty")
add("empty beside", around(lambda: Empty(False)), traits="empty")
add("mixed types", MixedNet, traits="typed")
add("integer parameters", around(Counted))
add("not contiguous", around(Strided))
add("lists", around(Lists))
add("tied", Tied, call_tokens)
add("tied layers", lambda: Tied(layers=True), call_tokens)
add("shared modules", _shared_modules)
add("conv", Conv, traits="noise")
add("lstm", around(lambda: Recurrent(nn.LSTM, 2)))
add("gru", around(lambda: Recurrent(nn.GRU, 1)))
add("attention", around(Attention), traits="noise")
add("encoder layer", around(Encoder), traits="noise")
add("bag", Bag, call_tokens)
add("sparse", Sparse, call_tokens)
add("batch norm", around(lambda: Normed(False)), traits="buffers noise once")
add("batch norm, frozen", around(lambda: Normed(True)), traits="wide")
add("weight norm", around(_weight_norm))
add("weight norm, old", around(_old_weight_norm), traits="uncopied")
add("orthogonal", around(_orthogonal), traits="noise")
add("spectral norm", around(_spectral), traits="buffers once noise")
