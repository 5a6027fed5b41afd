"""Linear layers on a CPU, where decoding spends most of its time.

BLAS multiplies a block of a few tokens by a weight up to twice as fast with the weight on the left: y = (W x^T)^T. A
verify block of five tokens then costs little more than one, as it should where reading the weights is the limit. On a
CPU without bfloat16 arithmetic, blocks of bfloat16 tokens are multiplied in float32, the weight converted tile by tile,
and rounded once. Models stay the library's own; only the product inside their `nn.Linear` changes. Figures:
docs/performance.md.

Legend: M tokens, N outputs, K inputs.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from bdcore.runtime import multiplies_bfloat16

MOST_TOKENS = 64
"""Longer float32 blocks go to the library's product, which is then as fast."""
UPCAST_FROM = 8
"""Shorter bfloat16 blocks are faster as they are, reading half the bytes."""
_TILE = 1536  # rows converted at once: their float32 copy stays in the last-level cache
_PADDED = {1: 2, 3: 4}  # a matrix-vector product, and one of three columns, are slower than the next even one


class BlockLinear(nn.Linear):
    """`nn.Linear` with the faster product for a CPU, when no gradient is wanted."""

    def forward(self, input: Tensor) -> Tensor:
        weight, tokens = self.weight, input.numel() // max(1, input.shape[-1])
        if torch.is_grad_enabled() or input.device.type != "cpu" or not tokens:
            return super().forward(input)
        if weight.dtype == torch.float32 and tokens <= MOST_TOKENS:
            out = _weight_first(input.reshape(tokens, -1), weight).reshape(*input.shape[:-1], weight.shape[0])
        elif weight.dtype == torch.bfloat16 and tokens >= UPCAST_FROM and not multiplies_bfloat16():
            out = _upcast(input.reshape(tokens, -1), weight).reshape(*input.shape[:-1], weight.shape[0])
        else:
            return super().forward(input)
        return out if self.bias is None else out + self.bias  # pyright: ignore[reportUnnecessaryComparison]


def _weight_first(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    M = x_MK.shape[0]
    columns_MK = torch.cat([x_MK, x_MK[:1]]) if _PADDED.get(M, M) > M else x_MK
    return torch.mm(weight_NK, columns_MK.t()).t()[:M].contiguous()


class _Scratch(threading.local):
    """A buffer for one converted tile, kept: a fresh one would be mapped and zeroed by the system every time."""

    buffer = torch.empty(0)

    def like(self, tile_NK: Tensor) -> Tensor:
        if self.buffer.numel() < tile_NK.numel():
            self.buffer = torch.empty(tile_NK.numel())
        return self.buffer[: tile_NK.numel()].view(tile_NK.shape)


_scratch = _Scratch()


def _upcast(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    columns_KM = x_MK.float().t()
    out_NM = torch.empty(weight_NK.shape[0], x_MK.shape[0])
    for start in range(0, weight_NK.shape[0], _TILE):
        tile_NK = weight_NK[start : start + _TILE]
        torch.mm(_scratch.like(tile_NK).copy_(tile_NK), columns_KM, out=out_NM[start : start + _TILE])
    return out_NM.t().to(weight_NK.dtype, memory_format=torch.contiguous_format)


def adapt(model: Any) -> Any:
    """Give every plain `nn.Linear` of a model the faster product, in place; weights and names stay. The model."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BlockLinear
    return model
