"""Where drafts die: acceptance by a label of the draft, such as its position in the round or the class of its token."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from bdcore.collapse.intervals import CONFIDENCE, RESAMPLES, Estimate
from bdcore.collapse.pairing import Sums
from bdcore.collapse.ratios import ratio_of_sums


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
