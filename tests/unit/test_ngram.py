"""Prompt lookup: which tokens it proposes, and that decoding with it stays the verifier's own."""

import pytest
import torch

from bdcore.decoding.decoder import decode, decode_batch, prefill
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.lookup import Lookup, Occurrences
from bdcore.decoding.sampling import Sampling
from tests.conftest import tiny_llama

NEVER = frozenset()


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2, 3, 4], 4, []),  # nothing came twice
        ([1, 2, 3, 1], 4, [2, 3, 1]),  # what is there, up to the end
        ([1, 2, 3, 1], 2, [2, 3]),
        ([1, 2, 3, 1], 0, []),
        ([1, 5, 1, 6, 1], 2, [6, 1]),  # the newest earlier occurrence
        ([1, 2, 7, 9, 2, 8, 1, 2], 2, [7, 9]),  # a longer suffix before a newer one
        ([1, 2, 3, 4, 5, 9, 2, 3, 6, 0, 1, 2, 3], 2, [4, 5]),  # three tokens before two
        ([9, 1, 2, 3, 7, 8, 1, 2, 3, 6, 9, 1, 2, 3], 1, [6]),  # never four: the newest of three tokens
        ([4, 4, 4, 4], 3, [4]),  # an occurrence may overlap the suffix
        ([1, 2, 1, 2, 1, 2], 9, [1, 2]),
    ],
)
def test_proposals_are_what_followed_the_longest_suffix(tokens, most, drafts):
    assert Occurrences(3).draft(tokens, most) == drafts


def test_a_growing_sequence_gives_what_a_whole_one_gives():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (60,), generator=generator).tolist()
    growing = Occurrences(3)
    for end in (0, 1, 2, 3, 7, 8, 20, 20, 60):
        assert growing.draft(tokens[:end], 5) == Occurrences(3).draft(tokens[:end], 5)


@pytest.fixture
def periodic(prompt):
    return prompt(7) * 8


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("new_tokens", [1, 2, 40])
def test_decoding_by_lookup_is_the_verifier_alone(verifier, periodic, gamma, new_tokens):
    start = prefill(verifier, periodic, new_tokens=new_tokens, gamma=5, chunk=512)
    alone = decode(start, None, new_tokens=new_tokens, eos=NEVER)
    looked = decode(start, Lookup(), gamma=gamma, new_tokens=new_tokens, eos=NEVER)
    assert (looked.tokens, looked.finish_reason) == (alone.tokens, alone.finish_reason)
    assert (looked.drafter_cached_peak, looked.drafter_kv_bytes) == (0, 0)
    assert sum(r.drafted for r in looked.rounds) == sum(looked.drafted_at)
    assert all(r.drafted <= gamma for r in looked.rounds)


def test_eos_inside_looked_up_tokens_ends_there(verifier, periodic):
    start = prefill(verifier, periodic, new_tokens=40, gamma=5, chunk=512)
    eos = {decode(start, None, new_tokens=40, eos=NEVER).tokens[-6]}
    alone = decode(start, None, new_tokens=40, eos=eos)
    looked = decode(start, Lookup(), gamma=5, new_tokens=40, eos=eos)
    assert (looked.tokens, looked.finish_reason) == (alone.tokens, "eos")


def test_a_loop_of_the_verifier_is_looked_up_and_accepted(verifier, prompt):
    """The greedy text of a tiny model soon repeats itself."""
    ids = prompt(9)
    start = prefill(verifier, ids, new_tokens=300, gamma=3, chunk=512)
    alone = decode(start, None, new_tokens=300, eos=NEVER).tokens
    again = prefill(verifier, [*ids, *alone], new_tokens=40, gamma=3, chunk=512)
    looked = decode(again, Lookup(), gamma=3, new_tokens=40, eos=NEVER)
    expected, tokens, text = 0, looked.tokens[:1], [*again.prompt]
    for record in looked.rounds:  # each round against the same proposal, worked out afresh
        proposed = Occurrences(3).draft([*text, *tokens], min(3, 40 - len(tokens) - 1))
        following = looked.tokens[len(tokens) : len(tokens) + len(proposed)]
        right = next((i for i, (a, b) in enumerate(zip(proposed, following, strict=True)) if a != b), len(proposed))
        assert (record.drafted, record.accepted, record.emitted) == (len(proposed), right, right + 1)
        tokens += looked.tokens[len(tokens) : len(tokens) + record.emitted]
        expected += right
    assert tokens == looked.tokens and expected > 0


def test_rows_of_a_batch_look_up_their_own_text(verifier, prompt):
    prompts = [prompt(7) * 6, prompt(5) * 4, prompt(31)]
    starts = [prefill(verifier, ids, new_tokens=24, gamma=4, chunk=512) for ids in prompts]
    batch = decode_batch(starts, Lookup(), gamma=4, new_tokens=24, eos=NEVER)
    for start, row in zip(starts, batch, strict=True):
        single = decode(start, Lookup(), gamma=4, new_tokens=24, eos=NEVER)
        assert row.tokens == single.tokens and row.accepted_at == single.accepted_at


def test_an_adaptive_length_looks_up_too(verifier, periodic):
    start = prefill(verifier, periodic, new_tokens=40, gamma=5, chunk=512)
    alone = decode(start, None, new_tokens=40, eos=NEVER)
    assert decode(start, Lookup(), gamma=DraftRule("adaptive", 5), new_tokens=40, eos=NEVER).tokens == alone.tokens


@torch.no_grad()
def test_sampling_with_certain_proposals_keeps_the_verifiers_distribution():
    """Of eight tokens every one was there before, so every round drafts; the second token's law is known exactly."""
    model, seeds = tiny_llama(vocab=8), 600
    prompt = torch.randint(0, 8, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    start = prefill(model, prompt, new_tokens=3, gamma=1, chunk=512)
    how = {"new_tokens": 3, "eos": NEVER, "sampling": Sampling(temperature=1.5)}
    made = [decode(start, Lookup(), gamma=1, seed=seed, **how) for seed in range(seeds)]
    drafted, accepted = (sum(sum(getattr(d, name)) for d in made) for name in ("drafted_at", "accepted_at"))
    assert seeds <= drafted and 0.1 * drafted < accepted < 0.9 * drafted
    first_V = (start.logits_V / 1.5).softmax(-1)
    rows = torch.tensor([[*prompt, token] for token in range(8)])
    next_VV = (model(rows, use_cache=False).logits[:, -1] / 1.5).softmax(-1)
    expected_V = seeds * (first_V @ next_VV)
    found_V = torch.bincount(torch.tensor([d.tokens[1] for d in made]), minlength=8)
    assert float(((found_V - expected_V) ** 2 / expected_V).sum()) < 24.3  # 0.1 % of chi-square with 7 degrees
