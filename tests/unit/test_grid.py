"""Which cells a grid has, in which order, and what names them."""

from dataclasses import replace

import pytest

from bdcore.config import GridConfig
from bdcore.decoding.methods import METHODS
from bdcore.evaluation.degeneracy import distinct_n, is_degenerate
from bdcore.evaluation.grid import Cell, cells, context_facts, unused_exclusions
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


def test_policies_and_position_modes_multiply_sparse_caches_and_the_full_one_stands_once():
    every = cells(grid(policy=["random", "oracle"], position_mode=["absolute", "in_cache"], contexts=[100], gammas=[2]))
    assert [(c.budget, c.policy, c.position_mode) for c in every if c.method == "budgetdraft"] == [
        (budget, policy, mode)
        for policy in ("random", "oracle")
        for mode in ("absolute", "in_cache")
        for budget in (32, 64)
    ] + [(FULL, "full", "absolute")]
    assert sum(c.method == "sd_sparse" for c in every) == 8
    assert [(c.budget, c.policy, c.position_mode) for c in every if c.method == "sd_full"] == [
        (FULL, "full", "absolute")
    ]
    assert len({c.key for c in every}) == len(every) == 1 + 1 + 8 + 9


def test_replay_comes_after_greedy_with_the_same_cells_but_ar():
    every = cells(grid(workloads=["replay", "greedy"], methods=["ngram", "sd_sparse", "ar"]))
    greedy, replay = ([c for c in every if c.workload == w] for w in ("greedy", "replay"))
    assert every == [*greedy, *replay]
    assert replay == [replace(c, workload="replay") for c in greedy if c.method != "ar"]
    assert len({c.key for c in every}) == len(every) == 2 * 7 + 2 * 6
    assert {c.workload for c in cells(grid(workloads="replay"))} == {"replay"}


@pytest.mark.parametrize(("mode", "lookups"), [("fixed", "fixed"), ("confidence", "fixed"), ("adaptive", "adaptive")])
def test_lookup_has_one_cell_per_draft_length_and_no_confidence(mode, lookups):
    every = cells(grid(methods=["ar", "ngram", "sd_full"], gamma_mode=mode, contexts=[100], refresh=3))
    assert [(c.budget, c.policy, c.gamma, c.gamma_mode, c.refresh) for c in every if c.method == "ngram"] == [
        (FULL, "full", 2, lookups, 0),
        (FULL, "full", 4, lookups, 0),
    ]
    assert {c.gamma_mode for c in every if c.method == "sd_full"} == {mode}


def test_counts_are_worked_out_before_anything_runs():
    assert context_facts(grid()) == {"cells": 26, "contexts": 2, "samples": 78}
    two = [{"source": "stdlib", "split": "test"}, {"source": "pg19", "split": "test"}]
    assert context_facts(grid(corpus=two, workloads=["greedy", "replay"])) == {
        "cells": 26 + 24, "contexts": 2, "samples": 50 * 3 * 2
    }  # fmt: skip


def test_keys_are_all_different_and_the_same_in_every_process():
    every = cells(grid())
    assert len({c.key for c in every}) == len(every)
    assert Cell("ar", 100, FULL, "full", "absolute", 0).key == every[0].key
    cell = every[-1]
    changed = {
        "method": "sd_sparse", "context": 7, "budget": 8, "policy": "random", "position_mode": "in_cache", "gamma": 9,
        "workload": "replay", "gamma_mode": "adaptive", "refresh": 1, "drafter": "base", "temperature": 0.5,
    }  # fmt: skip
    assert all(replace(cell, **{name: value}).key != cell.key for name, value in changed.items())


def test_each_method_names_its_drafter_and_budgetdraft_takes_the_named_ones_too():
    every = cells(grid(methods=list(METHODS), drafters={"other": "a-folder"}, contexts=[100], gammas=[2]))
    drafters = {name: list(dict.fromkeys(c.drafter for c in every if c.method == name)) for name in METHODS}
    assert drafters == {
        "ar": [None], "ngram": [None], "sd_full": ["base"], "hf_assisted": ["base"], "sd_sparse": ["base"],
        "streaming": ["base"], "self_sparse": ["self"], "triforce": ["base"], "budgetdraft": ["trained", "other"],
    }  # fmt: skip
    own, other = ([c for c in every if c.drafter == name] for name in ("trained", "other"))
    assert other == [replace(c, drafter="other") for c in own]
    assert len({c.key for c in every}) == len(every)


def test_what_is_chosen_every_round_is_never_rebuilt():
    every = cells(grid(policy=["attention_mass", "retrieval"], contexts=[100], gammas=[2], refresh=3))
    found = {(c.policy, c.refresh) for c in every if c.how.sparse and c.budget != FULL}
    assert found == {("attention_mass", 3), ("retrieval", 0)}


def test_streaming_has_one_policy_and_position_mode_whatever_the_grid_has():
    every = cells(grid(methods=["ar", "streaming"], policy=["random", "oracle"], contexts=[100], gammas=[2]))
    assert [(c.budget, c.policy, c.position_mode) for c in every if c.method == "streaming"] == [
        (32, "sink_recent", "in_cache"), (64, "sink_recent", "in_cache"),
    ]  # fmt: skip


def test_two_levels_take_the_grids_sparse_caches_and_the_librarys_loop_the_full_one():
    settings = {"policy": ["random", "oracle"], "position_mode": "in_cache", "contexts": [100], "gammas": [2]}
    every = cells(grid(methods=["ar", "triforce", "hf_assisted"], refresh=3, **settings))
    assert [(c.method, c.budget, c.policy, c.position_mode, c.refresh) for c in every[1:]] == [
        ("hf_assisted", FULL, "full", "absolute", 0),
        *(("triforce", budget, policy, "in_cache", 3) for policy in ("random", "oracle") for budget in (32, 64)),
    ]


@pytest.mark.parametrize(
    ("mode", "modes"),
    [
        ("fixed", {"hf_assisted": "fixed", "triforce": "fixed"}),
        ("confidence", {"hf_assisted": "fixed", "triforce": "fixed"}),
        ("adaptive", {"hf_assisted": "fixed", "triforce": "adaptive"}),
    ],
)
def test_a_method_that_cannot_follow_the_grids_draft_length_drafts_a_fixed_number(mode, modes):
    every = cells(grid(methods=["ar", *modes], gamma_mode=mode))
    assert {c.method: c.gamma_mode for c in every if c.gamma} == modes


def test_each_method_is_measured_on_its_own_workloads_alone():
    names = ["ar", "hf_assisted", "triforce", "self_sparse"]
    every = cells(grid(methods=names, workloads=["greedy", "sampled"]))
    assert {w: {c.method for c in every if c.workload == w} for w in ("greedy", "sampled")} == {
        "greedy": set(names), "sampled": {"ar", "triforce", "self_sparse"},
    }  # fmt: skip
    assert {c.method for c in cells(grid(methods=names, workloads="replay"))} == {"self_sparse"}


def test_sampled_cells_stand_at_every_temperature_each_with_its_own_ar():
    every = cells(grid(workloads=["replay", "sampled", "greedy"], temperatures=[0.5, 1.0], contexts=[100]))
    order = list(dict.fromkeys((c.workload, c.temperature) for c in every))
    assert order == [("greedy", 0.0), ("sampled", 0.5), ("sampled", 1.0), ("replay", 0.0)]
    for workload, temperature in order[:3]:
        here = [c for c in every if (c.workload, c.temperature) == (workload, temperature)]
        assert here == [replace(c, workload=workload, temperature=temperature) for c in every[: len(here)]]
        assert [c.method for c in here].index("ar") == 0


def test_cells_that_meet_every_entry_of_an_exclusion_are_left_out_but_never_ar():
    whole = cells(grid())
    rules = [{"method": "sd_full", "context": [200]}, {"budget": ["full", 64], "gamma": 4}, {"gamma": 0}]
    every = cells(grid(exclude=rules))
    assert every == [
        c
        for c in whole
        if c.method == "ar"
        or not ((c.method == "sd_full" and c.context == 200) or (c.budget in (FULL, 64) and c.gamma == 4))
    ]
    assert 2 + 3 * 2 < len(every) < len(whole)
    assert unused_exclusions(grid(exclude=rules)) == [{"gamma": [0]}]
    assert unused_exclusions(grid(exclude=[{"budget": 7}, rules[0]])) == [{"budget": [7]}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["sd_full"]}, "`ar` must be among them"),
        ({"budgets": ["full"]}, "`sd_sparse` needs at least one sparse budget"),
        ({"budgets": [100], "chunk": 16, "sinks": 4}, "nearest legal: 96 or 112"),
        ({"gammas": []}, "give at least one value"),
        ({"contexts": [100, 100]}, "each once"),
        ({"budgets": ["full"], "methods": ["ar", "self_sparse"]}, "`self_sparse` needs at least one sparse budget"),
        ({"budgets": ["full"], "methods": ["ar", "triforce"]}, "`triforce` needs at least one sparse budget"),
        ({"exclude": [{"methods": ["ar"]}]}, "exclude"),
        ({"drafters": {"base": "x"}}, "`base` is the study's own"),
        ({"drafters": {"x": "y"}, "methods": ["ar", "sd_full"]}, "measured by `budgetdraft`"),
        ({"temperatures": [0.0]}, "temperatures"),
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
