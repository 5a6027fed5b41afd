"""Where keys and values lie: preallocated buffers with two lengths, and the verbs append, rollback, keep, view.

`logical` counts the tokens of the sequence that were fed; `physical` the keys that are cached. They differ once keys
were dropped; `tokens` then says which token of the sequence each cached key belongs to. Owns storage, never policy.

Legend: B batch, Q query heads, H KV heads, T new keys, K kept keys, S capacity, D head dim.
"""

# pyright: reportIncompatibleVariableOverride=false
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from bdcore.kv.positions import shift


class LayerStorage(CacheLayerMixin):
    """One layer's keys and values in buffers of `capacity` keys, allocated at the first append."""

    is_sliding = False
    is_croppable = True
    # Allocated by the first append; the base class allows None before.
    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int, num_queries: int, *, track: bool = False) -> None:
        super().__init__()
        self.capacity, self.num_queries, self.track = capacity, num_queries, track
        self.physical = 0
        self.fed = 0
        self._tokens: Tensor | None = None  # (H, S), only where keys are dropped
        self.queries: Tensor | None = None  # newest queries (B, Q, <= num_queries, D), for the observation window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, D = key_states.shape
        self.keys = key_states.new_empty(B, H, self.capacity, D)
        self.values = value_states.new_empty(B, H, self.capacity, value_states.shape[3])
        if self.track:
            assert B == 1, "a sparse cache holds one sequence"
            self._tokens = torch.empty(H, self.capacity, dtype=torch.long, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append T keys and values; returns views of everything cached."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.physical + key_states.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} keys asked to hold {end}"
        self.keys[:, :, self.physical : end] = key_states
        self.values[:, :, self.physical : end] = value_states
        T = key_states.shape[2]
        if self._tokens is not None:
            self._tokens[:, self.physical : end] = torch.arange(self.fed, self.fed + T, device=self._tokens.device)
        self.physical, self.fed = end, self.fed + T
        return self.view()

    @property
    def tokens(self) -> Tensor:
        """Index in the sequence of every cached key: (H, S). Without `track` nothing is ever dropped: 0, 1, 2, ..."""
        if self._tokens is None:
            return torch.arange(self.physical, device=self.keys.device).expand(self.keys.shape[1], -1)
        return self._tokens[:, : self.physical]

    def view(self) -> tuple[Tensor, Tensor]:
        """All cached keys and values."""
        return self.keys[:, :, : self.physical], self.values[:, :, : self.physical]

    @property
    def read(self) -> "LayerStorage":
        """What attention reads."""
        return self

    def read_all(self) -> None:
        """Read everything that is stored, which a layer without a choice does anyway."""

    def observe(self, queries_BQTD: Tensor) -> None:
        """Remember the newest queries; they belong to the newest keys."""
        if self.num_queries:
            seen = [queries_BQTD] if self.queries is None else [self.queries, queries_BQTD]
            self.queries = torch.cat(seen, 2)[:, :, -self.num_queries :]

    def crop(self, tokens_to_remove: int) -> None:
        """transformers' convention: a value <= 0, the number of tokens to remove."""
        self.rollback(-tokens_to_remove)

    def rollback(self, n: int) -> None:
        """Forget the newest n keys (and their queries)."""
        assert 0 <= n <= self.physical, f"rollback of {n} from {self.physical} cached keys"
        self.physical, self.fed = self.physical - n, self.fed - n
        if self.queries is not None and n:
            self.queries = self.queries[:, :, :-n]

    def keep(self, index_BHK: Tensor, inv_freq: Tensor | None) -> None:
        """Keep only these keys, in this order. With `inv_freq` they are re-rotated to positions 0..K-1."""
        self.hold(self, index_BHK, inv_freq)

    def hold(self, other: "LayerStorage", index_BHK: Tensor, inv_freq: Tensor | None) -> None:
        """`keep` of another layer's keys, in place of what this one has."""
        K = index_BHK.shape[2]
        keys, values = other.view()
        gather = index_BHK[..., None]
        kept = keys.gather(2, gather.expand(-1, -1, -1, keys.shape[3]))
        if inv_freq is not None:
            kept = shift(kept, torch.arange(K, device=kept.device) - index_BHK, inv_freq)
            if self.queries is not None:  # they move with the newest keys
                moved = torch.full(self.queries.shape[:3], K - self.physical, device=kept.device)
                self.queries = shift(self.queries, moved, inv_freq)
        self.keys[:, :, :K] = kept
        self.values[:, :, :K] = values.gather(2, gather.expand(-1, -1, -1, values.shape[3]))
        if self._tokens is not None:
            self._tokens[:, :K] = other.tokens.gather(1, index_BHK[0])
        self.physical, self.fed = K, other.fed

    def clear(self) -> None:
        """Forget everything; the buffers stay."""
        self.physical, self.fed, self.queries = 0, 0, None

    def buffers(self) -> list[Tensor]:
        """What is allocated."""
        return [self.keys, self.values] if self.is_initialized else []

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.physical + query_length, 0

    def get_seq_length(self) -> int:
        return self.physical

    def get_max_length(self) -> int:
        return self.capacity


class RetrievedStorage(LayerStorage):
    """Keeps every key, and reads copies of those chosen last with what was appended since: a budget bounds what is
    read, not what is stored. Until a choice is made, everything is read.
    """

    def __init__(self, capacity: int, num_queries: int, *, most: int) -> None:
        super().__init__(capacity, num_queries)
        self._chosen = LayerStorage(most, 0, track=True)
        self._reads_all = True

    @property
    def read(self) -> LayerStorage:
        return self if self._reads_all else self._chosen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append T keys and values; returns views of what is read."""
        everything = super().update(key_states, value_states)
        return everything if self._reads_all else self._chosen.update(key_states, value_states)

    def read_all(self) -> None:
        self._reads_all = True

    def keep(self, index_BHK: Tensor, inv_freq: Tensor | None) -> None:
        """Read only these keys, in this order; the others stay stored."""
        if not self._chosen.is_initialized:
            self._chosen.lazy_initialization(*self.view())
        self._chosen.hold(self, index_BHK, inv_freq)
        self._reads_all = False

    def rollback(self, n: int) -> None:
        super().rollback(n)
        if not self._reads_all:
            self._chosen.rollback(n)

    def clear(self) -> None:
        super().clear()
        self.read_all()

    def buffers(self) -> list[Tensor]:
        return super().buffers() + self._chosen.buffers()


class KVStorage(Cache):
    """The layers of one model, and how many tokens of the sequence they have been fed. With `most`, all keys are stored
    and at most so many of them read.
    """

    layers: list[LayerStorage]  # type: ignore[assignment]

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        *,
        num_queries: int = 0,
        track: bool = False,
        in_cache: bool = False,
        most: int | None = None,
    ) -> None:
        def layer() -> LayerStorage:
            if most is not None:
                return RetrievedStorage(capacity, num_queries, most=most)
            return LayerStorage(capacity, num_queries, track=track)

        super().__init__(layers=[layer() for _ in range(num_layers)])
        self.in_cache = in_cache
        self.logical = 0
        self.peak_physical = 0

    @property
    def physical(self) -> int:
        return self.layers[0].physical

    def observe(self, layer: int, queries_BQTD: Tensor) -> None:
        self.layers[layer].observe(queries_BQTD)

    def positions(self, layer: int) -> Tensor | None:
        """Where the keys that a layer reads stand, (H, S), once some may be missing; None while key i stands at i."""
        storage = self.layers[layer].read
        return storage.tokens if storage.track and not self.in_cache else None

    def advance(self, n: int) -> None:
        """Count n fed tokens, after every layer has appended their keys."""
        self.logical += n
        self.peak_physical = max(self.peak_physical, self.physical)

    def rollback(self, n: int) -> None:
        """Forget the newest n tokens. They must still be cached."""
        for layer in self.layers:
            layer.rollback(n)
        self.logical -= n

    def crop(self, tokens_to_remove: int) -> None:
        """transformers' convention: a value <= 0, the number of tokens to remove."""
        self.rollback(-tokens_to_remove)

    def clear(self) -> None:
        """Forget everything; the buffers and the peak stay."""
        for layer in self.layers:
            layer.clear()
        self.logical = 0

    def bytes(self, most: int | None = None) -> int:
        """Bytes of the key and value buffers: as allocated, or of at most `most` keys in each."""
        buffers = [t[:, :, :most] for layer in self.layers for t in layer.buffers()]
        return sum(t.numel() * t.element_size() for t in buffers)
