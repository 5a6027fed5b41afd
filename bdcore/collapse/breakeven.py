"""Is speculation worth it: the decode speedup that acceptance and costs predict, and what would break even.

A round drafts gamma tokens, verifies gamma + 1, and gives the accepted ones and one of the verifier's own:
speedup = expected tokens * seconds of an `ar` step / (gamma * seconds of a draft + seconds of the verify)
(Leviathan et al. 2023, theorem 3.8, with acceptance by position and measured costs).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize

from bdcore.collapse.intervals import MIN_PROMPTS, Estimate
from bdcore.collapse.pairing import Sums, complete, quotient
from bdcore.collapse.words import times

_brentq: Callable[[Callable[[float], float], float, float], Any] = optimize.brentq

Conditional = Sequence[float | None]
"""[i]: acceptance of draft i + 1 given that all before were accepted. None, where no draft got so far, counts as 0."""


@dataclass(frozen=True)
class Costs:
    """Measured seconds. ValueError where one is not positive (a draft may be free)."""

    draft_s: float
    """Per draft token."""
    verify_s: Mapping[int, float]
    """gamma -> seconds of a verify of gamma + 1 tokens."""
    ar_s: float
    """A step of the verifier alone: one token."""

    def __post_init__(self) -> None:
        if self.draft_s < 0:
            raise ValueError(f"draft_s = {self.draft_s}: seconds, at least 0")
        for name, value in (("ar_s", self.ar_s), *((f"verify_s[{g}]", s) for g, s in self.verify_s.items())):
            if not value > 0:
                raise ValueError(f"{name} = {value}: seconds, more than 0")

    def of_round(self, gamma: int) -> float:
        """Seconds of a round relative to an `ar` step: the tokens it must give to break even. ValueError for a gamma
        whose verify was not measured."""
        if gamma not in self.verify_s:
            raise ValueError(f"gamma = {gamma}: no verify of it was measured; known are {sorted(self.verify_s)}")
        return (gamma * self.draft_s + self.verify_s[gamma]) / self.ar_s


def tokens_per_round(acceptance: Conditional, gamma: int) -> float:
    """Expected tokens of a round, the verifier's own included: 1 + a_1 + a_1 a_2 + ... up to gamma factors.

    ValueError for a gamma beyond `acceptance` or values outside 0 to 1.
    """
    if not 0 <= gamma <= len(acceptance):
        raise ValueError(f"gamma = {gamma}: acceptance is known for 0 to {len(acceptance)} drafts")
    tokens = chance = 1.0
    for i, value in enumerate(acceptance[:gamma]):
        a = value or 0.0
        if not 0.0 <= a <= 1.0:
            raise ValueError(f"acceptance[{i}] = {value}: a probability, between 0 and 1")
        chance *= a
        tokens += chance
    return tokens


def expected_speedups(acceptance: Conditional, costs: Costs) -> dict[int, float]:
    """gamma -> expected decode speedup, for every gamma with acceptance and a measured verify; gamma 0 is 1, `ar`."""
    gammas = [g for g in sorted(costs.verify_s) if 0 < g <= len(acceptance)]
    return {0: 1.0} | {g: tokens_per_round(acceptance, g) / costs.of_round(g) for g in gammas}


def best_gamma(speedups: Mapping[int, float]) -> int:
    """The gamma of the highest speedup, the shorter of equals; 0 where none beats the verifier alone."""
    return max(sorted(speedups), key=lambda gamma: speedups[gamma])


@dataclass(frozen=True)
class BreakEven:
    """The acceptance at which a gamma is as fast as the verifier alone. None where even 1 would not be enough."""

    gamma: int
    tokens: float
    """Tokens per round needed."""
    acceptance: float | None
    """Accepted / drafted needed."""
    conditional: float | None
    """The same at every position of the draft, each given all before."""


def break_even(costs: Costs, gamma: int) -> BreakEven:
    """ValueError for a gamma below 1 or one whose verify was not measured."""
    if gamma < 1:
        raise ValueError(f"gamma = {gamma}: at least 1 draft")
    tokens = costs.of_round(gamma)
    needed = max(0.0, (tokens - 1) / gamma)
    if needed > 1:
        return BreakEven(gamma, tokens, None, None)
    conditional = _brentq(lambda a: (tokens_per_round([a] * gamma, gamma) - 1) / gamma - needed, 0.0, 1.0)
    return BreakEven(gamma, tokens, needed, float(conditional))


@dataclass(frozen=True)
class CostBound:
    """How dear a draft may be before a given acceptance no longer pays."""

    gamma: int
    """Where the drafter may be dearest."""
    ratio: float | None
    """Seconds of a draft token / of an `ar` step at which the speedup is 1; None where not even a free draft pays."""
    sentence: str


def largest_cost_ratio(acceptance: Conditional, verify_ratios: Mapping[int, float]) -> CostBound:
    """What pair would do: the largest drafter/verifier cost ratio at which `acceptance` pays at some gamma.

    `verify_ratios`: gamma -> seconds of a verify of gamma + 1 tokens / of an `ar` step. ValueError without any gamma
    from 1 to the length of `acceptance`.
    """
    gammas = [g for g in sorted(verify_ratios) if 0 < g <= len(acceptance)]
    if not gammas:
        raise ValueError(f"verify_ratios: name a gamma from 1 to {len(acceptance)}; given are {sorted(verify_ratios)}")
    ratios = {g: (tokens_per_round(acceptance, g) - verify_ratios[g]) / g for g in gammas}
    gamma = best_gamma(ratios)
    tokens = tokens_per_round(acceptance, gamma)
    round_words = f"{tokens:.2f} tokens per round at gamma {gamma}, a verify of {verify_ratios[gamma]:.2f} `ar` steps"
    if ratios[gamma] <= 0:
        return CostBound(gamma, None, f"not even a free drafter pays: {round_words}.")
    text = f"pays while a draft token costs less than {ratios[gamma]:.3f} of an `ar` step ({round_words})."
    return CostBound(gamma, ratios[gamma], text)


@dataclass(frozen=True)
class Agreement:
    """Whether the gamma that is predicted to be best is the one measured to be best."""

    status: str
    """`same`; `within`: another, not slower within the interval; `apart`: slower for certain; `insufficient`."""
    predicted: int
    measured: int | None
    kept: Estimate
    """Measured speedup at the predicted gamma relative to that at the measured best, paired over documents."""
    sentence: str


def agreement(
    predicted: Mapping[int, float], measured: Mapping[int, Sequence[Sums]], *, min_prompts: int = MIN_PROMPTS
) -> Agreement:
    """Compare over the gammas in both. `predicted`: gamma -> speedup; `measured`: gamma -> per document (seconds of
    `ar`, seconds of the method), entry i the same document at every gamma. Gamma 0, the verifier alone, is always 1.

    Over the documents measured at every gamma. The measured best is the luckiest of several and so reads a little too
    fast, which makes `apart` a little too likely. ValueError where no gamma above 0 is in both.
    """
    shared = [g for g in sorted(measured) if g > 0 and g in predicted]
    if not shared:
        raise ValueError(f"no gamma was both predicted ({sorted(predicted)}) and measured ({sorted(measured)})")
    guess = best_gamma({0: 1.0} | {g: predicted[g] for g in shared})
    table = complete(*(measured[g] for g in shared))
    n = table.shape[1]
    if n < min_prompts:
        text = f"the best gamma cannot be checked: {n} of the {min_prompts} documents needed at every gamma."
        return Agreement("insufficient", guess, None, Estimate(None, None, None, n), text)
    seconds = {0: np.ones((2, n))} | {g: table[2 * i : 2 * i + 2] for i, g in enumerate(shared)}
    best = best_gamma({g: float(s[0].sum() / s[1].sum()) for g, s in seconds.items()})
    kept = quotient(*([(float(a), float(b)) for a, b in seconds[g].T] for g in (guess, best)))
    if guess == best:
        return Agreement("same", guess, best, kept, f"gamma {best} is best, as predicted (n = {n}).")
    status = "insufficient" if kept.high is None else "apart" if kept.high < 1 else "within"
    words = {
        "within": "as fast within the interval",
        "apart": "slower for certain",
        "insufficient": "which cannot be judged without an interval",
    }[status]
    text = f"predicted best is gamma {guess}, measured best gamma {best}: {times(kept)} of its speedup, {words}."
    return Agreement(status, guess, best, kept, text)
