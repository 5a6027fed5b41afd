"""From measured speedups to a setting: which scene decides, what fits, where to switch off, and in whose words."""

from dataclasses import replace

import pytest

from bdcore.collapse.intervals import Estimate
from bdcore.collapse.options import Option, Scene, Setting
from bdcore.collapse.recommend import recommend, size

MIB = 2**20
SPARSE = Setting("budgetdraft", "trained", 256, "attention_mass", "in_cache", 4, "fixed")
FULL = Setting("budgetdraft", "trained", -1, "full", "absolute", 2, "fixed")
CODE, BOOKS = Scene("stdlib", "greedy"), Scene("pg19", "greedy")


def option(setting, context, low, high, *, mib=4, n=8, scene=CODE, run="r0"):
    estimate = Estimate((low + high) / 2, low, high, n, "BCa")
    keys = context if setting.budget < 0 else setting.budget
    return Option(setting, scene, context, mib * MIB, keys, estimate, Estimate(0.6, 0.5, 0.7, n), run)


GRID = [
    option(SPARSE, 1024, 1.3, 1.5),
    option(SPARSE, 4096, 1.1, 1.4),
    option(SPARSE, 8192, 0.8, 1.2),
    option(FULL, 1024, 1.6, 1.8, mib=20),
    option(FULL, 4096, 0.7, 1.9, mib=80),
    option(FULL, 8192, 0.5, 0.6, mib=160),
]


def says(found, text):
    return any(text in sentence for sentence in found.sentences)


def test_the_best_lower_end_that_fits_is_taken():
    assert recommend(GRID, context=1024, memory=100 * MIB).option == GRID[3]
    small = recommend(GRID, context=1024, memory=10 * MIB)
    assert (small.option, small.status) == (GRID[0], "on")
    assert recommend(GRID, context=1024, memory=30 * MIB, batch=2).option == GRID[0]  # two full caches do not fit
    # At 4096 the full cache has the higher middle, but reaches far below 1.
    assert recommend(GRID, context=4096, memory=100 * MIB).option == GRID[1]


# --- scenes


def test_the_worst_corpus_decides_and_is_named():
    """One corpus loops, 2.4x, another is at 0.5x."""
    loops, books = (
        option(SPARSE, 1024, 2.3, 2.5),
        option(SPARSE, 1024, 0.45, 0.55, scene=BOOKS),
    )
    for order in ([loops, books], [books, loops]):
        found = recommend(order, context=1024, memory=MIB * 100)
        assert (found.status, found.option, found.others, found.off_above) == ("off", books, [loops], None)
        assert "0.50x decoding [0.45, 0.55], n = 8 on pg19, greedy" in found.sentences[0]
        assert says(found, "The worst of 2 measurements decides: pg19, greedy. stdlib, greedy: 2.40x")
    assert recommend([loops], context=1024, memory=MIB * 100).status == "on"


def test_a_setting_that_holds_everywhere_beats_one_that_shines_somewhere():
    steady = [option(SPARSE, 1024, low, 1.5, scene=s) for low, s in ((1.2, CODE), (1.1, BOOKS))]
    shining = [option(FULL, 1024, low, 3.0, scene=s) for low, s in ((2.0, CODE), (0.8, BOOKS))]
    found = recommend([*steady, *shining], context=1024, memory=MIB * 100)
    assert found.option == steady[1] and found.status == "on"


def test_a_setting_timed_on_one_corpus_alone_does_not_win_by_that():
    both = [option(SPARSE, 1024, 1.1, 1.3, scene=s) for s in (CODE, BOOKS)]
    one = option(FULL, 1024, 2.0, 2.2)
    assert recommend([one, *both], context=1024, memory=MIB * 100).option in both
    only = recommend([one, *both], context=1024, memory=MIB * 100)
    assert not says(only, "Not judged")
    too_few = recommend([one, option(FULL, 1024, 0.2, 0.3, scene=BOOKS, n=3)], context=1024, memory=MIB * 100)
    assert too_few.option == one and says(too_few, "Not judged on pg19, greedy: it was not timed there at 1024 tokens")


def test_two_runs_of_one_scene_are_judged_by_the_worse_and_named():
    runs = [option(SPARSE, 1024, low, low + 0.2, run=run) for low, run in ((2.0, "r0"), (0.5, "r1"))]
    found = recommend(runs, context=1024, memory=MIB * 100)
    assert found.option == runs[1] and found.status == "off"
    assert says(found, "decides: stdlib, greedy in run r1. stdlib, greedy in run r0: 2.10x")


def test_drafters_of_one_name_are_two_settings():
    keys = {key: replace(SPARSE, drafter_key=key) for key in ("d0", "d1")}
    found = recommend(
        [option(keys["d0"], 1024, 0.5, 0.6), option(keys["d1"], 1024, 1.3, 1.4)], context=1024, memory=MIB * 100
    )
    assert found.status == "on" and "drafter trained (d1)" in found.sentences[0]


def test_speculation_is_switched_off_where_the_worst_scene_ends():
    rows = [
        option(SPARSE, context, low, 3.0, scene=scene)
        for scene, lows in ((CODE, (2.0, 2.0, 2.0)), (BOOKS, (1.2, 1.1, 0.9)))
        for context, low in zip((1024, 2048, 4096), lows, strict=True)
    ]
    found = recommend(rows, context=1024, memory=MIB * 100)
    assert found.off_above == 2048 and says(found, "Switch speculation off above 2048 tokens: at 4096")
    # Beyond 2048 the books were not timed: what code alone shows says nothing of them.
    found = recommend(rows[:-1], context=1024, memory=MIB * 100)
    assert found.off_above == 2048 and not says(found, "Switch")


# --- contexts


def test_a_context_between_two_rests_on_the_longer_and_says_so():
    found = recommend(GRID, context=2000, memory=MIB * 100)
    assert found.context == 4096 and says(found, "2000 tokens were not measured; this is the next longer one")
    beyond = recommend(GRID, context=16384, memory=MIB * 100)
    assert beyond.context == 8192 and says(beyond, "what lies beyond was not measured")


def test_speculation_is_switched_off_above_the_last_context_that_pays():
    found = recommend(GRID, context=4096, memory=100 * MIB)
    assert found.off_above == 4096
    assert says(found, "Switch speculation off above 4096 tokens: at 8192")
    always = recommend(GRID[:2], context=1024, memory=100 * MIB)
    assert always.off_above == 4096 and not says(always, "Switch")


# --- memory


def test_a_full_cache_is_judged_at_the_context_asked_for():
    """80 MiB at 4096 tokens are 320 at 16384; a sparse cache stays as it is."""
    full, sparse = option(FULL, 4096, 1.5, 1.7, mib=80), option(SPARSE, 4096, 1.1, 1.2)
    found = recommend([full, sparse], context=16384, memory=100 * MIB)
    assert found.option == sparse and found.kv_bytes == 4 * MIB and says(found, "4.0 MiB for 1 sequence, as measured")
    found = recommend([full, sparse], context=16384, memory=320 * MIB)
    assert found.option == full and found.kv_bytes == 320 * MIB
    assert says(found, "takes 320.0 MiB for 1 sequence: estimated from 80.0 MiB measured for one sequence at 4096")
    assert says(found, "one of 16384 tokens")
    assert recommend([full], context=2048, memory=40 * MIB).kv_bytes == 40 * MIB


def test_tokens_written_after_the_prompt_do_not_grow_with_it():
    """1024 tokens and 256 new ones: at 2048 the cache has 2304 keys, not 2560."""
    measured = replace(option(FULL, 1024, 1.5, 1.7, mib=10), cached=1280)
    assert measured.bytes_at(2048) == 18 * MIB
    assert replace(measured, cached=0).bytes_at(2048) == 20 * MIB  # rows of before the column


def test_a_cache_whose_budget_bounds_what_is_read_alone_grows_like_a_full_one():
    """1024 keys and the copies of 256: 10 MiB; at 2048 tokens there are 1024 keys more."""
    retrieving = Setting("budgetdraft", "trained", 256, "retrieval", "absolute", 4, "fixed")
    measured = replace(option(retrieving, 1024, 1.5, 1.7, mib=10), cached=1024)
    assert measured.bytes_at(2048) == 18 * MIB
    within = replace(measured, cached=261)  # a block of five in flight
    assert within.bytes_at(2048) == 10 * MIB


def test_a_batch_multiplies_every_cache_and_the_text_says_that_it_is_an_estimate():
    found = recommend(GRID[:1], context=1024, memory=100 * MIB, batch=4)
    assert found.kv_bytes == 16 * MIB and says(found, "takes 16.0 MiB for 4 sequences: estimated from 4.0 MiB")
    both = recommend(GRID[3:4], context=2048, memory=100 * MIB, batch=2)
    assert both.kv_bytes == 80 * MIB
    assert says(both, "since it has a key for every one of 2048 tokens and 2 sequences have 2 caches")


def test_a_lookup_takes_no_memory():
    ngram = replace(FULL, method="ngram", drafter=None)
    found = recommend([option(ngram, 1024, 1.2, 1.3, mib=0)], context=4096, memory=0)
    assert found.status == "on" and says(found, "It keeps no cache of its own.")


# --- verdicts


@pytest.mark.parametrize(
    ("low", "high", "status", "words"),
    [
        (1.01, 1.2, "on", "Speculate"),
        (0.9, 1.2, "unsure", "more prompts decide"),
        (0.5, 0.9, "off", "is below 1"),
    ],
)
def test_the_status_is_where_the_interval_lies(low, high, status, words):
    found = recommend([option(SPARSE, 1024, low, high)], context=1024, memory=MIB * 100)
    assert found.status == status and words in found.sentences[0]


def test_nothing_is_recommended_from_too_few_prompts_or_too_little_memory():
    few = recommend([option(SPARSE, 1024, 1.3, 1.5, n=3)], context=1024, memory=100 * MIB)
    assert few.status == "unknown" and few.option is None and "4 prompts or more" in few.sentences[0]
    no_room = recommend(GRID, context=1024, memory=MIB, batch=2)
    assert "fits into 1.0 MiB at 1024 tokens; the smallest takes 8.0 MiB for 2 sequences" in no_room.sentences[0]
    undefined = replace(GRID[0], speedup=Estimate(1.4, None, None, 8))
    assert recommend([undefined], context=1024, memory=100 * MIB).status == "unknown"


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 B"), (4 * MIB, "4.0 MiB"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes(value, text):
    assert size(value) == text
