"""The methods of the grid, by name: which drafter, and which caches it may have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    name: str
    drafter: str | None
    """`base` or `trained`; None: no model drafts."""
    sparse: bool
    """Takes the grid's sparse budgets."""
    full: bool
    """Takes the full cache."""
    lookup: bool = False
    """Drafts from the text itself."""


METHODS = {
    m.name: m
    for m in (
        Method("ar", None, sparse=False, full=True),
        Method("ngram", None, sparse=False, full=True, lookup=True),
        Method("sd_full", "base", sparse=False, full=True),
        Method("sd_sparse", "base", sparse=True, full=False),
        Method("budgetdraft", "trained", sparse=True, full=True),
    )
}
