"""Rotary positions of cached keys. Keys are cached after rotation; moving one is a rotation by the difference.

Two modes. `absolute`: a key keeps the position of its token (the paper). `in_cache`: kept keys are re-rotated to
0..n-1, so a drafter never meets a position beyond budget + block (StreamingLLM).

Legend: B batch, H KV heads, K keys, D head dim.
"""

import torch
from torch import Tensor


def rotate_half(x_D: Tensor) -> Tensor:
    """The companion of each coordinate in the rotary pairing (i, i + D/2)."""
    first, second = x_D.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def shift(keys_BHKD: Tensor, by_BHK: Tensor, inv_freq: Tensor) -> Tensor:
    """Keys as if their tokens stood `by` positions later (negative: earlier).

    A pure rotation: a scaling of attention that the RoPE type applied stays as it was. Angles and products in fp32.
    """
    angle_BHKD = (by_BHK[..., None].float() * inv_freq.float()).repeat(1, 1, 1, 2)
    keys = keys_BHKD.float()
    return (keys * angle_BHKD.cos() + rotate_half(keys) * angle_BHKD.sin()).to(keys_BHKD.dtype)
