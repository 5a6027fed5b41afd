"""A causal LM over its own cache: feed tokens, roll back, stay within the budget. Knows no decoding.

Several sequences are fed together as one packed block: their tokens share every read of the weights, while each
attends to its own cache. No padding, no mask, and a row computes what it computes alone.

Legend: B batch, T tokens fed, N tokens of a packed block, V vocabulary, H KV heads, S cached keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from bdcore.kv.attention import attend
from bdcore.kv.budget import FULL, FULL_POLICY, OBSERVES, STORES_ALL, Selection, prefill_piece
from bdcore.kv.selection import Evidence, select, window_mass
from bdcore.kv.storage import KVStorage
from bdcore.models.layers import LayerFacts, layer_facts

Oracle = Callable[[], Tensor]
"""The verifier's attention on every token of the sequence so far: (tokens,)."""


class PositionError(ValueError):
    """A position the model does not support."""


DEFAULT_SELECTION = Selection("sink_recent")


@dataclass(frozen=True)
class CachePlan:
    """How a model's cache is kept. Budget -1 or policy `full` keeps everything, in a buffer of `capacity` tokens."""

    capacity: int
    budget: int = FULL
    selection: Selection = DEFAULT_SELECTION
    position_mode: str = "absolute"
    block: int = 1
    """Most tokens fed at once after the prefill: the block in flight."""
    prefill_chunk: int = 512
    extrapolate: bool = False
    """Allow positions beyond the model's own."""
    observe: int = 0
    """Newest queries to remember although the cache is full: the verifier's window for the policy `oracle`."""
    refresh: int = 0
    """Rounds between rebuilding a sparse cache from all tokens so far; 0: never."""

    def __post_init__(self) -> None:
        if self.retrieves and self.position_mode == "in_cache":
            raise PositionError(
                f"policy = {self.selection.policy}: keys that come back have no place in the order of position_mode = "
                "in_cache; use absolute"
            )

    @property
    def sparse(self) -> bool:
        """Whether attention reads less than everything."""
        return self.budget != FULL and self.selection.policy != FULL_POLICY

    @property
    def retrieves(self) -> bool:
        """Whether what is not read stays stored."""
        return self.sparse and self.selection.policy in STORES_ALL

    @property
    def drops(self) -> bool:
        """Whether keys are dropped."""
        return self.sparse and not self.retrieves

    def sized(self, tokens: int) -> "CachePlan":
        """The plan with a buffer for a sequence of `tokens`: where keys are dropped it does not grow with it."""
        return self if self.drops else replace(self, capacity=tokens + self.block)


class Stepper:
    """A model and its cache. `logical` tokens were fed, `physical` keys are cached."""

    def __init__(self, model: Any, plan: CachePlan, *, oracle: Oracle | None = None) -> None:
        self.model, self.plan, self.oracle = model, plan, oracle
        self.sparse = plan.sparse
        config = model.config
        needs_queries = self.sparse and plan.selection.policy in OBSERVES
        self._window = plan.selection.window if needs_queries else plan.observe
        self._in_cache = plan.position_mode == "in_cache"
        self.cache = KVStorage(
            config.num_hidden_layers,
            plan.budget + plan.block if plan.drops else plan.capacity,
            # Rolled-back tokens take their queries with them: keep enough for a full window to survive.
            num_queries=self._window + plan.block if self._window else 0,
            track=plan.drops,
            in_cache=self._in_cache,
            most=plan.budget + plan.block if plan.retrieves else None,
        )
        self.layers: list[LayerFacts] = layer_facts(model)
        self._most_positions = config.max_position_embeddings

    @property
    def logical(self) -> int:
        return self.cache.logical

    @property
    def physical(self) -> int:
        return self.cache.physical

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Feed tokens in pieces, dropping keys before a piece would exceed the budget. Last logits: (B, V).

        Where everything is stored, it is also read here: what is chosen is chosen by `fit`.
        """
        ids_BT = self._batch(ids)
        piece = self._prefill_piece()
        for layer in self.cache.layers:
            layer.read_all()
        logits_BV = torch.empty(0)
        for start in range(0, ids_BT.shape[1], piece):
            part = ids_BT[:, start : start + piece]
            if self.plan.drops:
                self.fit(part.shape[1])
            logits_BV = self._forward(part, last_only=True)[:, -1]
        return logits_BV

    @torch.inference_mode()
    def feed(self, ids: Sequence[int] | Tensor, *, last_only: bool = False) -> Tensor:
        """Feed a block of at most `plan.block` tokens; logits at each of them, or at the last: (B, T or 1, V)."""
        return self._forward(self._batch(ids), last_only=last_only)

    def rollback(self, n: int) -> None:
        """Take back the newest n tokens, which must still be cached."""
        if n:
            self.cache.rollback(n)

    @torch.inference_mode()
    def fit(self, incoming: int = 0) -> None:
        """Drop keys until `incoming` more fit into the budget, or choose anew which of the stored ones are read."""
        if not self.sparse or self.physical + incoming <= self.plan.budget:
            return
        room = (self.plan.budget - incoming) // self.plan.selection.chunk * self.plan.selection.chunk
        told = self.oracle() if self.oracle is not None and self.plan.selection.policy == "oracle" else None
        for index, (layer, facts) in enumerate(zip(self.cache.layers, self.layers, strict=True)):
            seen = replace(self.evidence(index), oracle_HT=None if told is None else _told(told, layer.tokens))
            kept_BHK = select(seen, budget=room, selection=self.plan.selection.for_layer(index))
            layer.keep(kept_BHK, facts.inv_freq if self._in_cache else None)

    def evidence(self, index: int) -> Evidence:
        """What a policy may look at in one layer."""
        layer, facts = self.cache.layers[index], self.layers[index]
        keys_BHSD, _ = layer.view()
        return Evidence(
            keys_BHSD if layer.queries is None else layer.queries[:, :, -self._window :],
            keys_BHSD,
            facts.scale,
            softcap=facts.softcap,
            positions_HT=None if self.plan.retrieves else self.cache.positions(index),
            window=facts.window,
        )

    @torch.inference_mode()
    def attention_on_tokens(self) -> Tensor:
        """Attention of the newest queries on every token, averaged over layers and heads: (tokens,). Full cache."""
        if self.sparse or not self.plan.observe:
            raise ValueError(
                "policy = oracle: the verifier must keep a full cache and observe its queries (observe >= 1)"
            )
        mass_T = [window_mass(self.evidence(i))[0].mean(0) for i in range(len(self.layers))]
        return torch.stack(mass_T).mean(0)

    def clear(self) -> None:
        """Forget everything that was fed."""
        self.cache.clear()

    def next_positions(self, T: int) -> Tensor:
        """Positions of the next T tokens: (1, T). Raises PositionError where the model has none."""
        start = self.physical if self._in_cache else self.logical
        if start + T > self._most_positions and not self.plan.extrapolate:
            raise PositionError(
                f"position {start + T - 1} is beyond the model's {self._most_positions}; use position_mode = in_cache, "
                "a shorter context, or drafter.beyond_positions = extrapolate"
            )
        return torch.arange(start, start + T, device=self.model.device)[None]

    def _prefill_piece(self) -> int:
        if not self.plan.drops:
            return self.plan.prefill_chunk
        rule = self.plan.selection
        return prefill_piece(
            self.plan.budget, chunk=rule.chunk, sinks=rule.sinks, recent=rule.recent, most=self.plan.prefill_chunk
        )

    def _batch(self, ids: Sequence[int] | Tensor) -> Tensor:
        tensor = ids if isinstance(ids, Tensor) else torch.tensor([list(ids)])
        return tensor.to(self.model.device)

    def _forward(self, ids_BT: Tensor, *, last_only: bool) -> Tensor:
        out = self.model(
            ids_BT,
            position_ids=self.next_positions(ids_BT.shape[1]),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            observer=self.cache,
        )
        self.cache.advance(ids_BT.shape[1])
        return out.logits


def _told(told_T: Tensor, tokens_HS: Tensor) -> Tensor:
    """The oracle's score of every cached key; tokens it has not seen yet are the newest, and matter most."""
    known = tokens_HS < told_T.shape[0]
    scores_HS = told_T.to(tokens_HS.device)[tokens_HS.clamp(max=told_T.shape[0] - 1)]
    return torch.where(known, scores_HS, torch.inf)


@torch.inference_mode()
def feed_together(
    steppers: Sequence[Stepper], blocks: Sequence[Sequence[int]], *, last_only: bool = False
) -> list[Tensor]:
    """Feed each stepper of one model its own block, in one forward. Logits of each: (T or 1, V)."""
    if len(steppers) == 1:
        return [steppers[0].feed(blocks[0], last_only=last_only)[0]]
    model, lengths = steppers[0].model, [len(block) for block in blocks]
    assert all(s.model is model for s in steppers), "one forward runs one model"
    ends_B = torch.tensor(lengths).cumsum(0)
    packed = _Packed([s.cache for s in steppers], lengths)
    out = model(
        torch.tensor([[token for block in blocks for token in block]], device=model.device),
        position_ids=torch.cat([s.next_positions(n) for s, n in zip(steppers, lengths, strict=True)], 1),
        cache=packed,
        use_cache=True,
        logits_to_keep=(ends_B - 1).to(model.device) if last_only else 0,
        observer=packed,
    )
    for stepper, n in zip(steppers, lengths, strict=True):
        stepper.cache.advance(n)
    return list(out.logits[0].split(1 if last_only else lengths))


class _Packed(Cache):
    """The caches of several sequences behind one packed block: tokens of sequence b follow those of b - 1."""

    def __init__(self, rows: list[KVStorage], lengths: list[int]) -> None:
        super().__init__(layers=[*rows[0].layers])
        self.rows, self.lengths = rows, lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for row, key, value in zip(
            self.rows, key_states.split(self.lengths, 2), value_states.split(self.lengths, 2), strict=True
        ):
            row.layers[layer_idx].update(key, value)
        return key_states, value_states  # `attend` reads each row's own

    def attend(self, layer: int, query_1QND: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """Each sequence's queries over its own cache: (1, Q, N, D)."""
        out: list[Tensor] = []
        for row, query in zip(self.rows, query_1QND.split(self.lengths, 2), strict=True):
            row.observe(layer, query)
            positions = row.positions(layer) if window else None
            keys, values = row.layers[layer].read.view()
            out.append(attend(query, keys, values, scale, window=window, softcap=softcap, positions_HS=positions))
        return torch.cat(out, 2)
