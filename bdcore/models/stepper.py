"""A causal LM over its own cache: feed tokens, roll back, stay within the budget. Knows no decoding.

Legend: B batch, T tokens fed, V vocabulary.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bdcore.kv.budget import FULL, Selection, prefill_piece
from bdcore.kv.selection import NEEDS_QUERIES, select
from bdcore.kv.storage import KVStorage


class PositionError(ValueError):
    """A position the model does not support."""


DEFAULT_SELECTION = Selection("sink_recent")


@dataclass(frozen=True)
class CachePlan:
    """How a model's cache is kept. `budget` -1 keeps everything, in a buffer of `capacity` tokens."""

    capacity: int
    budget: int = FULL
    selection: Selection = DEFAULT_SELECTION
    position_mode: str = "absolute"
    block: int = 1
    """Most tokens fed at once after the prefill: the block in flight."""
    prefill_chunk: int = 512
    extrapolate: bool = False
    """Allow positions beyond the model's own."""


class Stepper:
    """A model and its cache. `logical` tokens were fed, `physical` keys are cached."""

    def __init__(self, model: Any, plan: CachePlan) -> None:
        self.model, self.plan = model, plan
        self.sparse = plan.budget != FULL
        self.select_s = 0.0
        config = model.config
        needs_queries = self.sparse and plan.selection.policy in NEEDS_QUERIES
        self.cache = KVStorage(
            config.num_hidden_layers,
            plan.budget + plan.block if self.sparse else plan.capacity,
            # Rolled-back tokens take their queries with them: keep enough for a full window to survive.
            num_queries=plan.selection.window + plan.block if needs_queries else 0,
        )
        self._inv_freq = model.model.rotary_emb.inv_freq
        self._in_cache = plan.position_mode == "in_cache"
        self._most_positions = config.max_position_embeddings

    @property
    def logical(self) -> int:
        return self.cache.logical

    @property
    def physical(self) -> int:
        return self.cache.physical

    @torch.inference_mode()
    def prefill(self, ids: list[int] | Tensor) -> Tensor:
        """Feed a prompt in pieces, dropping keys before a piece would exceed the budget. Last logits: (B, V)."""
        ids_BT = self._batch(ids)
        piece = self._prefill_piece()
        logits_BV = torch.empty(0)
        for start in range(0, ids_BT.shape[1], piece):
            part = ids_BT[:, start : start + piece]
            self.fit(part.shape[1])
            logits_BV = self._forward(part, last_only=True)[:, -1]
        return logits_BV

    @torch.inference_mode()
    def feed(self, ids: list[int] | Tensor) -> Tensor:
        """Feed a block of at most `plan.block` tokens; logits at each of them: (B, T, V)."""
        return self._forward(self._batch(ids), last_only=False)

    def rollback(self, n: int) -> None:
        """Take back the newest n tokens, which must still be cached."""
        if n:
            self.cache.rollback(n)

    @torch.inference_mode()
    def fit(self, incoming: int = 0) -> None:
        """Drop keys until `incoming` more fit into the budget."""
        if not self.sparse or self.physical + incoming <= self.plan.budget:
            return
        start = time.perf_counter()
        chunk = self.plan.selection.chunk
        room = (self.plan.budget - incoming) // chunk * chunk
        scale = self.model.model.layers[0].self_attn.scaling
        for index, layer in enumerate(self.cache.layers):
            keys, _ = layer.view()
            queries = keys if layer.queries is None else layer.queries[:, :, -self.plan.selection.window :]
            kept = select(queries, keys, budget=room, selection=self.plan.selection.for_layer(index), scale=scale)
            layer.keep(kept, self._inv_freq if self._in_cache else None)
        self.select_s += time.perf_counter() - start

    def _prefill_piece(self) -> int:
        if not self.sparse:
            return self.plan.prefill_chunk
        rule = self.plan.selection
        return prefill_piece(
            self.plan.budget, chunk=rule.chunk, sinks=rule.sinks, recent=rule.recent, most=self.plan.prefill_chunk
        )

    def _batch(self, ids: list[int] | Tensor) -> Tensor:
        tensor = ids if isinstance(ids, Tensor) else torch.tensor([ids])
        return tensor.to(self.model.device)

    def _forward(self, ids_BT: Tensor, *, last_only: bool) -> Tensor:
        T = ids_BT.shape[1]
        start = self.physical if self._in_cache else self.logical
        if start + T > self._most_positions and not self.plan.extrapolate:
            raise PositionError(
                f"position {start + T - 1} is beyond the model's {self._most_positions}; use position_mode = in_cache, "
                "a shorter context, or drafter.beyond_positions = extrapolate"
            )
        positions_1T = torch.arange(start, start + T, device=ids_BT.device)[None]
        out = self.model(
            ids_BT,
            position_ids=positions_1T,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            observer=self.cache,
        )
        self.cache.advance(T)
        return out.logits
