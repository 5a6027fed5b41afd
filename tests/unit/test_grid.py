"""Which cells a grid has, in which order, and what names them."""

from dataclasses import replace

import pytest

from bdcore.config import GridConfig
from bdcore.decoding.methods import METHODS
from bdcore.evaluation.degeneracy import distinct_n, is_degenerate
from bdcore.evaluation.grid import Cell, cells, context_facts
from bdcore.kv.budget import FULL


def grid(**changes):
    return GridConfig(
        **{"contexts": [100, 200], "budgets": [32, 64, "full"], "gammas": [2, 4], "prompts": 3, **changes}
    )


def settings_of(every, method, context=100):
    return [(c.budget, c.gamma) for c in every if c.method == method and c.context == context]


def test_each_method_takes_the_budgets_it_can():
    every = cells(grid())
    assert settings_of(every, "ar") == [(FULL, 0)]
    assert settings_of(every, "sd_full") == [(FULL, 2), (FULL, 4)]
    assert settings_of(every, "sd_sparse") == [(32, 2), (32, 4), (64, 2), (64, 4)]
    assert settings_of(every, "budgetdraft") == [(32, 2), (32, 4), (64, 2), (64, 4), (FULL, 2), (FULL, 4)]


def test_sd_full_is_measured_though_no_budget_is_full():
    every = cells(grid(budgets=[32]))
    assert settings_of(every, "sd_full") == [(FULL, 2), (FULL, 4)]
    assert settings_of(every, "budgetdraft") == [(32, 2), (32, 4)]


def test_ar_comes_first_in_every_context_whatever_the_order_of_the_methods():
    every = cells(grid(methods=["budgetdraft", "sd_full", "ar"]))
    assert [c.context for c in every] == sorted(c.context for c in every)
    for context in (100, 200):
        assert next(c for c in every if c.context == context).method == "ar"


def test_the_full_cache_has_the_policy_full():
    for cell in cells(grid(policy="sink_recent")):
        assert (cell.policy == "full") == (cell.budget == FULL)


def test_counts_are_worked_out_before_anything_runs():
    assert context_facts(grid()) == {"cells": 26, "contexts": 2, "samples": 78}


def test_keys_are_all_different_and_the_same_in_every_process():
    every = cells(grid())
    assert len({c.key for c in every}) == len(every)
    assert Cell("ar", 100, FULL, "full", "absolute", 0).key == every[0].key
    cell = every[-1]
    changed = {
        "method": "sd_sparse", "context": 7, "budget": 8, "policy": "random", "position_mode": "in_cache", "gamma": 9
    }  # fmt: skip
    assert all(replace(cell, **{name: value}).key != cell.key for name, value in changed.items())


def test_the_drafter_of_a_method_is_known_by_its_role():
    roles = {name: Cell(name, 1, FULL, "full", "absolute", 0).drafter for name in METHODS}
    assert roles == {"ar": None, "sd_full": "base", "sd_sparse": "base", "budgetdraft": "trained"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["sd_full"]}, "`ar` must be among them"),
        ({"budgets": ["full"]}, "`sd_sparse` needs at least one sparse budget"),
        ({"budgets": [100], "chunk": 16, "sinks": 4}, "nearest legal: 96 or 112"),
        ({"gammas": []}, "give at least one value"),
        ({"contexts": [100, 100]}, "each once"),
    ],
)
def test_a_grid_that_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        grid(**changes)


# --- degeneracy


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [([1, 2, 3, 4], 1, 1.0), ([1, 1, 1, 1], 1, 0.25), ([1, 2, 1, 2, 1], 2, 0.5), ([1, 2], 4, None), ([], 1, None)],
)
def test_distinct_n_is_a_share_of_the_n_grams(tokens, n, share):
    assert distinct_n(tokens, n) == share


def test_a_loop_is_degenerate_prose_is_not_and_a_word_is_neither():
    assert is_degenerate([1, 2, 3] * 20) is True
    assert is_degenerate(list(range(40))) is False
    assert is_degenerate([1, 2, 3]) is None
