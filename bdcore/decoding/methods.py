"""The methods of the grid, by name: which drafter, and which caches it may have."""

from dataclasses import dataclass

from bdcore.schema import SELF


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
    two_levels: bool = False
    """The drafter drafts for the verifier over a sparse cache, which has the grid's policy and position mode."""
    assisted: bool = False
    """Decoded by transformers' own loop, which reads the prompt itself."""
    workloads: tuple[str, ...] = ("greedy", "sampled", "replay")
    """What it is measured on, of the grid's."""
    gamma_modes: tuple[str, ...] = ("fixed", "confidence", "adaptive")
    """Those it follows; under another it drafts a fixed number."""

    @property
    def alone(self) -> bool:
        """The verifier without drafts."""
        return self.drafter is None and not self.lookup


METHODS = {
    m.name: m
    for m in (
        Method("ar", None, sparse=False, full=True, workloads=("greedy", "sampled")),
        # A lookup has no probability of what it drafts.
        Method("ngram", None, sparse=False, full=True, lookup=True, gamma_modes=("fixed", "adaptive")),
        Method("sd_full", "base", sparse=False, full=True),
        # It would draw by the library's own random numbers, and a replay would need another loop than the library's.
        Method(
            "hf_assisted",
            "base",
            sparse=False,
            full=True,
            assisted=True,
            workloads=("greedy",),
            gamma_modes=("fixed",),
        ),
        Method("sd_sparse", "base", sparse=True, full=False),
        # StreamingLLM: sinks and the newest tokens, re-rotated.
        Method("streaming", "base", sparse=True, full=False, policy="sink_recent", position_mode="in_cache"),
        # MagicDec: the verifier drafts for itself. With one draft token in a replay it is a practical ceiling of every
        # drafter that sees no more.
        Method("self_sparse", SELF, sparse=True, full=False),
        # TriForce. A replay measures no time, and its drafts there would be those of `self_sparse`.
        Method(
            "triforce",
            "base",
            sparse=True,
            full=False,
            two_levels=True,
            workloads=("greedy", "sampled"),
            gamma_modes=("fixed", "adaptive"),
        ),
        Method("budgetdraft", "trained", sparse=True, full=True),
    )
}
