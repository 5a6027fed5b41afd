"""Where drafts die, by label."""

import pytest

from bdcore.collapse import by_label
from bdcore.collapse.ratios import ratio_of_sums


def test_labels_have_acceptance_over_their_documents_and_a_share_of_the_deaths():
    sums = {
        "copied": [(9, 10), (18, 20), (8, 10), (7, 10)],
        "new": [(2, 10), (5, 20), (1, 10), (None, None)],
        "number": [(0, 5)],
    }
    copied, new, number = by_label(sums)
    assert [g.label for g in (copied, new, number)] == ["copied", "new", "number"]
    assert copied.acceptance == ratio_of_sums([9, 18, 8, 7], [10, 20, 10, 10])
    assert (new.acceptance.value, new.acceptance.n) == (pytest.approx(8 / 40), 3)
    assert number.acceptance.low is None
    rejected = 8 + 32 + 5
    assert [g.rejected_share for g in (copied, new, number)] == pytest.approx(
        [8 / rejected, 32 / rejected, 5 / rejected]
    )


def test_nothing_rejected_has_no_share():
    [group] = by_label({"a": [(4, 4), (2, 2)]})
    assert (group.rejected_share, group.acceptance.value) == (None, 1.0)
