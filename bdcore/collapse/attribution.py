"""What lost acceptance is due to: one thing of a collapsed setting is swapped at a time, on the same documents.

A swap that gives back nothing clears its suspect. Shares of several swaps need not add up to one: causes may overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bdcore.collapse.intervals import CONFIDENCE, MIN_PROMPTS, RESAMPLES, Estimate, Floats
from bdcore.collapse.pairing import Sums, difference, paired
from bdcore.collapse.words import percent, points


@dataclass(frozen=True)
class Swap:
    """What one change to the collapsed setting does to its acceptance."""

    name: str
    status: str
    """`gives back` or `takes away`: the whole interval of `gained` is beyond 0; `no evidence`; `insufficient`."""
    gained: Estimate
    """Acceptance with the swap minus that of the baseline, paired."""
    share: Estimate
    """`gained` as a share of what was lost on these documents; None where the loss's interval is not above 0."""
    sentence: str


@dataclass(frozen=True)
class Attribution:
    """What a collapsed baseline lost, and what each swap gives back of it."""

    lost: Estimate
    """Acceptance of the reference minus that of the baseline, paired."""
    swaps: tuple[Swap, ...]
    sentence: str


def attribute_loss(
    reference: Sequence[Sums],
    baseline: Sequence[Sums],
    swaps: Mapping[str, Sequence[Sums]],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    min_prompts: int = MIN_PROMPTS,
) -> Attribution:
    """Each table holds (accepted, drafted) per document; entry i is the same document in all of them.

    `reference`: before the collapse, such as a prompt of the drafter's native length. `baseline`: collapsed. `swaps`:
    the baseline with one thing changed, by name.

    A swap is judged over the documents that it, the reference and the baseline are all defined on; its `n` says how
    many. Tables of different lengths are a ValueError.
    """
    lost = difference(reference, baseline, confidence=confidence, resamples=resamples)

    def judge(name: str, swap: Sequence[Sums]) -> Swap:
        gained, loss, share = (
            paired(statistic, reference, baseline, swap, confidence=confidence, resamples=resamples)
            for statistic in (_gained, _lost, _share)
        )
        if not _above(loss) or gained.n < min_prompts:
            share = Estimate(None, None, None, gained.n)
        status = "insufficient" if gained.n < min_prompts or gained.value is None else _status(gained)
        return Swap(name, status, gained, share, _words(name, status, gained, share, loss, min_prompts))

    found = tuple(judge(name, swap) for name, swap in swaps.items())
    return Attribution(lost, found, _loss_words(lost, min_prompts))


# Columns: accepted and drafted of the reference, of the baseline, of the swap.


def _lost(a: Floats, b: Floats, c: Floats, d: Floats, e: Floats, f: Floats, axis: int = -1) -> Floats:
    return a.sum(axis) / b.sum(axis) - c.sum(axis) / d.sum(axis)


def _gained(a: Floats, b: Floats, c: Floats, d: Floats, e: Floats, f: Floats, axis: int = -1) -> Floats:
    return e.sum(axis) / f.sum(axis) - c.sum(axis) / d.sum(axis)


def _share(a: Floats, b: Floats, c: Floats, d: Floats, e: Floats, f: Floats, axis: int = -1) -> Floats:
    return _gained(a, b, c, d, e, f, axis) / _lost(a, b, c, d, e, f, axis)


def _above(loss: Estimate) -> bool:
    """A share of a loss that may be 0 could be anything."""
    return loss.low is not None and loss.low > 0.0


def _status(gained: Estimate) -> str:
    if gained.low is not None and gained.low > 0.0:
        return "gives back"
    return "takes away" if gained.high is not None and gained.high < 0.0 else "no evidence"


def _words(name: str, status: str, gained: Estimate, share: Estimate, loss: Estimate, min_prompts: int) -> str:
    if status == "insufficient":
        return f"{name}: cannot be judged, {gained.n} of the {min_prompts} documents needed."
    acts = {"gives back": "gives back", "takes away": "takes away more", "no evidence": "gives back nothing certain"}
    text = f"{name} {acts[status]}: {points(gained)}"
    if share.value is None:
        return f"{text}; no share, since a loss is not certain: {points(loss)}."
    return f"{text}, {percent(share)} of the {100 * (loss.value or 0.0):.1f} points lost."


def _loss_words(lost: Estimate, min_prompts: int) -> str:
    if lost.value is None or lost.n < min_prompts:
        return f"what was lost cannot be judged: {lost.n} of the {min_prompts} documents needed."
    if _above(lost):
        return f"the baseline lost {points(lost)} of acceptance."
    return f"the baseline lost nothing for certain: {points(lost)} of acceptance."
