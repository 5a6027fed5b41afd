"""Where speculation stops paying."""

from dataclasses import replace

import pytest

from bdcore.collapse import Cell, Estimate, speedup_boundaries


def timed(values: dict[int, float | None], *, n: int = 8, width: float = 0.05, budget: int = 256):
    def known(value):
        return Estimate(None, None, None, n) if value is None else Estimate(value, value - width, value + width, n)

    return [Cell("ours", context, budget, 4, known(0.5), speedup=known(v)) for context, v in values.items()]


def test_collapsed_from_the_first_context_whose_whole_interval_is_below_one():
    [verdict] = speedup_boundaries(timed({8192: 0.6, 1024: 1.4, 2048: 0.98, 4096: 0.8}))
    assert (verdict.status, verdict.certain_from, verdict.below_from) == ("collapsed", 4096, 2048)
    assert verdict.lowest == 0.6
    assert verdict.sentence == (
        "ours, budget 256, gamma 4: is slower than the verifier alone at 4096 tokens: the decode speedup is 0.80x "
        "(0.75 to 0.85, n = 8), below 1. The point is below 1 from 2048 tokens."
    )


def test_the_shortest_context_is_judged_too():
    [verdict] = speedup_boundaries(timed({1024: 0.7}))
    assert (verdict.status, verdict.certain_from, verdict.below_from) == ("collapsed", 1024, 1024)
    assert "The point" not in verdict.sentence


def test_likely_where_points_alone_are_below_one():
    [verdict] = speedup_boundaries(timed({1024: 1.4, 2048: 0.98}))
    assert (verdict.status, verdict.certain_from, verdict.below_from) == ("likely", None, 2048)
    assert "likely slower than the verifier alone at 2048 tokens" in verdict.sentence
    assert "but the interval reaches above it" in verdict.sentence


def test_a_point_without_interval_is_never_certain():
    cells = [replace(cell, speedup=Estimate(0.2, None, None, 8)) for cell in timed({1024: 1.0})]
    [verdict] = speedup_boundaries(cells)
    assert (verdict.status, verdict.certain_from) == ("likely", None)
    assert "there is no interval" in verdict.sentence


def test_not_reached_is_an_answer_with_the_lowest_speedup():
    [verdict] = speedup_boundaries(timed({1024: 1.4, 2048: 1.1, 4096: 1.3}))
    assert (verdict.status, verdict.certain_from, verdict.lowest) == ("not reached", None, 1.1)
    assert "never slower than the verifier alone up to 4096 tokens" in verdict.sentence
    assert "1.10x (1.05 to 1.15, n = 8) at 2048 tokens" in verdict.sentence


def test_a_context_beyond_the_boundary_that_pays_again_is_said():
    [verdict] = speedup_boundaries(timed({1024: 0.8, 2048: 1.2}))
    assert verdict.status == "collapsed"
    assert "It is not slower at 2048 tokens" in verdict.sentence


@pytest.mark.parametrize("cells", [timed({1024: 0.2}, n=3), timed({1024: None, 2048: None}, n=0)])
def test_insufficient_below_four_prompts(cells):
    [verdict] = speedup_boundaries(cells)
    assert (verdict.status, verdict.certain_from, verdict.lowest) == ("insufficient", None, None)
    assert "no context has 4 prompts or more (1024 tokens: " in verdict.sentence


def test_contexts_with_too_few_prompts_are_left_out_and_said():
    [verdict] = speedup_boundaries([*timed({1024: 1.2}), *timed({2048: 0.1}, n=2)])
    assert verdict.status == "not reached"
    assert "Too few prompts to judge 2048 tokens" in verdict.sentence


def test_what_was_not_timed_has_no_verdict():
    replayed = [replace(cell, speedup=None) for cell in timed({1024: 0.5})]
    assert speedup_boundaries(replayed) == []
    assert (
        speedup_boundaries([Cell("ar", 1024, -1, 0, Estimate(None, None, None, 0), speedup=Estimate(1, 1, 1, 8))]) == []
    )


def test_series_are_never_mixed_and_the_full_cache_comes_last():
    verdicts = speedup_boundaries([*timed({1024: 0.5}, budget=-1), *timed({1024: 1.5})], quantity="end-to-end speedup")
    assert [(v.budget, v.status) for v in verdicts] == [(256, "not reached"), (-1, "collapsed")]
    assert "budget full" in verdicts[1].sentence and "the end-to-end speedup is 0.50x" in verdicts[1].sentence
