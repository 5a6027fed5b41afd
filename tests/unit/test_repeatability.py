"""Two runs of one grid side by side: speedups against the `ar` around a sample, and samples that differ."""

import pytest

from benchmarks.repeatability import COUNTS, compared, differing, speedups, speedups_alone, words


def row(method, doc, *, decode_s, ar_decode_s=None, budget=-1, drafted=8):
    counts = dict.fromkeys(COUNTS, 0) | {"output_ids": [1, 2], "drafted": drafted}
    cell = {"method": method, "context": 64, "budget": budget, "gamma": 0 if method == "ar" else 2}
    cell |= {"drafter_name": None, "policy": "full", "position_mode": "absolute"}
    return {**cell, **counts, "doc_id": doc, "decode_s": decode_s, "ar_decode_s": ar_decode_s or decode_s}


def measured(slow=1.0, **changes):
    """Two prompts; `slow`: the machine's pace after the first `ar` of each."""
    drafts = [row("sd_full", d, decode_s=2.0 * slow, ar_decode_s=s * slow, **changes) for d, s in (("a", 4), ("b", 6))]
    return [row("ar", "a", decode_s=4.0), row("ar", "b", decode_s=6.0), *drafts]


def test_a_speedup_is_that_of_sums_and_a_slow_moment_hits_both_sides():
    assert list(speedups(measured()).values()) == list(speedups(measured(slow=3.0)).values()) == [2.5]
    assert list(speedups_alone(measured(slow=2.0)).values()) == [1.25]


def test_runs_are_compared_by_their_medians():
    facts = compared(measured(), measured(slow=2.0))
    assert (facts["speedup"], facts["speedup_apart"], facts["speedup_alone_apart"]) == ([2.5, 2.5], 1.0, 0.5)
    assert facts["differing"] == [] and "the same in both runs" in words(facts)


@pytest.mark.parametrize("second", [measured(drafted=9), measured()[:-1]])
def test_samples_that_differ_or_are_missing_are_named(second):
    found = differing(measured(), second)
    assert "sd_full full absolute 64 -1 2 b" in found and not any(name.startswith("ar") for name in found)
