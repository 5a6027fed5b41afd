"""The practical ceiling: how often the verifier agrees with itself when it sees no more than the drafter does.

Not a proof: a drafter may guess what the cut verifier gets wrong, and it need not use its view as the verifier does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bdcore.collapse import Estimate, quotient
from bdcore.collapse.pairing import pooled
from bdcore.schema import SELF
from reports.series import Series, aligned, scene_of

_SAME = ("corpus", "workload", "temperature", "context", "budget", "policy", "position_mode", "gamma", "gamma_mode")


@dataclass(frozen=True)
class Ceiling:
    """One drafter in one cell, beside the verifier under the same view."""

    scene: str
    drafter: str
    context: int
    budget: int
    policy: str
    position_mode: str
    gamma: int
    acceptance: Estimate
    ceiling: Estimate
    reached: Estimate
    """`acceptance` as a share of `ceiling`, paired over documents."""


def ceilings(series: Sequence[Series]) -> list[Ceiling]:
    """Every cell of a drafter for which the verifier was measured under the same budget, policy and positions."""
    own = {tuple(s[n] for n in _SAME): s for s in series if s["drafter_name"] == SELF}
    pairs = [(s, own.get(tuple(s[n] for n in _SAME))) for s in series if s["drafter_name"] not in (None, SELF)]
    return [_ceiling(s, top) for s, top in pairs if top is not None]


def _ceiling(series: Series, top: Series) -> Ceiling:
    mine, highest = aligned(series.acceptance, top.acceptance)
    return Ceiling(
        scene_of(series),
        series["drafter_name"],
        series["context"],
        series["budget"],
        series["policy"],
        series["position_mode"],
        series["gamma"],
        *(pooled(sums) for sums in (mine, highest)),
        quotient(mine, highest),
    )
