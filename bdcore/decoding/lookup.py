"""Drafting without a model: what followed the newest tokens where they stood before (prompt lookup).

Legend: G drafted tokens, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bdcore.decoding.sequence import Row


@dataclass(frozen=True)
class Lookup:
    """A drafter that reads the sequence alone."""

    longest: int = 3
    """Most tokens of the suffix that is looked for."""


class Occurrences:
    """Where each n-gram of a growing sequence last stood before something."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._next: dict[tuple[int, ...], int] = {}
        self._read = 1

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that followed the newest earlier occurrence of the longest suffix; [] without one.

        Every call gives the sequence of the call before, or a longer one that starts with it.
        """
        for end in range(self._read, len(tokens)):
            for n in range(1, min(self.longest, end) + 1):
                self._next[tuple(tokens[end - n : end])] = end
        self._read = max(self._read, len(tokens))
        for n in range(min(self.longest, len(tokens)), 0, -1):
            start = self._next.get(tuple(tokens[-n:]))
            if start is not None:
                return list(tokens[start : start + most])
        return []


class LookupProposer:
    """Drafts for one row by lookup. It has no cache and reads no prompt."""

    cache = None
    kv_bytes = 0

    def __init__(self, lookup: Lookup, row: "Row") -> None:
        start = time.perf_counter()
        self.row = row
        self._seen = Occurrences(lookup.longest)
        self._seen.draft(row.prompt, 0)
        self.prefill_s = time.perf_counter() - start

    def draft(self) -> None:
        """Draft what is found, at most what the row wants."""
        row = self.row
        most = min(row.length.next(), row.remaining - 1)
        if most > 0:
            row.draft = self._seen.draft(row.sequence, most)
        if not row.chooser.sampling.greedy:
            model = row.verifier.model
            sure_GV = torch.zeros(len(row.draft), model.config.vocab_size, device=model.device)
            sure_GV[range(len(row.draft)), row.draft] = 1.0
            row.drafted_from = list(sure_GV)

    def settle(self) -> float:
        """Nothing to take back."""
        return 0.0
