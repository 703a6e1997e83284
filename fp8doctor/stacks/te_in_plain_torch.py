"""The maths of Transformer Engine's layers in plain torch, over the very Parameters, so that the compiler can
see through them.

Read in Transformer Engine 1.5, 2.1, 2.5 and 2.20 (``pytorch/module/*.py``): the attributes, what a forward
returns, and that its GELU is the tanh approximation. Outputs and gradients of every form here were compared
with 2.20.2 on an H200, in BF16: they differ by less than 0.7 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The first half of the last dimension activated, times the second."""

    def gate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return activation(first) * second

    return gate


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "relu": functional.relu,
    "srelu": _squared_relu,
    "silu": functional.silu,
    "geglu": _gated(_gelu),
    "reglu": _gated(functional.relu),
    "sreglu": _gated(_squared_relu),
    "swiglu": _gated(functional.silu),
}


class Plain(nn.Module):
    """One layer over the Parameters of ``of``, in their order. Whatever else a TE container hands to a
    forward is taken and left."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self._take(of)

    def _take(self, of: Any) -> None:
        for name, parameter in of._parameters.items():
            self.register_parameter(name, parameter)
        self.returns_bias = bool(getattr(of, "return_bias", False))
        self.name = getattr(of, "name", None)
        """Read by ``te.MultiheadAttention`` in 2.20."""
        self.train(of.training)

    def bias_of(self, name: str) -> Tensor | None:
        """Read a bias; TE keeps an empty tensor where it has none."""
        bias = self._parameters.get(name)
        return bias if bias is not None and bias.numel() else None

    def answer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """The last GEMM; its bias is handed out beside it where TE's module does so."""
        if self.returns_bias:
            return functional.linear(x, weight), bias
        return functional.linear(x, weight, bias)


class Linear(Plain, nn.Linear):
    """``te.Linear``, as an nn.Linear that every tool knows."""

    def __init__(self, of: Any) -> None:
        nn.Module.__init__(self)
        self._take(of)
        self.out_features, self.in_features = self.weight.shape

    def forward(self, input: Tensor, *_: Any, **__: Any) -> Any:
        return self.answer(input, self.weight, self.bias_of("bias"))


class _Normed(Plain):
    """A layer that begins with a norm."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.eps, self.zero_centered = float(of.eps), bool(getattr(of, "zero_centered_gamma", False))
        self.is_rms = getattr(of, "normalization", "LayerNorm") == "RMSNorm"

    def norm(self, x: Tensor) -> Tensor:
        weight: Any = self.layer_norm_weight
        weight = weight + 1 if self.zero_centered else weight
        if self.is_rms:
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        return functional.layer_norm(x, weight.shape, weight, self.bias_of("layer_norm_bias"), self.eps)


class LayerNormLinear(_Normed):
    """``te.LayerNormLinear``, whose weight may be kept in parts, such as query, key and value.

    Each part has a GEMM of its own: joined, the weights would be kept for the backward once more, 48 MiB in
    each layer of a 4096 wide decoder (H200, torch 2.11).
    """

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.weights, self.biases = parts(of)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        normed, biases = self.norm(x), [self.bias_of(name) for name in self.biases]
        outputs = [
            functional.linear(normed, self.get_parameter(name), None if self.returns_bias else bias)
            for name, bias in zip(self.weights, biases, strict=True)
        ]
        output = _joined(outputs)
        return (output, _joined(biases)) if self.returns_bias else output


class LayerNormMLP(_Normed):
    """``te.LayerNormMLP``."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.activation = ACTIVATIONS[of.activation]

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        inside = functional.linear(self.norm(x), self.fc1_weight, self.bias_of("fc1_bias"))  # type: ignore[arg-type]
        return self.answer(self.activation(inside), self.fc2_weight, self.bias_of("fc2_bias"))  # type: ignore[arg-type]


class GroupedLinear(Plain):
    """``te.GroupedLinear``: one GEMM after the other."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.count = int(of.num_gemms)

    def forward(self, x: Tensor, m_splits: Sequence[int], *_: Any, **__: Any) -> Tensor:
        parts = torch.split(x.reshape(-1, x.shape[-1]), list(m_splits))
        done = [
            functional.linear(part, getattr(self, f"weight{i}"), self.bias_of(f"bias{i}"))
            for i, part in enumerate(parts)
        ]
        return torch.cat(done).reshape(*x.shape[:-1], -1)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Join the last dimensions of what is there; None where nothing is."""
    there = [each for each in parts if each is not None]
    return torch.cat(there, dim=-1) if len(there) > 1 else next(iter(there), None)


def parts(of: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the Parameters of the weight, and those of the bias (``parameters_split``)."""
    return tuple(getattr(of, "weight_names", ("weight",))), tuple(getattr(of, "bias_names", ("bias",)))


TWINS: dict[str, type[Plain]] = {
    "Linear": Linear,
    "LayerNormLinear": LayerNormLinear,
    "LayerNormMLP": LayerNormMLP,
    "GroupedLinear": GroupedLinear,
}
WEIGHTS = {"Linear": "weight", "LayerNormMLP": "fc1_weight", "GroupedLinear": "weight0"}


def in_plain_torch(module: Any, kind: str) -> nn.Module | None:
    """The layer in plain torch; None where a setting of it has no match there."""
    if kind not in TWINS or not _forwards_as_te(type(module)):
        return None
    weights = parts(module)[0] if kind == "LayerNormLinear" else (WEIGHTS[kind],)
    if any(module._parameters.get(name) is None for name in weights):
        return None
    if getattr(module, "tp_size", 1) > 1 or getattr(module, "return_layernorm_output", False):
        return None
    if kind == "GroupedLinear" and getattr(module, "return_bias", False):
        return None
    if kind == "LayerNormMLP" and getattr(module, "activation", None) not in ACTIVATIONS:
        return None
    return TWINS[kind](module)


def _forwards_as_te(kind: type) -> bool:
    """Whether the forward is TE's own; Megatron's subclasses return something else from theirs."""
    return next(each for each in kind.__mro__ if "forward" in vars(each)).__module__.startswith(
        "transformer_engine."
    )
