"""Where drafts die: acceptance by a label of the draft, such as its position in the round or the class of its token."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from bdcore.collapse.intervals import CONFIDENCE, RESAMPLES, Estimate
from bdcore.collapse.pairing import Sums
from bdcore.collapse.ratios import ratios_of_sums


@dataclass(frozen=True)
class Group:
    """Acceptance on the drafts of one label, such as a class of tokens or a distance of the evidence."""

    label: Hashable
    acceptance: Estimate
    """`n`: documents that have the label."""
    rejected_share: float | None
    """Of all rejected drafts, those of this label."""


def by_label(
    sums: Mapping[Hashable, Sequence[Sums]], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> list[Group]:
    """One entry per label, in their order. `sums`: label -> (accepted, drafted) of every document that has it.

    Documents, not drafts, are resampled: a document is drawn with all its drafts of the label.
    """
    ratios = [([a for a, _ in s], [b for _, b in s]) for s in sums.values()]
    found = ratios_of_sums(ratios, confidence=confidence, resamples=resamples)
    rejected = {label: sum(b - a for a, b in s if a is not None and b is not None) for label, s in sums.items()}
    total = sum(rejected.values())
    return [
        Group(label, acceptance, rejected[label] / total if total else None)
        for label, acceptance in zip(sums, found, strict=True)
    ]
