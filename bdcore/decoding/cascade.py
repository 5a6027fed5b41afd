"""Two levels of drafting (TriForce, arXiv 2404.11912): a small drafter drafts for the verifier over a sparse cache of
its own keys; what that middle level accepts or says itself is the draft that the verifier checks with its full cache.

The middle level is a row like any other, whose verifier has the sparse cache. Its tokens are distributed as the sparse
verifier's own (Leviathan et al. 2023), whatever the small drafter does, so they are drafts drawn from exactly those
distributions, and the verifier's check against these is exact too. Between two checks no level drops keys: a
distribution depends on the tokens before it alone, not on how many of them were drafted how.

Both caches have the same budget: the middle one by the plan's policy, the small drafter's always by `sink_recent` with
in-cache positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.sequence import Proposer, Row
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan

PlayRound = Callable[[Sequence[Row]], None]


@dataclass(frozen=True)
class Cascade:
    """A drafter of two levels: the verifier over a sparse cache, with this small drafter before it."""

    small: Drafter


class CascadeProposer(Proposer):
    """Drafts for one row by rounds of the middle level. `play` is the decoder's round, which knows this module.

    The middle level stops at EOS, as its own text would. What is drafted and accepted below it is counted nowhere: a
    round of the row is a check by the full cache. ValueError for the rule `confidence`.
    """

    def __init__(self, cascade: Cascade, plan: CachePlan, row: Row, play: PlayRound) -> None:
        if row.length.threshold is not None:
            raise ValueError("gamma_mode = confidence: two levels draft no token by itself; use fixed or adaptive")
        super().__init__(Drafter(row.verifier.model, None), plan, row)
        self._play = play
        # Half a block, so that a drafter that is often wrong is not asked for more than the next check can use.
        rule = DraftRule(gamma=max(1, -(-row.length.gamma // 2)))
        sampling, seed = row.chooser.sampling, row.fork()
        self.middle = Row(self.stepper, row.prompt, rule, row.new_tokens, row.eos, sampling, seed, None)
        self.small = _SmallProposer(cascade.small, small_plan(plan), self.middle)
        self.middle.proposer = self.small
        self.prefill_s += self.small.prefill_s

    @property
    def kv_bytes(self) -> int:
        """Bytes of both caches."""
        return self.cache.bytes() + self.small.cache.bytes()

    def draft(self) -> None:
        """Draft what the row wants, or up to EOS."""
        row, middle = self.row, self.middle
        if not self.start():
            return
        middle.tokens, middle.new_tokens, middle.reason = [*row.tokens], len(row.tokens) + self._wanted, None
        self.small.catch_up(self._wanted)
        while middle.reason is None:
            before = len(middle.tokens)
            self._play([middle])
            row.drafted_from += middle.drawn_from[: len(middle.tokens) - before]
        row.draft = middle.tokens[len(row.tokens) :]

    def settle(self) -> float:
        """Both levels forget what the verifier rejected, and drop keys down to the budget. Seconds of it."""
        middle, row = self.middle, self.row
        middle.tokens, middle.draft, middle.reason = [*row.tokens], [], row.reason
        return super().settle() + self.small.settle_block()


class _SmallProposer(Proposer):
    """The small drafter, which keeps all keys of a block until the verifier has checked it: any of it may come back."""

    def settle(self) -> float:
        self.rewind()
        return 0.0

    def settle_block(self) -> float:
        """`settle`, once the verifier has checked the block."""
        return super().settle()


def small_plan(plan: CachePlan) -> CachePlan:
    """The small drafter's cache beside a middle level of this plan."""
    return replace(plan, selection=replace(plan.selection, policy="sink_recent"), position_mode="in_cache")
