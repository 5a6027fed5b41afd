"""The sparse cache through a whole generation: what each policy keeps, refreshes, the bound, what rollback restores."""

import copy
import time
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bdcore.decoding import sequence
from bdcore.decoding.decoder import decode, decode_batch, prefill
from bdcore.kv.budget import FULL, FULL_POLICY, STORES_ALL, Selection, forced_chunks
from bdcore.kv.selection import POLICIES, Evidence, select
from bdcore.kv.storage import LayerStorage
from bdcore.models.stepper import CachePlan, Stepper
from tests.conftest import tiny_llama
from tests.unit.reference import Survivors, rotate
from tests.unit.test_decoder import NEVER, Scripted, acceptance, fixed_prompt, keep_ledger, right_then_wrong, script

EVERY_POLICY = [*sorted(POLICIES), FULL_POLICY]
DROPPING = sorted(set(POLICIES) - STORES_ALL)
MODES = ["absolute", "in_cache"]
LENGTHS = st.sampled_from([1, 2, 7, 31, 32, 33, 40, 63, 64, 65, 90, 110])
HYPOTHESIS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def cache_plan(budget=32, policy="attention_mass", mode="absolute", **changes):
    return CachePlan(0, budget, Selection(policy), mode, prefill_chunk=64, **changes)


def start_of(verifier, prompt, *, new_tokens=24, gamma=4, observe=8):
    return prefill(verifier, prompt, new_tokens=new_tokens, gamma=gamma, chunk=64, observe=observe)


def generate(start, drafter, plan, *, gamma=4, new_tokens=24):
    return decode(start, drafter, plan, gamma=gamma, new_tokens=new_tokens, eos=NEVER)


@pytest.fixture
def proposers(monkeypatch):
    """The proposers of every generation, [0] the first."""
    made, begin = [], sequence.Proposer.__init__

    def remember(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(sequence.Proposer, "__init__", remember)
    return made


# --- oracle


def eager_weights(model, ids):
    """Each layer's attention weights from the library's eager attention: (Q, T, T)."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        return [layer[0] for layer in eager(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions]


def attention_of_the_window(model, ids, window=8):
    return torch.stack([layer[:, -window:].mean((0, 1)) for layer in eager_weights(model, ids)]).mean(0)


def top_chunks(scores, length, *, budget, piece, chunk=8, sinks=8, recent=8):
    """The tokens kept of a prompt read in pieces, by the definition: whenever a piece does not fit, sinks and recent
    keys stay, then the chunks with the largest sums.
    """
    kept = []
    for first in range(0, length, piece):
        new = list(range(first, min(first + piece, length)))
        if len(kept) + len(new) > budget:
            room = (budget - len(new)) // chunk
            chunks = [kept[i : i + chunk] for i in range(0, len(kept), chunk)]
            newest = set(kept[-recent:])
            forced = [c for i, c in enumerate(chunks) if i * chunk < sinks or newest & set(c)]
            free = sorted((c for c in chunks if c not in forced), key=lambda c: -sum(scores[t] for t in c))
            kept = sorted(t for c in forced + free[: room - len(forced)] for t in c)
        kept += new
    return kept


@pytest.mark.parametrize("length", [5, 72, 130])
def test_the_oracle_is_the_verifiers_own_attention_over_layers_heads_and_window(verifier, length):
    ids = fixed_prompt(length)
    told = start_of(verifier, ids).stepper.attention_on_tokens()
    torch.testing.assert_close(told, attention_of_the_window(verifier, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(told.sum(), torch.tensor(1.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("length", "budget"), [(72, 64), (128, 64), (150, 32)])
def test_the_oracle_keeps_the_chunks_the_verifier_attends_to_in_every_layer_and_head(
    verifier, twin, proposers, length, budget, mode
):
    ids = fixed_prompt(length)
    generate(start_of(verifier, ids), twin, cache_plan(budget, "oracle", mode), new_tokens=1)
    scores = attention_of_the_window(verifier, ids).tolist()
    expected = top_chunks(scores, length, budget=budget, piece=budget // 4)
    assert expected != top_chunks(list(range(length)), length, budget=budget, piece=budget // 4), "not just the newest"
    assert expected != top_chunks([-s for s in scores], length, budget=budget, piece=budget // 4)
    for layer in proposers[0].stepper.cache.layers:
        assert layer.tokens.tolist() == [expected] * 2


@pytest.mark.parametrize("mode", MODES)
def test_while_decoding_the_oracle_sees_the_sequence_so_far(verifier, noisy, monkeypatch, mode):
    asked, look = [], Stepper.attention_on_tokens

    def watched(stepper):
        told = look(stepper)
        asked.append((stepper.logical, told))
        return told

    monkeypatch.setattr(Stepper, "attention_on_tokens", watched)
    decoded = generate(start_of(verifier, fixed_prompt(130)), noisy, cache_plan(32, "oracle", mode))
    every = [*fixed_prompt(130), *decoded.tokens]
    assert len(asked) >= 3
    assert len({length for length, _ in asked}) == len(asked), "once for each state of the verifier"
    for length, told in asked:
        torch.testing.assert_close(told, attention_of_the_window(verifier, every[:length]), atol=1e-5, rtol=0)


def test_the_oracle_of_a_verifier_that_observes_nothing_names_the_remedy(verifier, twin):
    start = start_of(verifier, fixed_prompt(72), observe=0)
    with pytest.raises(ValueError, match=r"policy = oracle.*observe its queries \(observe >= 1\)"):
        generate(start, twin, cache_plan(64, "oracle"))


def test_the_oracle_without_a_verifier_is_refused(verifier):
    with pytest.raises(ValueError, match="policy = oracle needs the verifier's attention"):
        Stepper(verifier, cache_plan(64, "oracle")).prefill(fixed_prompt(72))


def test_tokens_the_oracle_has_not_seen_are_kept_but_never_at_the_cost_of_sinks_and_recent_ones(verifier):
    stepper = Stepper(verifier, cache_plan(32, "oracle"), oracle=lambda: torch.arange(20, 0, -1.0))
    stepper.prefill(fixed_prompt(84))
    for layer in stepper.cache.layers:
        for head in layer.tokens.tolist():
            assert len(head) <= 32
            assert head == sorted(set(head))
            assert head[:8] == list(range(8))
            assert head[-8:] == list(range(76, 84))


def test_a_method_leaves_the_prefilled_verifier_to_the_next_as_it_was(verifier, noisy, twin):
    start, plan = start_of(verifier, fixed_prompt(130)), cache_plan(32, "oracle", refresh=2)
    queries = [layer.queries.clone() for layer in start.stepper.cache.layers]
    held = [[x.clone() for x in layer.view()] for layer in start.stepper.cache.layers]
    told = start.stepper.attention_on_tokens()

    def rounds(decoded):
        return decoded.tokens, [(r.drafted, r.accepted, r.emitted) for r in decoded.rounds]

    first = generate(start, noisy, plan, new_tokens=12)
    for _ in range(2):
        assert torch.equal(start.stepper.attention_on_tokens(), told)
        for layer, query, (keys, values) in zip(start.stepper.cache.layers, queries, held, strict=True):
            assert torch.equal(layer.queries, query)
            assert torch.equal(layer.view()[0], keys)
            assert torch.equal(layer.view()[1], values)
        generate(start, twin, cache_plan(64, "last_key"), new_tokens=12)
        generate(start, None, None, gamma=0)
    anew = start_of(verifier, fixed_prompt(130))
    for later in (start, anew):
        assert rounds(generate(later, noisy, plan, new_tokens=12)) == rounds(first)


# --- full, ties, random


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [32, FULL])
def test_the_policy_full_keeps_everything_whatever_the_budget(verifier, twin, budget, mode):
    decoded = generate(start_of(verifier, fixed_prompt(130)), twin, cache_plan(budget, FULL_POLICY, mode))
    assert acceptance(decoded) == 1.0
    assert decoded.drafter_cached_peak > 130 + 16
    assert decoded.rounds[0].drafter_cached == 130 + 4


def test_select_by_the_policy_full_keeps_every_index():
    seen = Evidence(torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 90, 2), 1.0)
    assert select(seen, budget=32, selection=Selection(FULL_POLICY)).tolist() == [[list(range(90))] * 2]


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"no_sinks", "no_recent"}))
def test_equal_scores_go_to_the_lower_index_under_every_policy(policy, monkeypatch):
    monkeypatch.setitem(POLICIES, policy, lambda seen: torch.zeros(seen.keys_BHTD.shape[:3]))
    seen = Evidence(torch.zeros(1, 4, 8, 2), torch.zeros(1, 2, 4000, 2), 1.0)
    index = select(seen, budget=800, selection=Selection(policy))
    assert index.tolist() == [[[*range(792), *range(3992, 4000)]] * 2]


@pytest.mark.parametrize("policy", ["attention_mass", "last_key", "oracle"])
def test_evidence_that_prefers_nothing_keeps_the_lower_index(policy):
    zeros = torch.zeros(1, 2, 4000, 2)
    seen = Evidence(torch.zeros(1, 4, 8, 2), zeros, 1.0, oracle_HT=torch.full((2, 4000), 0.1))
    index = select(seen, budget=800, selection=Selection(policy))
    assert index.tolist() == [[[*range(792), *range(3992, 4000)]] * 2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_evidence_keeps_the_same_keys(policy):
    keys = torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(0))
    seen = Evidence(torch.cat([keys, keys], 1)[:, :, -8:], keys, 1.0, oracle_HT=keys[0, :, :, 0])
    first, again = (select(seen, budget=64, selection=Selection(policy)) for _ in range(2))
    assert torch.equal(first, again)


def test_random_keeps_other_chunks_in_each_layer_and_the_same_for_the_same_seed(verifier):
    def kept(seed):
        stepper = Stepper(verifier, CachePlan(0, 64, Selection("random", seed=seed)))
        stepper.prefill(fixed_prompt(300))
        return [layer.tokens.tolist() for layer in stepper.cache.layers]

    first, again, other = kept(3), kept(3), kept(9)
    assert first == again != other
    assert first[0] != first[1], "layers"
    assert first[0][0] != first[0][1], "heads"


# --- which token each cached key belongs to


def layer_0_keys(model, ids):
    """Unrotated keys (H, T, D) of layer 0, where a key depends on its token alone."""
    layer = model.model.layers[0]
    with torch.no_grad():
        raw = layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens(torch.tensor(ids))))
    return raw.view(len(ids), 2, 16).transpose(0, 1)


def check_keys(stepper, ids):
    """Every key of layer 0 is the key of the token that `tokens` says, at the position of the mode."""
    layer = stepper.cache.layers[0]
    tokens, keys = layer.tokens, layer.view()[0][0]
    assert tokens.shape == keys.shape[:2] == (2, stepper.physical)
    raw = layer_0_keys(stepper.model, ids).gather(1, tokens[..., None].expand(-1, -1, 16))
    places = torch.arange(stepper.physical).expand(2, -1) if stepper.plan.position_mode == "in_cache" else tokens
    true = rotate(raw, places, stepper.model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(keys, true, atol=1e-3, rtol=1e-3)


class Followed(Stepper):
    """A sparse cache whose tokens are followed from outside, and compared after every change."""

    made: list["Followed"] = []  # noqa: RUF012

    def __init__(self, model, plan, **more):
        super().__init__(model, plan, **more)
        self.survivors, self.ids, self.clears = Survivors(self), [], 0
        self.made.append(self)

    def _forward(self, ids, *, last_only):
        self.survivors.fed(len(self.ids), ids.shape[1])
        self.ids += ids[0].tolist()
        out = super()._forward(ids, last_only=last_only)
        self.compare()
        return out

    def rollback(self, n):
        super().rollback(n)
        self.ids = self.ids[: len(self.ids) - n]
        self.survivors.alive = [alive[:, : alive.shape[1] - n] for alive in self.survivors.alive]
        self.compare()

    def fit(self, incoming=0):
        super().fit(incoming)
        self.compare()

    def clear(self):
        super().clear()
        self.clears += 1
        self.ids, self.survivors.alive = [], [alive[:, :0] for alive in self.survivors.alive]
        assert (self.logical, self.physical) == (0, 0)

    def compare(self):
        assert self.logical == len(self.ids)
        for layer, alive in zip(self.cache.layers, self.survivors.alive, strict=True):
            if layer.is_initialized:
                assert torch.equal(layer.tokens, alive)


@pytest.fixture
def followed(monkeypatch):
    """The drafter's steppers."""
    monkeypatch.setattr(Followed, "made", [])
    monkeypatch.setattr(sequence, "Stepper", Followed)
    return Followed.made


@settings(max_examples=12, **HYPOTHESIS)
@given(
    length=st.integers(1, 120),
    budget=st.sampled_from([32, 48, 64]),
    gamma=st.integers(1, 6),
    refresh=st.integers(0, 3),
    policy=st.sampled_from(DROPPING),
    mode=st.sampled_from(MODES),
)
def test_tokens_name_the_cached_keys_through_prefill_eviction_rollback_and_refresh(
    verifier, noisy, followed, length, budget, gamma, refresh, policy, mode
):
    followed.clear()
    plan = cache_plan(budget, policy, mode, refresh=refresh)
    decoded = generate(start_of(verifier, fixed_prompt(length), gamma=gamma), noisy, plan, gamma=gamma, new_tokens=16)
    (stepper,) = followed
    every = [*fixed_prompt(length), *decoded.tokens]
    assert stepper.ids == every[: stepper.logical]
    assert stepper.logical < len(every)
    # The last round ends the row: there is nothing left to refresh for. Nor is there where nothing was dropped yet.
    due = (len(decoded.rounds) - 1) // refresh if refresh else 0
    assert stepper.clears == due if length > budget else stepper.clears <= due
    check_keys(stepper, every)


def test_without_eviction_tokens_count_from_0(verifier):
    stepper = Stepper(verifier, CachePlan(capacity=40))
    stepper.prefill(fixed_prompt(31))
    assert stepper.cache.layers[1].tokens.tolist() == [list(range(31))] * 2


# --- refresh


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", DROPPING)
@pytest.mark.parametrize("every", [1, 4])
def test_a_refreshed_cache_is_that_of_a_drafter_that_reads_the_sequence_anew(
    verifier, noisy, followed, monkeypatch, policy, every, mode
):
    refreshed, settle = [], sequence.Proposer.settle

    def settling(self):
        row, before = self.row, self.stepper.clears
        seconds = settle(self)
        if self.stepper.clears > before:
            fresh = Stepper(noisy.model, self.stepper.plan, oracle=self.stepper.oracle)
            fresh.prefill(row.sequence[:-1])
            fresh.fit()
            assert (self.stepper.logical, self.stepper.physical) == (fresh.logical, fresh.physical)
            assert fresh.physical <= 32 < fresh.logical
            for mine, theirs in zip(self.stepper.cache.layers, fresh.cache.layers, strict=True):
                assert torch.equal(mine.tokens, theirs.tokens)
                assert torch.equal(mine.view()[0], theirs.view()[0])
                assert torch.equal(mine.view()[1], theirs.view()[1])
            refreshed.append(len(row.sequence))
        return seconds

    monkeypatch.setattr(sequence.Proposer, "settle", settling)
    start = start_of(verifier, fixed_prompt(100))
    decoded = generate(start, noisy, cache_plan(32, policy, mode, refresh=every), new_tokens=14)
    assert decoded.tokens == generate(start, None, None, gamma=0, new_tokens=14).tokens
    assert len(refreshed) == (len(decoded.rounds) - 1) // every > 0
    assert decoded.drafter_cached_peak <= 32 + 5


def test_without_refresh_the_cache_is_never_cleared(verifier, noisy, followed):
    generate(start_of(verifier, fixed_prompt(100)), noisy, cache_plan(32, refresh=0))
    assert followed[0].clears == 0


def test_a_full_cache_has_nothing_to_refresh(verifier, noisy, followed):
    generate(start_of(verifier, fixed_prompt(100)), noisy, cache_plan(FULL, refresh=1))
    assert followed[0].clears == 0


def test_a_refresh_counts_as_selection(verifier, noisy, monkeypatch):
    clear = Stepper.clear

    def slow(self):
        time.sleep(0.2)
        clear(self)

    monkeypatch.setattr(Stepper, "clear", slow)
    decoded = generate(start_of(verifier, fixed_prompt(100)), noisy, cache_plan(32, refresh=3), new_tokens=12)
    due = [i for i in range(len(decoded.rounds) - 1) if i % 3 == 2]
    assert due
    assert [i for i, r in enumerate(decoded.rounds) if r.select_s >= 0.2] == due
    assert all(r.draft_s + r.verify_s + r.overhead_s < 0.2 for r in decoded.rounds)


# --- the budget is a bound


@cache
def long_model():
    return tiny_llama(max_positions=8192)


@cache
def long_start(length):
    return start_of(long_model(), fixed_prompt(length))


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("attention_mass", m) for m in MODES] + [("oracle", m) for m in MODES] + [("random", "in_cache")],
)
def test_the_bound_and_the_bytes_are_the_same_at_1k_and_at_4k(policy, mode, monkeypatch):
    drafter = Scripted(long_model(), iter(lambda: 77, None))  # nearly always wrong: many rounds
    budget, gamma, held, update = 64, 4, [], LayerStorage.update

    def updating(self, *args, **kwargs):
        out = update(self, *args, **kwargs)
        if self.track:
            held.append((args[0].shape[2], self.physical))
        return out

    monkeypatch.setattr(LayerStorage, "update", updating)
    sizes = set()
    for length in (1024, 4096):
        held.clear()
        start = long_start(length)
        plan = cache_plan(budget, policy, mode, refresh=12)
        decoded = generate(start, drafter, plan, gamma=gamma, new_tokens=20)
        assert len(decoded.rounds) > 12
        assert all(r.drafter_cached <= budget for r in decoded.rounds)
        assert max(physical for new, physical in held if new > 2) <= budget, "prefill and refresh"
        assert budget < max(physical for _, physical in held) <= budget + gamma + 1, "in flight"
        assert decoded.drafter_cached_peak == max(physical for _, physical in held)
        sizes |= {decoded.drafter_kv_bytes, *(r.drafter_kv_bytes for r in decoded.rounds)}
    assert sizes == {2 * 2 * 2 * (budget + gamma + 1) * 16 * 4}  # K and V, layers, heads, keys, D, fp32


def test_clear_keeps_the_buffers_and_the_peak(verifier):
    stepper = Stepper(verifier, cache_plan(32))
    stepper.prefill(fixed_prompt(100))
    buffers, peak = [layer.keys.data_ptr() for layer in stepper.cache.layers], stepper.cache.peak_physical
    stepper.clear()
    assert (stepper.logical, stepper.physical, stepper.cache.peak_physical) == (0, 0, peak)
    logits = stepper.prefill(fixed_prompt(90))
    assert torch.equal(logits, Stepper(verifier, cache_plan(32)).prefill(fixed_prompt(90)))
    assert [layer.keys.data_ptr() for layer in stepper.cache.layers] == buffers


# --- properties of any generation


@cache
def own_text(length, new_tokens):
    start = prefill(_TINY, fixed_prompt(length), new_tokens=new_tokens, gamma=0, chunk=64)
    return generate(start, None, None, gamma=0, new_tokens=new_tokens).tokens


_TINY = tiny_llama()


@st.composite
def rules(draw):
    """(budget, Selection): legal ones of any chunk."""
    chunk = draw(st.sampled_from([1, 3, 4, 8]))
    sinks, recent = draw(st.integers(0, 9)), draw(st.integers(4, 12))
    least = forced_chunks(chunk=chunk, sinks=sinks, recent=recent) + 1
    budget = chunk * draw(st.integers(least, least + 24 // chunk))
    policy = draw(st.sampled_from(sorted(set(DROPPING) - {"no_sinks", "no_recent"})))
    return budget, Selection(policy, chunk, sinks, recent, window=draw(st.integers(1, 4)))


@settings(max_examples=30, **HYPOTHESIS)
@given(
    length=LENGTHS,
    rule=rules(),
    mode=st.sampled_from(MODES),
    refresh=st.sampled_from([0, 0, 2]),
    gamma=st.integers(1, 7),
    pattern=st.lists(st.integers(0, 7), min_size=1, max_size=6),
)
def test_any_pattern_of_acceptance_keeps_the_ledgers_the_bound_and_the_text(
    noisy, followed, length, rule, mode, refresh, gamma, pattern
):
    followed.clear()
    (budget, chosen), counts = rule, [min(n, gamma) for n in pattern]
    text = own_text(length, 48)[: 1 + sum(counts) + len(counts)]
    left = [len(text) - 1 - sum(counts[:i]) - i for i in range(len(counts))]  # the last rounds draft less
    matches = [right[: n - 1] for right, n in zip(right_then_wrong(gamma, counts), left, strict=True)]
    drafter = Scripted(noisy.model, script(text + [0] * 8, matches))
    with pytest.MonkeyPatch.context() as patch:
        steps = keep_ledger(patch)
        start = start_of(_TINY, fixed_prompt(length), new_tokens=len(text), gamma=gamma, observe=chosen.window)
        plan = CachePlan(0, budget, chosen, mode, prefill_chunk=64, refresh=refresh)
        decoded = generate(start, drafter, plan, gamma=gamma, new_tokens=len(text))
    assert decoded.tokens == text
    assert [r.accepted for r in decoded.rounds] == counts
    assert steps[1] == len(counts)
    assert all(r.drafter_cached <= budget for r in decoded.rounds)
    assert decoded.drafter_cached_peak <= budget + gamma + 1
    (stepper,) = followed
    every = [*fixed_prompt(length), *text]
    assert stepper.ids == every[: stepper.logical]
    for layer in stepper.cache.layers:
        for head in layer.tokens.tolist():
            assert set(range(min(chosen.sinks, stepper.logical))) <= set(head)
            assert set(range(max(0, stepper.logical - chosen.recent), stepper.logical)) <= set(head)


@settings(max_examples=40, **HYPOTHESIS)
@given(
    length=LENGTHS,
    budget=st.sampled_from([32, 48, FULL]),
    mode=st.sampled_from(MODES),
    policy=st.sampled_from(["attention_mass", "last_key", "random"]),
    blocks=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6),
)
def test_rollback_restores_the_logits_bit_for_bit(verifier, length, budget, mode, policy, blocks):
    """Blocks that are kept, with and without rejected ones fed in between."""
    plan = CachePlan(capacity=160, budget=budget, selection=Selection(policy), position_mode=mode, block=8)
    plain, rejecting = Stepper(verifier, plan), Stepper(verifier, plan)
    for stepper in (plain, rejecting):
        stepper.prefill(fixed_prompt(length))
        stepper.fit()
    for at, (keep, reject) in enumerate(blocks):
        kept = [(7 * at + i) % 128 for i in range(keep)]
        rejecting.feed([99] * reject)
        rejecting.rollback(reject)
        assert torch.equal(plain.feed(kept), rejecting.feed(kept))
        rejecting.feed([55] * reject)
        rejecting.rollback(reject)
        for stepper in (plain, rejecting):
            stepper.fit()
        assert (plain.logical, plain.physical) == (rejecting.logical, rejecting.physical)
        for mine, theirs in zip(plain.cache.layers, rejecting.cache.layers, strict=True):
            for a, b in zip(mine.view(), theirs.view(), strict=True):
                assert torch.equal(a, b)
            assert torch.equal(mine.tokens, theirs.tokens)


@pytest.mark.parametrize(
    ("policy", "mode"), [(p, m) for p in EVERY_POLICY for m in MODES if p not in STORES_ALL or m == "absolute"]
)
def test_each_row_of_a_batch_keeps_the_cache_it_keeps_alone(verifier, noisy, proposers, policy, mode):
    plan = cache_plan(32, policy, mode, refresh=3)
    starts = [start_of(verifier, fixed_prompt(length)) for length in (130, 1, 40)]
    together = decode_batch(starts, noisy, plan, gamma=4, new_tokens=24, eos=NEVER)
    alone = [generate(start, noisy, plan) for start in starts]
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    for mine, theirs in zip(proposers[:3], proposers[3:], strict=True):
        for a, b in zip(mine.stepper.cache.layers, theirs.stepper.cache.layers, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            torch.testing.assert_close(a.view()[0], b.view()[0], atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(a.view()[1], b.view()[1], atol=1e-3, rtol=1e-3)


def test_policies_are_the_six_of_the_design_two_controls_and_three_that_look_further():
    design = {"attention_mass", "last_key", "oracle", "random", "sink_recent", "full"}
    assert design | {"no_recent", "no_sinks", "attention_ahead", "retrieval", "retrieval_ahead"} == set(EVERY_POLICY)
