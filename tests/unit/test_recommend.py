"""From measured speedups to a setting: what fits, where to switch off, and in whose words."""

import json
from dataclasses import replace

import pytest

from bdcore.collapse.intervals import Estimate
from bdcore.collapse.recommend import Option, Setting, recommend, size
from reports.deployment import as_json, as_text, engines

MIB = 2**20
SPARSE = Setting("budgetdraft", "trained", 256, "attention_mass", "in_cache", 4, "fixed")
FULL = Setting("budgetdraft", "trained", -1, "full", "absolute", 2, "fixed")


def option(setting, context, low, high, *, mib=4, n=8):
    estimate = Estimate((low + high) / 2, low, high, n, "BCa")
    return Option(setting, context, mib * MIB, estimate, Estimate(0.6, 0.5, 0.7, n))


GRID = [
    option(SPARSE, 1024, 1.3, 1.5),
    option(SPARSE, 4096, 1.1, 1.4),
    option(SPARSE, 8192, 0.8, 1.2),
    option(FULL, 1024, 1.6, 1.8, mib=20),
    option(FULL, 4096, 0.7, 1.9, mib=80),
    option(FULL, 8192, 0.5, 0.6, mib=160),
]


def test_the_best_lower_end_that_fits_is_taken():
    assert recommend(GRID, context=1024, memory=100 * MIB).option == GRID[3]
    small = recommend(GRID, context=1024, memory=10 * MIB)
    assert (small.option, small.status) == (GRID[0], "on")
    assert recommend(GRID, context=1024, memory=30 * MIB, batch=2).option == GRID[0]  # two full caches do not fit
    # At 4096 the full cache has the higher middle, but reaches far below 1.
    assert recommend(GRID, context=4096, memory=100 * MIB).option == GRID[1]


def test_a_context_between_two_rests_on_the_longer_and_says_so():
    found = recommend(GRID, context=2000, memory=MIB * 100)
    assert found.context == 4096 and "2000 tokens were not measured; this is the next longer one" in found.sentences[2]
    beyond = recommend(GRID, context=16384, memory=MIB * 100)
    assert beyond.context == 8192 and any("what lies beyond was not measured" in s for s in beyond.sentences)


def test_speculation_is_switched_off_above_the_last_context_that_pays():
    found = recommend(GRID, context=4096, memory=100 * MIB)
    assert found.off_above == 4096
    assert any("Switch speculation off above 4096 tokens" in s for s in found.sentences)
    always = recommend(GRID[:2], context=1024, memory=100 * MIB)
    assert always.off_above == 4096 and not any("Switch" in s for s in always.sentences)


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
    assert bool(engines(found)) == (status == "on")


def test_nothing_is_recommended_from_too_few_prompts_or_too_little_memory():
    few = recommend([option(SPARSE, 1024, 1.3, 1.5, n=3)], context=1024, memory=100 * MIB)
    assert few.status == "unknown" and few.option is None and "4 prompts or more" in few.sentences[0]
    no_room = recommend(GRID, context=1024, memory=MIB, batch=2)
    assert "no drafter cache fits into 1.0 MiB; the smallest takes 8.0 MiB for 2" in no_room.sentences[0]
    undefined = replace(GRID[0], speedup=Estimate(1.4, None, None, 8))
    assert recommend([undefined], context=1024, memory=100 * MIB).status == "unknown"


def test_engines_get_the_flags_they_honour_and_hear_what_they_cannot_do():
    found = recommend(GRID, context=4096, memory=10 * MIB)
    told = engines(found)
    config = json.loads(told["vllm"]["flags"].split("--speculative-config ")[1].strip("'"))
    assert config == {"method": "draft_model", "model": "DRAFTER", "num_speculative_tokens": 4}
    assert "--speculative-num-steps 4" in told["sglang"]["flags"]
    assert "--speculative-num-draft-tokens 5" in told["sglang"]["flags"]
    for engine in told.values():
        assert any("budget of 256 keys" in note for note in engine["notes"])
        assert any("in_cache positions" in note for note in engine["notes"])
    full = recommend(GRID[3:4], context=1024, memory=100 * MIB)
    assert all(not engine["notes"] for engine in engines(full).values())
    assert json.loads(as_json(found))["option"]["setting"]["budget"] == 256
    assert "sglang:" in as_text(found) and found.sentences[0] in as_text(found)


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 B"), (4 * MIB, "4.0 MiB"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes(value, text):
    assert size(value) == text
