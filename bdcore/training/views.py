"""Views of a sequence: its keys and values in full, or what a sparse cache would keep of them before some position.

Nothing is written in place, so many views of one sequence can be extended, and gradients reach its keys and values
unless they were detached. Views of several positions are extended together: each is a sequence of a batch of its own
length, filled up on the left and masked.

Legend: B batch, N views in a batch, Q query heads, H KV heads, T new tokens, P keys before them, K kept keys, D head
dim, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, CacheLayerMixin

from bdcore.kv.attention import causal_block_mask
from bdcore.kv.budget import Selection
from bdcore.kv.positions import shift
from bdcore.kv.selection import Evidence, select
from bdcore.models.layers import LayerFacts, layer_facts

_NOWHERE = -(1 << 40)
"""Position of filling: beyond the reach of any sliding window."""


@dataclass(frozen=True)
class Sight:
    """How a sparse view is taken: what a training step draws."""

    policy: str
    budget: int
    position_mode: str

    @property
    def name(self) -> str:
        """Short and stable, for logs: the budget, and what differs from the paper."""
        parts = [f"budget_{self.budget}" if self.budget > 0 else "full"]
        parts += [] if self.policy in ("attention_mass", "full") else [self.policy]
        return "_".join(parts + ([] if self.position_mode == "absolute" else [self.position_mode]))


@dataclass(frozen=True)
class Block:
    """A stretch of the sequence that is read after a sparse view of everything before `start`."""

    start: int
    sight: Sight


@dataclass(frozen=True)
class LayerView:
    keys_BHPD: Tensor
    values_BHPD: Tensor
    queries_BQPD: Tensor | None = None
    """Of the same tokens; None once keys were dropped."""
    positions_BHP: Tensor | None = None
    """Where the keys stand, once some were dropped; None: key i stands at position i."""


@dataclass(frozen=True)
class View:
    """What new tokens see of those before them, and the position at which each sequence goes on."""

    layers: list[LayerView]
    next_positions_B: Tensor
    filled_BP: Tensor | None = None
    """True where a key is only filling."""

    @property
    def cached(self) -> int:
        """Keys per layer and head, filling included."""
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

    def extended(self, positions_BHP: Tensor | None) -> LayerView:
        assert self.keys is not None and self.values is not None and self.queries is not None
        queries = self.queries
        if self.prefix is not None:
            before = self.prefix.queries_BQPD
            queries = None if before is None else torch.cat([before, queries], 2)
        return LayerView(self.keys, self.values, queries, positions_BHP)


class _FunctionalCache(Cache):
    layers: list[_FunctionalLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[_FunctionalLayer], positions_BT: Tensor, visible_B1TS: Tensor | None) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.positions_BT, self.visible = positions_BT, visible_B1TS

    def positions(self, layer: int) -> Tensor | None:
        """Of the layer's keys and the new ones: (B, H, S)."""
        prefix = self.layers[layer].prefix
        if prefix is None or prefix.positions_BHP is None:
            return None
        H = prefix.positions_BHP.shape[1]
        return torch.cat([prefix.positions_BHP, self.positions_BT[:, None].expand(-1, H, -1)], 2)

    def observe(self, layer: int, queries_BQTD: Tensor) -> None:
        self.layers[layer].queries = queries_BQTD


def extend(model: Any, ids_BT: Tensor, *, view: View | None = None) -> tuple[Tensor, View]:
    """Run T tokens after a view. Returns hidden states (B, T, E), before the head, and the view extended by them."""
    (B, T), device = ids_BT.shape, ids_BT.device
    layers = view.layers if view is not None else [None] * model.config.num_hidden_layers
    starts_B = view.next_positions_B if view is not None else torch.zeros(B, dtype=torch.long, device=device)
    positions_BT = starts_B[:, None] + torch.arange(T, device=device)
    visible = _visible(view.filled_BP, T) if view is not None and view.filled_BP is not None else None
    cache = _FunctionalCache([_FunctionalLayer(layer) for layer in layers], positions_BT, visible)
    out = model.model(ids_BT, position_ids=positions_BT, cache=cache, use_cache=False, observer=cache)
    extended = [layer.extended(cache.positions(i)) for i, layer in enumerate(cache.layers)]
    filled = None if view is None or view.filled_BP is None else F.pad(view.filled_BP, (0, T))
    return out.last_hidden_state, View(extended, starts_B + T, filled)


def _visible(filled_BP: Tensor, T: int) -> Tensor:
    """Causal, and never a filled key: (B, 1, T, P + T)."""
    S = filled_BP.shape[1] + T
    return (causal_block_mask(T, S, filled_BP.device) & ~F.pad(filled_BP, (0, T))[:, None])[:, None]


def detached(view: View) -> View:
    """The same view, cut from the graph."""
    layers = [
        LayerView(x.keys_BHPD.detach(), x.values_BHPD.detach(), x.queries_BQPD, x.positions_BHP) for x in view.layers
    ]
    return View(layers, view.next_positions_B, view.filled_BP)


def sparse(view: View, blocks: Sequence[Block], *, rule: Callable[[str], Selection], window: int, model: Any) -> View:
    """What each block's sparse cache holds of the keys before its start, as one batch: block by block, N = blocks x B.

    `rule` gives the selection of a policy, `window` the newest queries it looks at. The choice has no gradient.
    """
    kept = [
        [_kept(layer, facts, block, rule(block.sight.policy).for_layer(i), window) for block in blocks]
        for i, (layer, facts) in enumerate(zip(view.layers, layer_facts(model), strict=True))
    ]
    lengths = [piece.keys_BHPD.shape[2] for piece in kept[0]]
    most, device = max(lengths), view.next_positions_B.device
    B = view.next_positions_B.shape[0]
    starts = [n if b.sight.position_mode == "in_cache" else b.start for b, n in zip(blocks, lengths, strict=True)]
    filled_NP = torch.arange(most, device=device) < torch.tensor([most - n for n in lengths], device=device)[:, None]
    return View(
        [_stacked(pieces, most) for pieces in kept],
        torch.tensor(starts, device=device).repeat_interleave(B),
        None if min(lengths) == most else filled_NP.repeat_interleave(B, 0),
    )


def _kept(layer: LayerView, facts: LayerFacts, block: Block, selection: Selection, window: int) -> LayerView:
    assert layer.positions_BHP is None and layer.queries_BQPD is not None, "a view with gaps is not made sparse again"
    keys, values = layer.keys_BHPD[:, :, : block.start], layer.values_BHPD[:, :, : block.start]
    queries = layer.queries_BQPD[:, :, max(0, block.start - window) : block.start]
    # Autocast would score in bf16, and keep other chunks than decoding does.
    with torch.no_grad(), torch.autocast(keys.device.type, enabled=False):
        seen = Evidence(queries, keys, facts.scale, softcap=facts.softcap, window=facts.window)
        index = select(seen, budget=block.sight.budget, selection=selection)
    keys = keys.gather(2, index[..., None].expand(-1, -1, -1, keys.shape[3]))
    values = values.gather(2, index[..., None].expand(-1, -1, -1, values.shape[3]))
    if block.sight.position_mode == "absolute":
        return LayerView(keys, values, positions_BHP=index)
    places = torch.arange(index.shape[2], device=index.device)
    return LayerView(shift(keys, places - index, facts.inv_freq), values, positions_BHP=places.expand_as(index))


def _stacked(pieces: Sequence[LayerView], most: int) -> LayerView:
    def filled(x: Tensor, value: float = 0.0) -> Tensor:
        return F.pad(x, (0, 0, most - x.shape[2], 0), value=value)

    positions = [p.positions_BHP[..., None] for p in pieces if p.positions_BHP is not None]
    return LayerView(
        torch.cat([filled(p.keys_BHPD) for p in pieces]),
        torch.cat([filled(p.values_BHPD) for p in pieces]),
        positions_BHP=torch.cat([filled(p, _NOWHERE) for p in positions])[..., 0],
    )


def checkpoint_layers(model: Any) -> None:
    """Compute each layer's activations again in the backward pass instead of keeping them.

    transformers' own switch drops the cache. Ours may be written twice: it holds what it was last given, the same.
    """
    for layer in model.model.layers:
        layer.gradient_checkpointing, layer._can_checkpoint_with_cache = True, True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
