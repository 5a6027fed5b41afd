"""Acceptance of the same documents at several budgets, and how it varies with the choice of documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bdcore.collapse.intervals import Floats, resampled
from bdcore.collapse.pairing import Sums, complete
from bdcore.collapse.words import budget_order


@dataclass(frozen=True)
class Budgets:
    """Sums of the documents that are defined at every budget."""

    names: tuple[int, ...]
    """Ascending; -1, the full cache, is the largest."""
    accepted: Floats
    """(budgets, documents)."""
    drafted: Floats
    """(budgets, documents)."""

    @property
    def n(self) -> int:
        return self.accepted.shape[1]

    @property
    def acceptance(self) -> Floats:
        """(budgets,): ratios of sums."""
        return ratios(*self.accepted, *self.drafted)

    @property
    def weights(self) -> Floats:
        """(budgets,): the share of the drafted tokens."""
        return self.drafted.sum(-1) / self.drafted.sum()

    @property
    def columns(self) -> tuple[Floats, ...]:
        """What `ratios` takes."""
        return (*self.accepted, *self.drafted)

    def sums(self, budget: int) -> list[Sums]:
        i = self.names.index(budget)
        return [(float(a), float(b)) for a, b in zip(self.accepted[i], self.drafted[i], strict=True)]

    def too_little(self, min_prompts: int) -> str:
        """Why nothing can be said about the budgets, or an empty string."""
        if len(self.names) < 2:
            return "it takes two budgets"
        few = f"{self.n} of the {min_prompts} documents needed drafted at every budget"
        return few if self.n < min_prompts else "" if self.accepted.any() else "acceptance is 0 at every budget"

    def under(self, null: Floats, *, resamples: int, seed: int) -> Floats:
        """(budgets, resamples): acceptance of resampled documents, as it would be if `null` were true.

        A document is drawn with all its budgets. Deviations are widened by sqrt(n / (n - 1)), since documents drawn
        from n documents vary less than documents drawn anew.
        """
        drawn = resampled(lambda sums: ratios(*sums[..., None]), self.columns, resamples=resamples, seed=seed)
        return null[:, None] + np.sqrt(self.n / (self.n - 1)) * (drawn - self.acceptance[:, None])


def budget_table(by_budget: Mapping[int, Sequence[Sums]]) -> Budgets:
    """`by_budget`: (accepted, drafted) per document; entry i is the same document at every budget.

    Documents that are undefined at any budget are left out.
    """
    names = tuple(sorted(by_budget, key=budget_order))
    table = complete(*(by_budget[name] for name in names))
    return Budgets(names, table[0::2], table[1::2])


def ratios(*columns: Floats, axis: int = -1) -> Floats:
    """(budgets, ...): sum / sum per budget, of the numerators of all budgets and then their denominators."""
    half = len(columns) // 2
    pairs = zip(columns[:half], columns[half:], strict=True)
    return np.stack([top.sum(axis) / bottom.sum(axis) for top, bottom in pairs])


NO_SPREAD = "the documents differ between budgets by exactly the same, so that resampling sees no chance at work"


def p_value(observed: float, null: Floats) -> float | None:
    """Share of `null`, one value per resample, at least as large as what was observed; never 0.

    None where nothing varies under the null: documents that all agree are no certainty.
    """
    if observed > 1e-12 and null.max() < 1e-12:
        return None
    return float((1 + np.count_nonzero(null >= observed - 1e-12)) / (1 + len(null)))
