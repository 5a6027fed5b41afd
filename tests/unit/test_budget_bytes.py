"""A budget stated as memory: the largest legal number of keys whose whole cache fits."""

import pytest
import torch

from bdcore.config import ConfigError, load_config
from bdcore.kv.budget import Selection, keys_within
from bdcore.models.stepper import CachePlan, Stepper
from bdcore.preflight import with_budgets
from bdcore.runtime import resolve
from tests.conftest import tiny_llama
from tests.tiny import write_study

RULE = {"chunk": 8, "sinks": 8, "recent": 8}
KEY_BYTES = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head dim, fp32


@pytest.mark.parametrize("size", [KEY_BYTES * 37, KEY_BYTES * 64, KEY_BYTES * 69, KEY_BYTES * 300 + 17])
def test_the_cache_takes_at_most_the_memory_and_one_chunk_more_would_not_fit(size, prompt):
    budget = keys_within(size, key_bytes=KEY_BYTES, block=5, **RULE)
    plan = CachePlan(0, budget, Selection("attention_mass"), "in_cache", block=5)
    stepper = Stepper(tiny_llama(), plan)
    stepper.prefill(prompt(400))
    stepper.feed(prompt(5))
    assert stepper.cache.bytes() <= size < stepper.cache.bytes() + 8 * KEY_BYTES
    assert stepper.cache.peak_physical <= budget + 5


def test_too_little_memory_names_what_the_smallest_budget_takes():
    least = (32 + 5) * KEY_BYTES
    assert keys_within(least, key_bytes=KEY_BYTES, block=5, **RULE) == 32
    with pytest.raises(
        ValueError, match=rf"budget_bytes = {least - 1}: .* 32 keys and the block of 5 take {least} bytes"
    ):
        keys_within(least - 1, key_bytes=KEY_BYTES, block=5, **RULE)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def test_a_study_may_state_its_budgets_as_memory(study):
    config = load_config(study, ["grid.budget_bytes=[256KiB]", "grid.budgets=[32, full]"])
    found = with_budgets(config, resolve(config.runtime)).grid
    assert found.budgets[:2] == [32, -1] and len(found.budgets) == 3
    assert found.budgets[2] % found.chunk == 0 and found.budgets[2] > 32
    assert found.budget_bytes == []


def test_a_study_whose_memory_holds_no_legal_budget_is_refused_in_one_line(study):
    config = load_config(study, ["grid.budget_bytes=[1KiB]"])
    with pytest.raises(ConfigError, match=r"^grid\.budget_bytes = 1024: holds"):
        with_budgets(config, resolve(config.runtime))


def test_half_precision_holds_twice_the_keys():
    sizes = [
        keys_within(2**20, key_bytes=KEY_BYTES // 4 * d.itemsize, block=0, **RULE)
        for d in (torch.float32, torch.float16)
    ]
    assert sizes[1] == 2 * sizes[0]


def test_memory_bounds_no_policy_that_stores_every_key(study):
    config = load_config(study, ["grid.budget_bytes=[256KiB]", "grid.policy=retrieval"])
    with pytest.raises(ConfigError, match=r"^grid\.budget_bytes: policy = retrieval stores every key"):
        with_budgets(config, resolve(config.runtime))
