"""Attention over a cache, aware of grouped queries: a group shares one read of its keys, nothing is repeated.

Registered with transformers as `budgetdraft` and without a mask function, so models build no mask: the newest T keys
are the block itself, everything before is visible, which holds for sparse caches too. Layers with a sliding window see
the keys at a distance below it; logits are capped where the family caps them (Gemma 2).

Legend: B batch, Q query heads, H KV heads, G = Q / H, T block length, S keys in reach, R = G * T rows, D head dim,
P halves of the keys.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "budgetdraft"


def causal_block_mask(T: int, S: int, device: torch.device, window: int | None = None) -> Tensor:
    """(T, S) bool, True = visible: row i of the block sees the S - T keys before it and the block up to itself, of
    these the newest `window`.
    """
    mask_TS = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    return mask_TS if window is None else mask_TS.triu(S - T - window + 1)


def window_mask(positions_HS: Tensor, T: int, window: int) -> Tensor:
    """(H, T, S) bool for cached keys with gaps: those at a distance below `window` of the block's own positions.

    `positions_HS` are the positions the keys were rotated to, in each sequence of a batch if they differ: (B, H, S).
    The last T are the block's.
    """
    distance_HTS = positions_HS[..., -T:, None] - positions_HS[..., None, :]
    return (distance_HTS >= 0) & (distance_HTS < window)


@lru_cache(maxsize=4)
def _group_mask(T: int, S: int, group: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Every layer of a forward asks for the same mask, added to the logits: (R, S). Made outside inference mode, since
    # training may meet it again and autograd saves no inference tensor.
    with torch.inference_mode(False):
        hidden_RS = ~causal_block_mask(T, S, device).repeat(group, 1)
        return torch.zeros(hidden_RS.shape, dtype=dtype, device=device).masked_fill(hidden_RS, float("-inf"))


def grouped_attention(
    query_BQTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    scale: float,
    *,
    visible_HTS: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of a block of T queries whose own keys are the last T of S: (B, Q, T, D).

    Causal, unless `visible_HTS` ((H or 1, T, S) or with B before, True = visible) says what each query sees.
    """
    B, Q, T, D = query_BQTD.shape
    H, S = key_BHSD.shape[1], key_BHSD.shape[2]
    group = Q // H
    if T == S and T > 1 and visible_HTS is None and softcap is None:
        return F.scaled_dot_product_attention(
            query_BQTD, key_BHSD, value_BHSD, is_causal=True, scale=scale, enable_gqa=group > 1
        )
    rows_BHRD = query_BQTD.reshape(B, H, group * T, D)
    if visible_HTS is not None:
        mask = visible_HTS.tile(group, 1)
        mask = mask if mask.dim() == 4 else mask[None]
    elif T > 1:
        mask = _group_mask(T, S, group, query_BQTD.device, query_BQTD.dtype)
    else:
        mask = None
    if softcap is None and visible_HTS is None and _splits(rows_BHRD, S):
        out_BHRD = _split_attention(rows_BHRD, key_BHSD, value_BHSD, scale, T)
    elif softcap is None:
        out_BHRD = F.scaled_dot_product_attention(rows_BHRD, key_BHSD, value_BHSD, attn_mask=mask, scale=scale)
    else:
        out_BHRD = _capped_attention(rows_BHRD, key_BHSD, value_BHSD, mask, scale, softcap)
    return out_BHRD.reshape(B, Q, T, D)


SPLIT_FROM = 4096
"""Keys from which one sequence's heads are read in two halves."""


def _splits(rows_BHRD: Tensor, S: int) -> bool:
    # The CPU kernel gives whole heads to threads: an odd number of heads leaves one of two threads idle half the time.
    few = rows_BHRD.shape[0] == 1 and rows_BHRD.shape[1] % torch.get_num_threads() != 0
    return few and S >= SPLIT_FROM and rows_BHRD.device.type == "cpu" and not torch.is_grad_enabled()


def _split_attention(rows_BHRD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, scale: float, T: int) -> Tensor:
    """The same over two halves of the keys side by side, joined by their log-sum-exp: (B, H, R, D)."""
    (_, H, R, _), S = rows_BHRD.shape, key_BHSD.shape[2]
    half = (S + 1) // 2  # an odd key is read twice, and hidden once
    mask_P1RN = None if T == 1 and S % 2 == 0 else _halves_mask(T, S, R // T, rows_BHRD.device, rows_BHRD.dtype)
    parts = [
        t.as_strided((2, H, half, t.shape[3]), ((S - half) * t.stride(2), *t.stride()[1:]), t.storage_offset())
        for t in (key_BHSD, value_BHSD)
    ]
    out_PHRD, sums_PHR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows_BHRD.expand(2, -1, -1, -1), *parts, 0.0, False, attn_mask=mask_P1RN, scale=scale
    )
    return (out_PHRD * sums_PHR.softmax(0)[..., None].to(out_PHRD.dtype)).sum(0, keepdim=True)


@lru_cache(maxsize=4)
def _halves_mask(T: int, S: int, group: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    half = (S + 1) // 2
    mask_RS = _group_mask(T, S, group, device, dtype)
    with torch.inference_mode(False):
        first, second = mask_RS[:, :half], mask_RS[:, S - half :].clone()
        if S % 2:
            second[:, 0] = float("-inf")
        return torch.stack([first, second])[:, None]


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits squashed into (-softcap, softcap) (Gemma 2)."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _capped_attention(
    rows_BHRD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    # The fused kernels know no cap.
    logits_BHRS = soft_capped(rows_BHRD @ key_BHSD.transpose(2, 3) * scale, softcap)
    if mask is not None and mask.dtype == torch.bool:
        logits_BHRS = logits_BHRS.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        logits_BHRS = logits_BHRS + mask
    return logits_BHRS.softmax(-1, dtype=torch.float32).to(value_BHSD.dtype) @ value_BHSD


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    observer: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or dropout:
        raise ValueError("attention 'budgetdraft' takes no mask and no dropout; set attention_dropout = 0")
    layer = module.layer_idx
    if hasattr(observer, "attend"):  # several sequences packed in one block: each over its own cache
        out = observer.attend(layer, query, scaling, sliding_window, softcap)
        return out.transpose(1, 2).contiguous(), None
    positions = None
    if observer is not None:
        observer.observe(layer, query)
        positions = observer.positions(layer) if sliding_window else None
    visible = getattr(observer, "visible", None)  # of sequences that are filled up to one length
    out = attend(
        query, key, value, scaling, window=sliding_window, softcap=softcap, positions_HS=positions, visible_HTS=visible
    )
    return out.transpose(1, 2).contiguous(), None


def attend(
    query_BQTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    positions_HS: Tensor | None = None,
    visible_HTS: Tensor | None = None,
) -> Tensor:
    """`grouped_attention` of a layer that may have a sliding window.

    `positions_HS` ((H, S) or with B before): where cached keys stand when some were dropped; None: key i stands at
    position i. `visible_HTS`: what each query of a layer without a window sees; None: all that is before it.
    """
    T, S = query_BQTD.shape[2], key_BHSD.shape[2]
    if window is not None and positions_HS is not None:
        visible_HTS = window_mask(positions_HS, T, window)
    elif window is not None and window < S:
        reach = min(S, window + T - 1)
        key_BHSD, value_BHSD = key_BHSD[:, :, -reach:], value_BHSD[:, :, -reach:]
        visible_HTS = causal_block_mask(T, reach, query_BQTD.device, window)[None]
    return grouped_attention(query_BQTD, key_BHSD, value_BHSD, scale, visible_HTS=visible_HTS, softcap=softcap)


AttentionInterface.register(NAME, _interface)
