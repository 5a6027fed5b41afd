"""The upper envelope of one run: a trained drafter beside the best of the others, document by document."""

import pytest

from reports.upper import upper_curves, upper_envelope
from tests.unit.test_apart import series


def of(found, budget, setting="attention_mass, absolute"):
    return next(u for u in found if (u.budget, u.setting) == (budget, setting))


def test_every_cell_stands_beside_the_best_without_it():
    found = upper_envelope([
        series("budgetdraft", 64, 40, drafter="trained"), series("budgetdraft", 256, 40, drafter="trained"),
        series("budgetdraft", -1, 40, drafter="trained"),
        series("sd_sparse", 64, 20), series("sd_sparse", 64, 60, policy="sink_recent", position_mode="in_cache"),
        series("sd_sparse", 256, 20), series("sd_full", -1, 25),
        series("triforce", 64, 99), series("hf_assisted", -1, 99),
    ])  # fmt: skip
    assert len(found) == 3
    small, large, full = of(found, 64), of(found, 256), of(found, -1, "full cache")
    assert (small.best, small.verdict) == ("base, sink_recent, in_cache", "below")
    assert small.gap.value == pytest.approx(-0.2) and small.gap.high < 0
    assert (large.best, large.verdict) == ("base, full cache", "above")  # it holds more than any budget
    assert (full.best, full.verdict) == ("base, full cache", "above")


def test_single_budget_siblings_are_others_too():
    found = upper_envelope([
        series("budgetdraft", 64, 40, drafter="trained"), series("budgetdraft", 64, 41, drafter="fixed_64"),
    ])  # fmt: skip
    assert {u.drafter: u.best for u in found} == {
        "trained": "fixed_64, attention_mass, absolute",
        "fixed_64": "trained, attention_mass, absolute",
    }


def test_too_few_documents_and_no_spread_are_no_verdict():
    few = [
        series(m, 64, r, drafter=d, docs=3) for m, r, d in (("budgetdraft", 40, "trained"), ("sd_sparse", 20, "base"))
    ]
    assert [u.verdict for u in upper_envelope(few)] == ["insufficient"]
    flat = [series("budgetdraft", 64, rate, drafter=drafter) for rate, drafter in ((40, "trained"), (20, "fixed_64"))]
    assert [u.verdict for u in upper_envelope(flat)] == ["insufficient"] * 2  # every document differs by the same


def test_nothing_to_compare_is_no_figure():
    assert upper_envelope([series("budgetdraft", 64, 40, drafter="trained")]) == []
    assert upper_curves([]) is None
