"""Transformer Engine's layers in plain torch, over the same Parameters.

The compiler can see through them. Attributes and outputs are as in 1.5, 2.1, 2.5 and 2.20
(``pytorch/module/*.py``). Outputs and gradients differ by less than 0.7% from 2.20.2 (H200, BF16).
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
    def gate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return activation(first) * second

    return gate


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "geglu": _gated(_gelu),
    "swiglu": _gated(functional.silu),
}


class Plain(nn.Module):
    """A layer over another's Parameters; ignores extra arguments to its forward."""

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
        """Return a bias or None; TE keeps an empty tensor for none."""
        bias = self._parameters.get(name)
        return bias if bias is not None and bias.numel() else None

    def answer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Run the last matmul; return its bias separately if TE does."""
        if self.returns_bias:
            return functional.linear(x, weight), bias
        return functional.linear(x, weight, bias)


class PlainLinear(Plain, nn.Linear):
    """``te.Linear`` as an nn.Linear, which every tool knows."""

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
    """``te.LayerNormLinear``; its weight may be in parts, such as query, key, value.

    Each part has its own matmul: joined weights would be saved for the backward again, 48 MiB per layer of a
    4096-wide decoder (H200, torch 2.11).
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


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [each for each in parts if each is not None]
    return torch.cat(there, dim=-1) if len(there) > 1 else next(iter(there), None)


def parts(of: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the Parameters of weight and bias (``parameters_split``)."""
    return tuple(getattr(of, "weight_names", ("weight",))), tuple(getattr(of, "bias_names", ("bias",)))


COUNTERPARTS: dict[str, type[Plain]] = {
    "Linear": PlainLinear,
    "LayerNormLinear": LayerNormLinear,
    "LayerNormMLP": LayerNormMLP,
}
WEIGHTS = {"Linear": "weight", "LayerNormMLP": "fc1_weight"}


def in_plain_torch(module: Any, kind: str) -> nn.Module | None:
    """Return the layer in plain torch; None if a setting has no match there."""
    if kind not in COUNTERPARTS or not _forwards_as_te(type(module)):
        return None
    weights = parts(module)[0] if kind == "LayerNormLinear" else (WEIGHTS[kind],)
    if any(module._parameters.get(name) is None for name in weights):
        return None
    if getattr(module, "tp_size", 1) > 1 or getattr(module, "return_layernorm_output", False):
        return None
    if kind == "LayerNormMLP" and getattr(module, "activation", None) not in ACTIVATIONS:
        return None
    return COUNTERPARTS[kind](module)


def _forwards_as_te(kind: type) -> bool:
    """Tell if the forward is TE's own; Megatron's subclasses return something else."""
    return next(each for each in kind.__mro__ if "forward" in vars(each)).__module__.startswith(
        "transformer_engine."
    )
