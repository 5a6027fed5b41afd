"""Where the numbers that arXiv 2606.00144 prints contradict each other, and the arithmetic that shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from scipy.optimize import brentq

from reports.printed import Number, find

TOLERANCE = 0.02
"""Relative. Numbers are printed to a hundredth, and a mean over budgets moves by less than this."""
NEW_TOKENS = 256
CONTRADICTIONS = ("baseline", "same_run", "peak", "one_acceptance", "count")


@dataclass(frozen=True)
class Peak:
    """One corpus and context: Table 1, the best of its speedups, beside Figure 3, the peak of their mean."""

    dataset: str
    context: int
    best: float
    """Table 1's speedup, a mean over budgets."""
    peak: float
    gamma: int
    acceptance: float
    """Table 1's, a mean over budgets."""
    own: float
    """Tokens per second of the verifier alone at this context."""
    other_context: int
    """Whose verifier alone would explain `ratio` best."""
    other: float

    @property
    def ratio(self) -> float:
        return self.best / self.peak

    @property
    def baselines(self) -> float:
        return self.own / self.other

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE

    @property
    def foreign(self) -> bool:
        """Table 1 is off by the ratio of two of its own rows of the verifier alone."""
        return not self.agrees and abs(self.ratio / self.baselines - 1) <= TOLERANCE

    @property
    def corrected(self) -> float:
        """Table 1's speedup over the verifier alone at the same context."""
        return self.best / self.baselines if self.foreign else self.best

    @property
    def accepted(self) -> float:
        """Draft tokens accepted per round."""
        return self.acceptance * self.gamma

    @property
    def rounds(self) -> float:
        """Rounds that a whole answer takes."""
        return NEW_TOKENS / (1 + self.accepted)

    @property
    def agreement(self) -> float:
        """Chance per token that gives this many accepted tokens, were tokens independent."""
        return float(brentq(lambda p: sum(p**i for i in range(1, self.gamma + 1)) - self.accepted, 0.0, 1.0))


@dataclass(frozen=True)
class Contradiction:
    """Printed numbers that cannot all be right."""

    name: str
    """One of `CONTRADICTIONS`."""
    sentence: str
    numbers: tuple[Number, ...]


def peaks(printed: Sequence[Number]) -> list[Peak]:
    """Table 1 against Figure 3, per context and corpus."""
    return [_peak(printed, n) for n in find(printed, exhibit="figure_3", metric="speedup") if n.dataset and n.context]


def _peak(printed: Sequence[Number], figure: Number) -> Peak:
    place = {"dataset": figure.dataset, "context": figure.context}
    speedups = find(printed, exhibit="table_1", metric="speedup", **place)
    acceptances = find(printed, exhibit="table_1", metric="acceptance", **place)
    alone = {n.context: n.value for n in find(printed, metric="tokens_per_s", dataset=figure.dataset)}
    best, own = mean(n.value for n in speedups), alone[figure.context]
    others = [context for context in alone if context != figure.context]
    nearest = min(others, key=lambda context: abs(best / figure.value - own / alone[context]))
    assert figure.dataset and figure.context and figure.gamma and nearest
    acceptance = mean(n.value for n in acceptances)
    return Peak(
        figure.dataset, figure.context, best, figure.value, figure.gamma, acceptance, own, nearest, alone[nearest]
    )


def contradictions(printed: Sequence[Number]) -> list[Contradiction]:
    """What cannot all be right, found by arithmetic alone."""
    found = [c for peak in peaks(printed) for c in (_peak_found(printed, peak), _same_run(printed, peak)) if c]
    return [*found, *_one_acceptance(printed), *_count(printed)]


def _peak_found(printed: Sequence[Number], peak: Peak) -> Contradiction | None:
    if peak.agrees:
        return None
    place = {"dataset": peak.dataset, "context": peak.context}
    table = find(printed, exhibit="table_1", metric="speedup", **place)
    headline = [
        n for n in find(printed, exhibit="abstract", context=peak.context) if n.value == max(t.value for t in table)
    ]
    involved = (*table, *find(printed, exhibit="figure_3", **place), *headline)
    start = (
        f"{peak.dataset}, {peak.context} tokens: Table 1's best speedups average {peak.best:.2f}x over the budgets, "
        f"Figure 3's peak is {peak.peak:.2f}x: {peak.best:.2f} / {peak.peak:.2f} = {peak.ratio:.3f}."
    )
    if not peak.foreign:
        why = " No ratio of two rows of the verifier alone explains it."
        return Contradiction("peak", start + why + _shared_gamma(printed, peak), involved)
    why = (
        f" The verifier alone makes {peak.own:.2f} tokens/s at {peak.context} tokens and {peak.other:.2f} at "
        f"{peak.other_context}: {peak.own:.2f} / {peak.other:.2f} = {peak.baselines:.3f}. So Table 1 looks divided by "
        f"the row of {peak.other_context} tokens; by its own row it is {peak.best:.2f} / {peak.baselines:.3f} = "
        f"{peak.corrected:.2f}x."
    )
    told = [f" The abstract's {n.value:.2f}x becomes {n.value / peak.baselines:.2f}x." for n in headline]
    return Contradiction("baseline", start + why + "".join(told), involved)


def _shared_gamma(printed: Sequence[Number], peak: Peak) -> str:
    place = {"dataset": peak.dataset, "context": peak.context}
    values = {n.value for n in find(printed, exhibit="table_1", metric="acceptance", **place)}
    if len(values) > 1:
        return ""
    return (
        f" Table 1 gives every budget one acceptance, {values.pop():.2%}, which different draft lengths would not; at "
        f"one draft length the mean over the budgets is {peak.best:.2f}x, above the highest mean of Figure 3."
    )


def _same_run(printed: Sequence[Number], peak: Peak) -> Contradiction | None:
    """Table 1's best gamma is that of Table 3: both print the same runs."""
    place = {"dataset": peak.dataset, "context": peak.context, "metric": "speedup"}
    best = find(printed, exhibit="table_1", **place)
    fixed = find(printed, exhibit="table_3", gamma=peak.gamma, **place)
    if not fixed:
        return None
    one, other = mean(n.value for n in best), mean(n.value for n in fixed)
    if abs(one / other - 1) <= TOLERANCE:
        return None
    place["metric"] = "acceptance"
    accepted = [find(printed, exhibit=exhibit, **place) for exhibit in ("table_1", "table_3")]
    same = all(a.value == b.value for a, b in zip(*accepted, strict=True))
    text = (
        f"{peak.dataset}, {peak.context} tokens: by Figure 3 gamma {peak.gamma} is the best, so Table 1 and Table 3 "
        f"print the same runs{' (and the same acceptance, to the last digit)' if same else ''}, but their speedups "
        f"average {one:.2f}x and {other:.2f}x: {one:.2f} / {other:.2f} = {one / other:.3f}."
    )
    return Contradiction("same_run", text, (*best, *fixed))


def _one_acceptance(printed: Sequence[Number]) -> list[Contradiction]:
    """The budget changes nothing in Table 1 and much in Table 3, for one corpus and context."""
    found: list[Contradiction] = []
    for peak in peaks(printed):
        place = {"dataset": peak.dataset, "context": peak.context, "metric": "acceptance"}
        best, fixed = (find(printed, exhibit=exhibit, **place) for exhibit in ("table_1", "table_3"))
        values = [n.value for n in fixed]
        if len({n.value for n in best}) == 1 and max(values) - min(values) > TOLERANCE * max(values):
            text = (
                f"{peak.dataset}, {peak.context} tokens: Table 1 prints an acceptance of {best[0].value:.2%} at every "
                f"budget, Table 3 (gamma {fixed[0].gamma}) "
                + ", ".join(f"{n.value:.2%} at {n.budget}" for n in fixed)
                + f": a range of {100 * (max(values) - min(values)):.2f} points against 0."
            )
            found.append(Contradiction("one_acceptance", text, (*best, *fixed)))
    return found


def _count(printed: Sequence[Number]) -> list[Contradiction]:
    """Figure 3's note counts its own cells."""
    claimed = {n.metric: n for n in find(printed, exhibit="figure_3", dataset=None)}
    gammas = [peak.gamma for peak in peaks(printed)]
    shortest = min(n.gamma for n in printed if n.gamma)
    counted = {"interior_peaks": sum(g > shortest for g in gammas), "monotone": sum(g == shortest for g in gammas)}
    if all(claimed[name].value == count for name, count in counted.items()):
        return []
    text = (
        f"Figure 3's note counts {claimed['interior_peaks'].value:.0f} cells with an interior peak and "
        f"{claimed['monotone'].value:.0f} that fall with gamma; its own draft lengths give "
        f"{counted['interior_peaks']} and {counted['monotone']}."
    )
    return [Contradiction("count", text, tuple(claimed.values()))]
