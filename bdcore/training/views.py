"""Views of a prefix: its keys and values in full, or a sparse choice of them, extended without being changed.

Nothing is written in place, so several views of one prefix can be extended one after another, and gradients reach the
prefix unless it was detached.

Legend: B batch, Q query heads, H KV heads, T new tokens, P prefix length, K kept keys, D head dim, E hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from bdcore.kv.budget import Selection
from bdcore.kv.positions import shift
from bdcore.kv.selection import Evidence, select
from bdcore.models.layers import LayerFacts, layer_facts


@dataclass(frozen=True)
class LayerView:
    keys_BHPD: Tensor
    values_BHPD: Tensor
    queries_BQWD: Tensor
    """Newest queries, for the observation window."""
    positions_BHP: Tensor | None = None
    """Where the keys stand, once some were dropped; None: key i stands at position i."""


@dataclass(frozen=True)
class View:
    """What a continuation sees of its prefix, and the position at which it goes on."""

    layers: list[LayerView]
    next_position: int

    @property
    def cached(self) -> int:
        """Keys per layer and head."""
        return self.layers[0].keys_BHPD.shape[2]


class _FunctionalLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, prefix: LayerView | None) -> None:
        super().__init__()
        self.prefix = prefix
        self.queries: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.prefix is not None:
            key_states = torch.cat([self.prefix.keys_BHPD, key_states], 2)
            value_states = torch.cat([self.prefix.values_BHPD, value_states], 2)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.prefix is None else self.prefix.keys_BHPD.shape[2]

    def get_max_length(self) -> int:
        return -1


class _FunctionalCache(Cache):
    layers: list[_FunctionalLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[_FunctionalLayer], positions_T: Tensor) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.positions_T = positions_T

    def positions(self, layer: int) -> Tensor | None:
        """Of the layer's keys and the new ones: (B, H, S)."""
        prefix = self.layers[layer].prefix
        if prefix is None or prefix.positions_BHP is None:
            return None
        B, H, _ = prefix.positions_BHP.shape
        return torch.cat([prefix.positions_BHP, self.positions_T.expand(B, H, -1)], 2)

    def observe(self, layer: int, queries_BQTD: Tensor) -> None:
        self.layers[layer].queries = queries_BQTD


def extend(model: Any, ids_BT: Tensor, *, view: View | None = None, window: int = 8) -> tuple[Tensor, View]:
    """Run T tokens after a view. Returns hidden states (B, T, E), before the head, and the view extended by them."""
    config = model.config
    layers = view.layers if view is not None else [None] * config.num_hidden_layers
    start = view.next_position if view is not None else 0
    end = start + ids_BT.shape[1]
    positions_T = torch.arange(start, end, device=ids_BT.device)
    cache = _FunctionalCache([_FunctionalLayer(layer) for layer in layers], positions_T)
    out = model.model(ids_BT, position_ids=positions_T[None], cache=cache, use_cache=True, observer=cache)
    extended = [
        LayerView(c.keys, c.values, c.queries[:, :, -window:], cache.positions(i))  # type: ignore
        for i, c in enumerate(cache.layers)
    ]
    return out.last_hidden_state, View(extended, end)


def detached(view: View) -> View:
    """The same view, cut from the graph."""
    layers = [
        LayerView(x.keys_BHPD.detach(), x.values_BHPD.detach(), x.queries_BQWD.detach(), x.positions_BHP)
        for x in view.layers
    ]
    return View(layers, view.next_position)


def sparse(view: View, *, budget: int, selection: Selection, position_mode: str, model: Any) -> View:
    """A view of at most `budget` keys per layer and head, chosen by the policy. The choice itself has no gradient."""
    in_cache = position_mode == "in_cache"
    layers = [
        _sparse_layer(x, facts, budget=budget, selection=selection.for_layer(i), in_cache=in_cache)
        for i, (x, facts) in enumerate(zip(view.layers, layer_facts(model), strict=True))
    ]
    return View(layers, layers[0].keys_BHPD.shape[2] if in_cache else view.next_position)


def _sparse_layer(
    layer: LayerView, facts: LayerFacts, *, budget: int, selection: Selection, in_cache: bool
) -> LayerView:
    assert layer.positions_BHP is None, "a view with gaps is not made sparse again"
    seen = Evidence(layer.queries_BQWD, layer.keys_BHPD, facts.scale, softcap=facts.softcap, window=facts.window)
    # Autocast would score in bf16, and keep other chunks than decoding does.
    with torch.no_grad(), torch.autocast(layer.keys_BHPD.device.type, enabled=False):
        index = select(seen, budget=budget, selection=selection)
    keys = layer.keys_BHPD.gather(2, index[..., None].expand(-1, -1, -1, layer.keys_BHPD.shape[3]))
    values = layer.values_BHPD.gather(2, index[..., None].expand(-1, -1, -1, layer.values_BHPD.shape[3]))
    if in_cache:
        keys = shift(keys, torch.arange(index.shape[2], device=index.device) - index, facts.inv_freq)
    return LayerView(keys, values, layer.queries_BQWD, None if in_cache else index)
