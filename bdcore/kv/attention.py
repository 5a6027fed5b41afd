"""Attention over a cache, aware of grouped queries: a group shares one read of its keys, nothing is repeated.

Registered with transformers as `budgetdraft` and without a mask function, so models build no mask: the newest T keys
are the block itself, everything before is visible, which holds for sparse caches too.

Legend: B batch, Q query heads, H KV heads, G = Q / H, T block length, S keys in reach, D head dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "budgetdraft"


def causal_block_mask(T: int, S: int, device: torch.device) -> Tensor:
    """(T, S) bool, True = visible: row i of the block sees the S - T keys before it and the block up to itself."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def grouped_attention(query_BQTD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, scale: float) -> Tensor:
    """Causal attention of a block of T queries whose own keys are the last T of S: (B, Q, T, D)."""
    B, Q, T, D = query_BQTD.shape
    H, S = key_BHSD.shape[1], key_BHSD.shape[2]
    if T == S and T > 1:
        return F.scaled_dot_product_attention(
            query_BQTD, key_BHSD, value_BHSD, is_causal=True, scale=scale, enable_gqa=Q != H
        )
    rows_BHRD = query_BQTD.reshape(B, H, Q // H * T, D)
    mask_RS = None if T == 1 else causal_block_mask(T, S, query_BQTD.device).repeat(Q // H, 1)
    out_BHRD = F.scaled_dot_product_attention(rows_BHRD, key_BHSD, value_BHSD, attn_mask=mask_RS, scale=scale)
    return out_BHRD.reshape(B, Q, T, D)


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    observer: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or dropout:
        raise ValueError("attention 'budgetdraft' takes no mask and no dropout; set attention_dropout = 0")
    if observer is not None:
        observer.observe(module.layer_idx, query)
    return grouped_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _interface)
