"""Where a text ends: stop strings, EOS that must wait, and the limit; against the verifier alone and transformers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bdcore.decoding import decoder
from bdcore.decoding.decoder import decode, prefill
from bdcore.decoding.sampling import Sampling
from bdcore.decoding.stops import StopStrings
from bdcore.kv.budget import FULL
from tests.unit.test_decoder import NEVER, alone, cache_plan, fixed_prompt

BYTES = [b"<s>", b"</s>", b"<pad>", *(bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz .,\n")]
BYTES += [b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xa9 x", b"y\xc3", "é".encode()]
BYTES += [f"{first}{second}".encode() for first in "stopendxyz" for second in "top en.a"]
BYTES = list(dict.fromkeys(BYTES))[:128]
"""What each id of the tiny model stands for. Some hold part of a character, some a character and part of the next."""


def byte_level(text: bytes) -> str:
    """The spelling of bytes in a byte-level vocabulary."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = {b: 256 + i for i, b in enumerate(b for b in range(256) if b not in keep)}
    return "".join(chr(moved.get(b, b)) for b in text)


@pytest.fixture(scope="module")
def tokenizer():
    assert len(BYTES) <= 128
    vocab = {piece.decode() if i < 3 else byte_level(piece): i for i, piece in enumerate(BYTES)}
    vocab |= {f"filler{i}": i for i in range(len(vocab), 128)}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def hf(verifier):
    """The verifier under transformers' own attention, for `generate`."""
    model = copy.deepcopy(verifier)
    model.set_attn_implementation("sdpa")
    return model


@pytest.fixture(scope="module")
def text(verifier):
    return alone(verifier, fixed_prompt(40), 40)


def spelled(tokens):
    return b"".join(BYTES[t] if t < len(BYTES) else f"filler{t}".encode() for t in tokens)


def first_stop(tokens, *strings):
    """How many tokens until a string is complete, by bytes alone; None: never."""
    return next((n for n in range(1, len(tokens) + 1) if any(s.encode() in spelled(tokens[:n]) for s in strings)), None)


def run(verifier, drafter, prompt, *, gamma=8, new_tokens=40, eos=NEVER, budget=FULL, **more):
    start = prefill(verifier, prompt, new_tokens=new_tokens, gamma=gamma, chunk=64)
    return decode(start, drafter, cache_plan(budget), gamma=gamma, new_tokens=new_tokens, eos=eos, **more)


def generate(hf, prompt, **settings):
    out = hf.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        pad_token_id=0,
        **{"eos_token_id": None, **settings},
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture
def ledger(monkeypatch):
    """(verifier's, drafter's) fed tokens, prompt and text lengths after every round."""
    seen, play = [], decoder.play_round

    def watched(rows):
        play(rows)
        for row in rows:
            fed = row.proposer.stepper.logical if row.proposer else 0
            seen.append((row.verifier.logical, fed, len(row.prompt) + len(row.tokens)))

    monkeypatch.setattr(decoder, "play_round", watched)
    return seen


def stop_strings(tokenizer, text):
    """Decoded text of tokens k to k + n, where it is text: 1 to 3 tokens, whole and cut inside a token."""
    for n in (1, 2, 3):
        for k in range(1, 30):
            string = tokenizer.decode(text[k : k + n])
            for cut in {string, string[1:], string[:-1]}:
                if cut and "\ufffd" not in cut:
                    yield cut


# --- B03


def test_b03_a_stop_string_inside_an_accepted_block_stops_where_the_verifier_alone_does(
    verifier, twin, tokenizer, hf, text, ledger
):
    """B03: the decoded text of tokens 5 and 6, twin, gamma 8."""
    string = tokenizer.decode(text[4:6])
    assert "\ufffd" not in string
    expected = text[: first_stop(text, string)]
    stop = StopStrings(tokenizer, [string])
    ar = run(verifier, None, fixed_prompt(40), gamma=0, stop=stop)
    ledger.clear()
    sd = run(verifier, twin, fixed_prompt(40), stop=stop)
    assert sd.tokens == ar.tokens == expected
    assert sd.finish_reason == ar.finish_reason == "stop"
    assert generate(hf, fixed_prompt(40), max_new_tokens=40, stop_strings=[string], tokenizer=tokenizer) == expected
    # Counters exclude what follows, and both caches are cut there.
    (only,) = sd.rounds
    assert only.drafted == only.accepted == only.emitted == len(expected) - 1 < 8
    assert sum(sd.drafted_at) == sum(sd.accepted_at) == len(expected) - 1
    assert ledger == [(40 + len(expected) - 1, 40 + len(expected) - 1, 40 + len(expected))]


@pytest.mark.parametrize("budget", [FULL, 32])
def test_any_stop_string_stops_where_the_bytes_say_for_the_verifier_alone_for_blocks_and_for_transformers(
    verifier, twin, noisy, tokenizer, hf, text, budget
):
    strings = sorted(set(stop_strings(tokenizer, text)))[:: 4 if budget == FULL else 8]
    assert len(strings) > 10
    inside = 0
    for string in strings:
        n = first_stop(text, string)
        for drafter, gamma in ((twin, 8), (noisy, 4)):
            decoded = run(
                verifier, drafter, fixed_prompt(40), gamma=gamma, budget=budget, stop=StopStrings(tokenizer, [string])
            )
            assert decoded.tokens == text[:n], repr(string)
            assert decoded.finish_reason == "stop"
            assert sum(r.emitted for r in decoded.rounds) == len(decoded.tokens) - 1
            assert all(r.accepted <= r.emitted for r in decoded.rounds)
            inside += bool(decoded.rounds) and decoded.rounds[-1].emitted < gamma + 1
        if budget == FULL:
            reference = generate(hf, fixed_prompt(40), max_new_tokens=40, stop_strings=[string], tokenizer=tokenizer)
            assert reference == text[:n], repr(string)
    assert inside > len(strings) / 2, "most must complete inside a block"


def test_the_first_of_several_stop_strings_ends_the_text(verifier, twin, tokenizer, text):
    late, early = tokenizer.decode(text[9:12]), tokenizer.decode(text[4:6])
    n = first_stop(text, late, early)
    assert n == first_stop(text, early)
    assert run(verifier, twin, fixed_prompt(40), stop=StopStrings(tokenizer, [late, early])).tokens == text[:n]


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_stop(verifier, twin, tokenizer, text):
    """Transformers looks at the end of the prompt as well; ours begins with the first new token."""
    across = tokenizer.decode([fixed_prompt(40)[-1], text[0]])
    within = tokenizer.decode(fixed_prompt(40)[5:9])
    assert first_stop(text, across, within) is None
    decoded = run(verifier, twin, fixed_prompt(40), stop=StopStrings(tokenizer, [across, within]))
    assert (decoded.tokens, decoded.finish_reason) == (text, "length")


def test_a_stop_string_as_the_first_token_ends_at_once(verifier, twin, tokenizer, text):
    decoded = run(verifier, twin, fixed_prompt(40), stop=StopStrings(tokenizer, [tokenizer.decode(text[:1])]))
    assert (decoded.tokens, decoded.finish_reason, decoded.rounds) == (text[:1], "stop", [])


def test_a_stop_string_that_is_drafted_but_rejected_does_not_stop(verifier, noisy, tokenizer, text):
    decoded = run(verifier, noisy, fixed_prompt(40), gamma=8)
    assert any(r.accepted < r.drafted for r in decoded.rounds)
    absent = [s for s in map(tokenizer.decode, range(3, 128)) if "\ufffd" not in s and not first_stop(text, s)]
    assert run(verifier, noisy, fixed_prompt(40), stop=StopStrings(tokenizer, absent)).tokens == text


# --- the pure rule


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(3, len(BYTES) - 1), min_size=1, max_size=40),
    strings=st.lists(
        st.sampled_from(["é", "€", "😀", "é x", "yé", "to", "stop", " ", "en.", "s", "€a", "o e", "sos"]), min_size=1
    ),
)
def test_the_token_that_completes_a_string_is_the_one_by_bytes(tokenizer, tokens, strings):
    stop = StopStrings(tokenizer, strings)
    hit = next((n for n in range(1, len(tokens) + 1) if stop.hit(tokens[:n])), None)
    assert hit == first_stop(tokens, *strings)


@pytest.mark.parametrize(
    ("string", "pieces"),
    [
        ("é", [b"\xc3", b"\xa9"]),
        ("€", [b"\xe2", b"\x82", b"\xac"]),
        ("😀", [b"\xf0\x9f", b"\x98\x80"]),
        ("a😀b", [b"a", b"\xf0\x9f", b"\x98\x80", b"b"]),
        ("yé", [b"y\xc3", b"\xa9 x"]),
    ],
)
def test_a_character_of_several_tokens_is_complete_with_its_last_byte(tokenizer, string, pieces):
    ids = [BYTES.index(piece) for piece in [b"s"] * 30 + pieces]
    stop = StopStrings(tokenizer, [string])
    assert [stop.hit(ids[:n]) for n in range(1, len(ids) + 1)] == [False] * (len(ids) - 1) + [True]


def test_a_space_before_the_first_word_counts_though_the_decoder_drops_it():
    """As in Llama 2, whose decoder strips one space in front of a text."""
    inner = Tokenizer(models.BPE({"<unk>": 0, "▁": 1, "a": 2, "▁END": 3}, [], unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    llama = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert llama.decode([3]) == "END"
    assert StopStrings(llama, [" END"]).hit([3])
    assert StopStrings(llama, ["END"]).hit([2, 3])
    assert not StopStrings(llama, ["a END"]).hit([3]), "nothing is put in front of the text"


def test_spaces_are_not_cleaned_up_before_a_string_is_looked_for():
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, ".": 2}, unk_token="<unk>"))
    cleaning = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=True)
    assert cleaning.decode([1, 2]) == "a."
    assert StopStrings(cleaning, ["a ."]).hit([1, 2])


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_no_string_and_an_empty_string_are_refused(tokenizer, strings):
    with pytest.raises(ValueError, match="stop = "):
        StopStrings(tokenizer, strings)


# --- min_new_tokens


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("least", [1, 5, 10, 39])
def test_eos_waits_for_min_new_tokens_as_in_transformers(verifier, twin, noisy, hf, text, least, gamma):
    eos = {text[2]}  # the verifier wants to end after three tokens
    reference = generate(hf, fixed_prompt(40), max_new_tokens=40, eos_token_id=[text[2]], min_new_tokens=least)
    assert len(reference) >= least
    for drafter in (None, twin, noisy):
        decoded = run(
            verifier, drafter, fixed_prompt(40), gamma=gamma, eos=eos, sampling=Sampling(min_new_tokens=least)
        )
        assert decoded.tokens == reference
        assert decoded.finish_reason == ("eos" if reference[-1] in eos else "length")


# --- B02


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("new_tokens", [1, 4, 5, 6, 7, 12])
def test_b02_exactly_max_new_tokens_for_every_gamma_and_every_kind_of_sampling(
    verifier, twin, noisy, text, gamma, new_tokens
):
    """B02: twin, gamma 4, limits 1, 4, 5, 6, 7, 12."""
    for drafter in (twin, noisy):
        greedy = run(verifier, drafter, fixed_prompt(40), gamma=gamma, new_tokens=new_tokens)
        sampled = run(
            verifier,
            drafter,
            fixed_prompt(40),
            gamma=gamma,
            new_tokens=new_tokens,
            sampling=Sampling(temperature=1.0, min_new_tokens=new_tokens),
        )
        assert greedy.tokens == text[:new_tokens]
        assert greedy.finish_reason == sampled.finish_reason == "length"
        for decoded in (greedy, sampled):
            assert len(decoded.tokens) == new_tokens
            assert all(r.accepted <= r.emitted for r in decoded.rounds)
            emitted = 1
            for r in decoded.rounds:
                assert r.drafted <= new_tokens - emitted - 1
                emitted += r.emitted
            assert emitted == new_tokens
