"""The methods of the grid, by name: which drafter, and which caches it may have."""

from dataclasses import dataclass

SELF = "self"
"""The verifier as a drafter."""


@dataclass(frozen=True)
class Method:
    name: str
    drafter: str | None
    """`base`, `trained` (and every drafter of `grid.drafters`) or `self`; None: no model drafts."""
    sparse: bool
    """Takes the grid's sparse budgets."""
    full: bool
    """Takes the full cache."""
    lookup: bool = False
    """Drafts from the text itself."""
    policy: str | None = None
    """The one policy of the method; None: those of the grid."""
    position_mode: str | None = None
    """The one position mode of the method; None: those of the grid."""

    @property
    def alone(self) -> bool:
        """The verifier without drafts."""
        return self.drafter is None and not self.lookup


METHODS = {
    m.name: m
    for m in (
        Method("ar", None, sparse=False, full=True),
        Method("ngram", None, sparse=False, full=True, lookup=True),
        Method("sd_full", "base", sparse=False, full=True),
        Method("sd_sparse", "base", sparse=True, full=False),
        # StreamingLLM: sinks and the newest tokens, re-rotated.
        Method("streaming", "base", sparse=True, full=False, policy="sink_recent", position_mode="in_cache"),
        # MagicDec: the verifier drafts for itself. With one draft token in a replay it is a practical ceiling of every
        # drafter that sees no more.
        Method("self_sparse", SELF, sparse=True, full=False),
        Method("budgetdraft", "trained", sparse=True, full=True),
    )
}
