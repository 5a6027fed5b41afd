"""Several prompts decoded together: each row is what it is alone."""

import copy
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bdcore.decoding import decoder
from bdcore.decoding.decoder import decode, decode_batch, prefill
from bdcore.kv.budget import FULL, check_budget
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan, Stepper, feed_together
from tests.conftest import noisy_copy
from tests.unit.test_decoder import NEVER, alone, cache_plan, fixed_prompt

LENGTHS = (1, 5, 9, 40, 130)
NEW = 16


@cache
def start_of(verifier, length):
    return prefill(verifier, fixed_prompt(length), new_tokens=NEW, gamma=6, chunk=64)


def facts(decoded):
    counts = [(r.drafted, r.accepted, r.emitted) for r in decoded.rounds]
    return decoded.tokens, decoded.finish_reason, counts, decoded.accepted_at, decoded.drafted_at


def together_and_alone(verifier, drafter, plan, *, gamma, eos=NEVER, new_tokens=NEW, lengths=LENGTHS):
    starts = [start_of(verifier, n) for n in lengths]
    how = {"gamma": gamma, "new_tokens": new_tokens, "eos": eos}
    batch = decode_batch(starts, drafter, plan, **how)
    return batch, [decode(start, drafter, plan, **how) for start in starts]


CACHES = [(FULL, "absolute"), (32, "absolute"), (32, "in_cache")]


@pytest.mark.parametrize(
    ("gamma", "budget", "mode"),
    [(g, FULL, "absolute") for g in range(1, 7)]
    + [(g, 32, mode) for g, mode in zip(range(1, 7), ["in_cache", "absolute"] * 3, strict=True)],
)
def test_b19_rows_of_a_batch_equal_their_batch_1_results(verifier, noisy, gamma, budget, mode):
    """B19: prompts of 5 and 9 tokens, and of 1, 40 and 130, fp32."""
    batch, single = together_and_alone(verifier, noisy, cache_plan(budget, mode=mode), gamma=gamma)
    for length, mine, theirs in zip(LENGTHS, batch, single, strict=True):
        assert facts(mine) == facts(theirs), f"prompt {length}"
        assert mine.drafter_cached_peak == theirs.drafter_cached_peak
        assert mine.drafter_kv_bytes == theirs.drafter_kv_bytes
    assert len({tuple(counts) for _, _, counts, _, _ in map(facts, batch)}) > 1, "rows accept their own numbers"


def test_rows_without_a_drafter_are_the_verifiers_own_texts(verifier):
    batch, single = together_and_alone(verifier, None, None, gamma=0)
    for length, mine, theirs in zip(LENGTHS, batch, single, strict=True):
        assert facts(mine) == facts(theirs)
        assert mine.tokens == alone(verifier, fixed_prompt(length), NEW)
        assert mine.gaps == pytest.approx(theirs.gaps, abs=1e-4)


@pytest.mark.parametrize("gamma", [1, 4, 6])
def test_a_twin_is_right_in_every_row(verifier, twin, gamma):
    batch, _ = together_and_alone(verifier, twin, cache_plan(), gamma=gamma)
    for row in batch:
        assert all(r.accepted == r.drafted for r in row.rounds)
        assert len(row.rounds) == -(-(NEW - 1) // (gamma + 1))


@pytest.mark.parametrize("budget", [FULL, 32])
def test_rows_end_at_their_own_time_and_the_others_go_on(verifier, noisy, budget):
    own = [alone(verifier, fixed_prompt(n), NEW) for n in LENGTHS]
    late = {token for text in own[3:] for token in text}
    eos = {next(token for token in text if token not in late) for text in own[:3]}
    batch, single = together_and_alone(verifier, noisy, cache_plan(budget), gamma=4, eos=eos)
    for mine, theirs, text in zip(batch, single, own, strict=True):
        assert facts(mine) == facts(theirs)
        end = next((i for i, token in enumerate(text) if token in eos), NEW - 1)
        assert mine.tokens == text[: end + 1]
    assert len({len(row.tokens) for row in batch}) >= 3
    assert {row.finish_reason for row in batch} == {"eos", "length"}


def test_the_order_of_the_rows_does_not_matter(verifier, noisy):
    plan = cache_plan(32)
    there, _ = together_and_alone(verifier, noisy, plan, gamma=3)
    back, _ = together_and_alone(verifier, noisy, plan, gamma=3, lengths=LENGTHS[::-1])
    assert [facts(row) for row in there] == [facts(row) for row in back[::-1]]


def test_each_row_is_told_its_own_tokens_as_they_are_committed(verifier, noisy):
    told = [[] for _ in LENGTHS]
    starts = [start_of(verifier, n) for n in LENGTHS]
    batch = decode_batch(
        starts, noisy, cache_plan(), gamma=4, new_tokens=NEW, eos=NEVER, on_tokens=[t.append for t in told]
    )
    for row, pieces in zip(batch, told, strict=True):
        assert [len(piece) for piece in pieces] == [1, *(r.emitted for r in row.rounds)]
        assert [token for piece in pieces for token in piece] == row.tokens


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 5, 8, 9, 17, 40, 64, 130]), min_size=1, max_size=5, unique=True),
    budget=st.sampled_from([FULL, 32, 40, 96]),
    gamma=st.integers(1, 6),
    mode=st.sampled_from(["absolute", "in_cache"]),
    new_tokens=st.integers(1, 16),
)
def test_any_batch_equals_its_rows(verifier, noisy, lengths, budget, gamma, mode, new_tokens):
    plan = cache_plan(budget, mode=mode)
    batch, single = together_and_alone(verifier, noisy, plan, gamma=gamma, new_tokens=new_tokens, lengths=lengths)
    assert [facts(row) for row in batch] == [facts(row) for row in single]


# --- logits


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize(("budget", "mode"), CACHES)
def test_packed_logits_equal_batch_1_logits(verifier, budget, mode, last_only):
    blocks = [[3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13], [14]]

    def steppers():
        made = [Stepper(verifier, CachePlan(200, budget, position_mode=mode, block=5)) for _ in LENGTHS]
        for stepper, n in zip(made, LENGTHS, strict=True):
            stepper.prefill(fixed_prompt(n))
            stepper.fit()
        return made

    packed, single = steppers(), steppers()
    for _ in range(2):  # the second time over what the first has written
        mine = feed_together(packed, blocks, last_only=last_only)
        theirs = [s.feed(block, last_only=last_only)[0] for s, block in zip(single, blocks, strict=True)]
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        for a, b in zip(packed, single, strict=True):
            assert (a.logical, a.physical) == (b.logical, b.physical)
            a.rollback(1)
            b.rollback(1)
            a.fit()
            b.fit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("budget", "mode"), CACHES)
def test_b19_no_logit_of_a_batch_is_nan(verifier, budget, mode, dtype, monkeypatch):
    """B19: fp32 and bf16; in bf16 tokens may differ, numbers may not vanish."""
    model = copy.deepcopy(verifier).to(dtype)
    drafter = Drafter(noisy_copy(verifier).to(dtype), None)
    fed, feed = [], decoder.feed_together

    def watched(steppers, blocks, **how):
        out = feed(steppers, blocks, **how)
        fed.extend(out)
        return out

    monkeypatch.setattr(decoder, "feed_together", watched)
    starts = [prefill(model, fixed_prompt(n), new_tokens=NEW, gamma=4, chunk=64) for n in LENGTHS]
    batch = decode_batch(starts, drafter, cache_plan(budget, mode=mode), gamma=4, new_tokens=NEW, eos=NEVER)
    assert len(fed) > 100
    assert all(logits.isfinite().all() for logits in fed)
    assert all(logits.dtype == dtype for logits in fed)
    assert {len(row.tokens) for row in batch} == {NEW}
    assert len({tuple(row.tokens) for row in batch}) == len(LENGTHS)


def test_b19_a_budget_below_one_chunk_is_refused():
    """B19: no budget can leave a row with nothing to attend to."""
    with pytest.raises(ValueError, match="budget = 4 cannot hold"):
        check_budget(4, chunk=8, sinks=0, recent=0)
