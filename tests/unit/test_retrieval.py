"""Policies that store every key and read a budget of them: what is read, what comes back, and what it takes."""

import pytest
import torch

from bdcore.kv.budget import STORES_ALL, Selection
from bdcore.kv.selection import Evidence, select
from bdcore.models.stepper import CachePlan, PositionError, Stepper, feed_together
from tests.conftest import tiny_llama
from tests.unit.reference import causal, masked_logits

MODEL = tiny_llama()
BLOCK = 5


def plan(policy="retrieval", budget=32, mode="absolute", **changes):
    return CachePlan(0, budget, Selection(policy), mode, BLOCK, **changes)


def stepper(prompt, policy="retrieval", budget=32, room=200):
    made = Stepper(MODEL, plan(policy, budget, prefill_chunk=32).sized(room))
    made.prefill(prompt)
    made.fit()
    return made


def reads(made):
    """Tokens that each layer and KV head reads."""
    return [layer.read.tokens for layer in made.cache.layers]


@pytest.mark.parametrize("policy", sorted(STORES_ALL))
def test_logits_equal_full_keys_under_a_mask_that_hides_what_is_not_read(policy, prompt):
    """The prompt was read with everything; each block sees what was chosen before it."""
    ids = prompt(90)
    made = stepper(ids, policy)
    visible, logits = causal(MODEL, 90 + 3 * BLOCK), []
    for _ in range(3):
        start, block = made.logical, prompt(BLOCK)
        for layer, heads in enumerate(reads(made)):
            assert heads.shape[1] <= 32
            for head, index in enumerate(heads):
                visible[layer][head, start : start + BLOCK, :start] = False
                visible[layer][head, start : start + BLOCK, index] = True
        logits.append(made.feed(block)[0])
        ids = ids + block
        made.fit()
    expected = masked_logits(MODEL, ids, visible)[90:]
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)
    assert not torch.allclose(expected, masked_logits(MODEL, ids, causal(MODEL, len(ids)))[90:], atol=1e-4), (
        "everything was read: the test would show nothing"
    )


def test_what_was_not_chosen_comes_back_when_the_newest_queries_ask_for_it(prompt):
    """A cache that drops keys can only lose them."""
    made = stepper(prompt(150), room=400)
    gained = [set[int]() for _ in made.cache.layers]
    for _ in range(12):
        before = [set(heads[0].tolist()) for heads in reads(made)]
        start = made.logical
        made.feed(prompt(BLOCK))
        made.fit()
        for known, old, heads in zip(gained, before, reads(made), strict=True):
            known |= {token for token in heads[0].tolist() if token < start} - old
    assert all(gained)


def test_a_budget_of_everything_is_the_full_cache_bit_for_bit(prompt):
    ids, block = prompt(60), prompt(BLOCK)
    made = stepper(ids, budget=96)
    full = Stepper(MODEL, CachePlan(capacity=200, block=BLOCK, prefill_chunk=32))
    full.prefill(ids)
    assert torch.equal(made.feed(block), full.feed(block))


def test_rejected_drafts_are_forgotten_where_they_are_stored_and_where_they_are_read(prompt):
    ids, block = prompt(90), prompt(BLOCK)
    plain, rejecting = stepper(ids), stepper(ids)
    rejecting.feed(prompt(BLOCK))
    rejecting.rollback(BLOCK)
    assert torch.equal(plain.feed(block), rejecting.feed(block))
    plain.fit()
    rejecting.fit()
    assert all(torch.equal(a, b) for a, b in zip(reads(plain), reads(rejecting), strict=True))


def test_a_long_text_is_read_with_everything_and_then_chosen_from_anew(prompt):
    """After rounds without drafting a drafter reads on: not through the choice of long ago."""
    ids, more = prompt(90), prompt(40)
    through, at_once = stepper(ids), Stepper(MODEL, plan(prefill_chunk=32).sized(200))
    through.prefill(more)
    through.fit()
    at_once.prefill(ids + more)
    at_once.fit()
    for a, b in zip(reads(through), reads(at_once), strict=True):
        assert torch.equal(a, b)


def test_several_sequences_in_one_forward_each_read_their_own_choice(prompt):
    texts = [prompt(90), prompt(70)]
    blocks = [prompt(3), prompt(5)]
    apart = [stepper(text).feed(block)[0] for text, block in zip(texts, blocks, strict=True)]
    together = feed_together([stepper(text) for text in texts], blocks)
    for mine, other in zip(apart, together, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)


def test_the_memory_told_is_that_of_all_keys_and_of_the_copies_that_are_read(prompt):
    made, full = stepper(prompt(90)), Stepper(MODEL, plan(budget=-1).sized(200))
    full.prefill(prompt(90))
    key = full.cache.bytes() // (200 + BLOCK)
    assert made.cache.bytes() == (200 + BLOCK + 32 + BLOCK) * key
    assert made.cache.bytes(90) == (90 + 32 + BLOCK) * key, "a buffer longer than what it holds counts what it holds"
    assert made.cache.peak_physical == 90


def test_keys_that_come_back_have_no_place_in_an_order_of_the_cache():
    with pytest.raises(PositionError, match=r"policy = retrieval: .*use absolute"):
        plan(mode="in_cache")


def test_ahead_a_chunk_counts_as_much_as_the_one_before_it():
    """Chunk 3 has all the attention: what follows it stays as well, where without it the newest would have."""
    torch.manual_seed(0)
    keys = 0.01 * torch.randn(1, 1, 80, 4)
    keys[0, 0, 24:32] += torch.tensor([30.0, 0, 0, 0])
    queries = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 8, 4)

    def kept(policy):
        found = select(Evidence(queries, keys, 1.0), budget=32, selection=Selection(policy))
        return {int(token) // 8 for token in found.flatten()}

    assert kept("attention_ahead") == kept("retrieval_ahead") == {0, 3, 4, 9}
    assert {0, 3, 9} < kept("attention_mass") == kept("retrieval")
