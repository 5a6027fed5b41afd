"""Linear layers for blocks of few tokens on a CPU, where decoding spends most of its time.

BLAS multiplies a block of 1 to 64 tokens by a weight about twice as fast with the weight on the left: y = (W x^T)^T. A
verify block of five tokens then costs little more than one, as it should where reading the weights is the limit. Models
stay the library's own; only the product inside their `nn.Linear` changes. Figures: docs/performance.md.

Legend: M tokens, N outputs, K inputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

MOST_TOKENS = 64
"""Longer blocks go to the library's product, which is then as fast."""
_PADDED = {1: 2, 3: 4}  # a matrix-vector product, and one of three columns, are slower than the next even one


class BlockLinear(nn.Linear):
    """`nn.Linear` with the faster product for short blocks on a CPU, when no gradient is wanted."""

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.numel() // max(1, input.shape[-1])
        if torch.is_grad_enabled() or input.device.type != "cpu" or not 0 < tokens <= MOST_TOKENS:
            return super().forward(input)
        weight = self.weight
        if weight.dtype != torch.float32:
            return super().forward(input)
        out_MN = _weight_first(input.reshape(tokens, -1), weight)
        return (out_MN if self.bias is None else out_MN + self.bias).reshape(*input.shape[:-1], weight.shape[0])


def _weight_first(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    M = x_MK.shape[0]
    wanted = _PADDED.get(M, M)
    columns_MK = x_MK if wanted == M else torch.cat([x_MK, x_MK[:1]])
    return torch.mm(weight_NK, columns_MK.t()).t()[:M].contiguous()


def adapt(model: Any) -> Any:
    """Give every plain `nn.Linear` of a model the faster product, in place; weights and names stay. Returns the model."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BlockLinear
    return model
