"""Which layers copy: previous-token and induction scores of every layer, and the slice chosen from them by rule.

Induction heads attend, on a repeated sequence, to the token after the last occurrence of the current one; they are fed
by heads that attend to the previous token (Olsson et al. 2022). A slice without both cannot use its context.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bdcore.kv.attention import causal_block_mask, soft_capped
from bdcore.kv.storage import KVStorage
from bdcore.models.layers import LayerFacts, layer_facts


@dataclass(frozen=True)
class LayerScore:
    layer: int
    previous_token: float
    """Attention of the layer's best head on the previous token, mean over positions."""
    induction: float
    """Attention of the layer's best head on the token after the last occurrence, mean over the second half."""


@torch.inference_mode()
def layer_scores(model: Any, *, seed: int, length: int = 64, batch: int = 4) -> list[LayerScore]:
    """Scores on `batch` sequences of `length` random ids, repeated once. One layer's weights exist at a time."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    ids = torch.cat([half, half], 1).to(model.device)
    cache = KVStorage(model.config.num_hidden_layers, 2 * length, num_queries=2 * length)
    model(ids, cache=cache, use_cache=True, logits_to_keep=1, observer=cache)
    return [
        _score(i, layer.queries, layer.view()[0], facts, length)
        for i, (layer, facts) in enumerate(zip(cache.layers, layer_facts(model), strict=True))
    ]


def _score(index: int, queries: Tensor | None, keys: Tensor, facts: LayerFacts, length: int) -> LayerScore:
    assert queries is not None, "the observer saw no queries"
    group = queries.shape[1] // keys.shape[1]
    logits = queries.float() @ keys.float().repeat_interleave(group, 1).transpose(2, 3) * facts.scale
    visible = causal_block_mask(2 * length, 2 * length, logits.device, facts.window)
    weights = soft_capped(logits, facts.softcap).masked_fill(~visible, float("-inf")).softmax(-1)  # (B, Q, 2L, 2L)
    previous = weights.diagonal(-1, -2, -1).mean((0, 2)).max()
    # The diagonal starts one row early, at the last query of the first half: nothing has been repeated yet.
    induction = weights.diagonal(1 - length, -2, -1)[..., 1:].mean((0, 2)).max()
    return LayerScore(index, float(previous), float(induction))


def choose_layers(scores: list[LayerScore], num_layers: int) -> list[int]:
    """The slice: first and last layer, half of the rest the best induction layers, half the best previous-token
    layers before the last of those. Ascending.
    """
    last = len(scores) - 1
    if num_layers > len(scores) or num_layers < 2:
        raise ValueError(f"drafter.num_layers = {num_layers}: the verifier has {len(scores)} layers; choose 2 to that")
    rest = num_layers - 2
    inner = [s for s in scores if 0 < s.layer < last]
    copying = sorted(inner, key=lambda s: (-s.induction, s.layer))[: -(-rest // 2)]
    end = max((s.layer for s in copying), default=last)
    feeding = [s for s in inner if s not in copying]
    # A previous-token head only helps the induction heads above it.
    feeding.sort(key=lambda s: (s.layer > end, -s.previous_token, s.layer))
    chosen = {0, last} | {s.layer for s in copying + feeding[: rest // 2]}
    return sorted(chosen)
