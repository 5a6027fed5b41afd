"""The budget: how many keys per layer and head a drafter may cache, which values are legal, how they are filled."""

from dataclasses import dataclass, replace
from typing import Any

FULL = -1
FULL_POLICY = "full"
STORES_ALL = frozenset({"retrieval", "retrieval_ahead"})
"""Policies whose budget bounds what is read: what is not chosen stays stored, and may come back."""
READS_AHEAD = frozenset({"attention_ahead", "retrieval_ahead"})
"""Policies by which a chunk counts as much as the one before it: having found a passage, a copying head reads on."""
OBSERVES = STORES_ALL | READS_AHEAD | {"attention_mass", "no_sinks", "no_recent"}
"""Policies that score keys by the attention of the newest queries."""


@dataclass(frozen=True)
class Selection:
    """How keys are chosen. `sinks`, `recent` and `window` are in tokens."""

    policy: str
    chunk: int = 8
    sinks: int = 8
    recent: int = 8
    window: int = 8
    seed: int = 0

    def for_layer(self, layer: int) -> "Selection":
        """The same rule with the layer's own seed, so that `random` draws other chunks in each."""
        return replace(self, seed=self.seed + layer)


def parse_budget(value: Any) -> int:
    """`full` or -1 is the full cache; anything else must be a whole number of tokens."""
    if value == "full":
        return FULL
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"a budget is a number of tokens or 'full', not {value!r}")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"a budget is a number of tokens or 'full', not {value!r}") from None


def forced_chunks(*, chunk: int, sinks: int, recent: int) -> int:
    """Most chunks that sinks and recent keys take; recent keys may straddle one chunk more than they fill."""
    return -(-sinks // chunk) + -(-max(recent, 1) // chunk) + 1


def check_budget(budget: int, *, chunk: int, sinks: int, recent: int) -> None:
    """Refuse a budget that chunks cannot fill exactly; the message gives the nearest legal values."""
    if budget == FULL:
        return
    least = (forced_chunks(chunk=chunk, sinks=sinks, recent=recent) + 1) * chunk
    if budget < least:
        raise ValueError(
            f"budget = {budget} cannot hold sinks = {sinks}, recent = {recent} and a chunk = {chunk} to choose; "
            f"the smallest legal budget is {least}"
        )
    if budget % chunk:
        below, above = budget // chunk * chunk, (budget // chunk + 1) * chunk
        raise ValueError(
            f"budget = {budget} is not a multiple of chunk = {chunk}; nearest legal: {max(below, least)} or {above}"
        )


def keys_within(size: int, *, key_bytes: int, block: int, chunk: int, sinks: int, recent: int) -> int:
    """The largest legal budget whose cache, with a block of `block` tokens in flight, takes at most `size` bytes.

    `key_bytes`: one token's keys and values over all layers and heads. ValueError when not even the smallest fits.
    """
    budget = (size // key_bytes - block) // chunk * chunk
    least = (forced_chunks(chunk=chunk, sinks=sinks, recent=recent) + 1) * chunk
    if budget < least:
        raise ValueError(
            f"budget_bytes = {size}: holds {max(0, size // key_bytes)} keys of {key_bytes} bytes; the smallest legal "
            f"budget of {least} keys and the block of {block} take {(least + block) * key_bytes} bytes"
        )
    return budget


def prefill_piece(budget: int, *, chunk: int, sinks: int, recent: int, most: int) -> int:
    """Tokens to feed at once while a prompt is compressed into `budget`: a whole number of chunks.

    A quarter of the budget, so that most of it holds the past, and never so much that forced keys would not fit.
    """
    free = budget - forced_chunks(chunk=chunk, sinks=sinks, recent=recent) * chunk
    return max(chunk, min(most, budget // 4, free) // chunk * chunk)
