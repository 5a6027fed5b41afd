"""Where drafts die: by their position in the round, and by a label of the token or the document."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from bdcore.collapse.intervals import CONFIDENCE, RESAMPLES, Estimate
from bdcore.collapse.pairing import Sums
from bdcore.collapse.ratios import ratio_of_sums


@dataclass(frozen=True)
class Survival:
    """Acceptance at one position of the draft, 1 = first."""

    position: int
    reached: Estimate
    """Accepted / drafted at this position: how many drafts live on beyond it."""
    conditional: Estimate
    """Accepted, of those where all before were accepted."""
    cut: int
    """Rounds that drafted the position before but not this one: why `conditional` is exact only where this is 0."""


def by_position(
    accepted_at: Sequence[Sequence[int]],
    drafted_at: Sequence[Sequence[int]],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> list[Survival]:
    """One entry per position. Inputs, per document: [i] = rounds in which draft i + 1 was accepted, or drafted.

    `conditional` needs the rounds that put a position to the test: drafted it and had all before accepted. The sums do
    not say how many of the rounds cut short were accepted to their end. It is taken to be the same share as of all,
    which is right for a cut by the length limit. A drafter that stops where it is unsure goes on in the better rounds:
    its later positions read too high, and the view `positions` over rounds is the one to use.
    ValueError for lists of unequal lengths, or more accepted than drafted.
    """
    width = max((len(d) for d in drafted_at), default=0)
    documents = [_padded(a, d, width) for a, d in zip(accepted_at, drafted_at, strict=True)]
    found: list[Survival] = []
    for i in range(width):
        accepted, drafted = [a[i] for a, _ in documents], [d[i] for _, d in documents]
        trials = [_trials(a, d, i) for a, d in documents]
        reached = ratio_of_sums(accepted, drafted, confidence=confidence, resamples=resamples)
        conditional = ratio_of_sums(accepted, trials, confidence=confidence, resamples=resamples)
        cut = sum(d[i - 1] - d[i] for _, d in documents) if i else 0
        found.append(Survival(i + 1, reached, conditional, cut))
    return found


def _padded(accepted: Sequence[int], drafted: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """A document that never drafted so far has zeros there."""
    if len(accepted) != len(drafted):
        raise ValueError(f"accepted_at has {len(accepted)} positions, drafted_at {len(drafted)}")
    for name, values, bound in (("accepted_at", accepted, drafted), ("drafted_at", drafted, [None, *drafted])):
        for i, (value, most) in enumerate(zip(values, bound, strict=False)):
            if value < 0 or (most is not None and value > most):
                raise ValueError(f"{name}[{i}] = {value}: between 0 and {most}")
    zeros = [0] * (width - len(drafted))
    return [*accepted, *zeros], [*drafted, *zeros]


def _trials(accepted: Sequence[int], drafted: Sequence[int], i: int) -> float:
    """Rounds that drafted position i with all before accepted."""
    if i == 0 or not drafted[i - 1]:
        return float(drafted[i])
    return max(float(accepted[i]), accepted[i - 1] * drafted[i] / drafted[i - 1])


@dataclass(frozen=True)
class Group:
    """Acceptance on the drafts of one label, such as a class of tokens or a distance of the evidence."""

    label: Hashable
    acceptance: Estimate
    """`n`: documents that have the label."""
    rejected_share: float | None
    """Of all rejected drafts, those of this label."""


def by_label(
    documents: Sequence[Mapping[Hashable, Sums]], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> list[Group]:
    """One entry per label, in order of first appearance. `documents`: label -> (accepted, drafted) of one document.

    Documents, not drafts, are resampled: a document is drawn with all its drafts of the label.
    """
    labels = dict.fromkeys(label for document in documents for label in document)
    sums = {label: [d[label] for d in documents if label in d] for label in labels}
    rejected = {label: sum(b - a for a, b in s if a is not None and b is not None) for label, s in sums.items()}
    total = sum(rejected.values())
    return [
        Group(
            label,
            ratio_of_sums([a for a, _ in s], [b for _, b in s], confidence=confidence, resamples=resamples),
            rejected[label] / total if total else None,
        )
        for label, s in sums.items()
    ]
