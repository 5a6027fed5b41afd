"""Greedy drafts at ascending positions of a document, by a model and its cache, or by lookup.

Legend: V vocabulary.
"""

from dataclasses import replace
from typing import Protocol

from bdcore.decoding.lookup import Lookup, Occurrences
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan, Oracle, Stepper


class Drafts(Protocol):
    """What drafts along one document."""

    @property
    def cached_peak(self) -> int:
        """Most keys per layer and head so far, block in flight included."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes that they take."""
        ...

    def at(self, position: int, choice: int) -> tuple[list[int], int]:
        """(drafts after the first `position` tokens, how many tokens count as drafted).

        `choice` is the verifier's token: past a first draft that differs from it nothing can be accepted, and nothing
        need be drafted.
        """
        ...


class ModelDrafts:
    """A drafter whose cache holds tokens of the document alone, within its budget, between positions."""

    def __init__(self, drafter: Drafter, plan: CachePlan, ids: list[int], gamma: int, oracle: Oracle) -> None:
        self.drafter, self.ids, self.gamma = drafter, ids, gamma
        plan = replace(plan, block=max(gamma + 1, 2)).sized(len(ids))
        self.stepper = Stepper(drafter.model, plan, oracle=oracle)

    @property
    def cached_peak(self) -> int:
        return self.stepper.cache.peak_physical

    @property
    def kv_bytes(self) -> int:
        # A buffer of everything is as long as the whole document: at a shorter context count what it needed there.
        return self.stepper.cache.bytes(None if self.stepper.plan.drops else self.cached_peak)

    def at(self, position: int, choice: int) -> tuple[list[int], int]:
        stepper = self.stepper
        stepper.prefill(self.ids[stepper.logical : position - 1])
        stepper.fit()  # a policy that stores everything has read with it all, and chooses here
        drafts = [self._next(self.ids[position - 1])]
        while drafts[0] == choice and len(drafts) < self.gamma:
            drafts.append(self._next(drafts[-1]))
        stepper.rollback(stepper.logical - position)
        stepper.fit()
        return drafts, self.gamma

    def _next(self, token: int) -> int:
        logits_V = self.stepper.feed([token], last_only=True)[0, -1]
        return int(self.drafter.to_ids(logits_V.argmax(-1)))


class LookupDrafts:
    """Drafts from the document so far; a position without an earlier occurrence counts nothing as drafted."""

    cached_peak = kv_bytes = 0

    def __init__(self, ids: list[int], gamma: int) -> None:
        self.ids, self.gamma = ids, gamma
        self._seen = Occurrences(Lookup().longest)

    def at(self, position: int, choice: int) -> tuple[list[int], int]:
        drafts = self._seen.draft(self.ids[:position], self.gamma)
        return drafts, len(drafts)
