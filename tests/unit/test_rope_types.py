"""RoPE types whose frequencies do not change with length: positions, sparse caches and drafters; the others refused."""

import copy
import json
import math

import pytest
import torch

from bdcore.config import ConfigError
from bdcore.decoding.decoder import decode, prefill
from bdcore.kv.budget import Selection
from bdcore.models.drafter import Drafter, load_drafter, save_drafter, slice_verifier
from bdcore.models.loading import ROPE_TYPES, check_model
from bdcore.models.stepper import CachePlan, PositionError, Stepper
from tests.conftest import noisy_copy, tiny_llama
from tests.unit.test_families import Explicit, NoTokenizer, assert_logits, pieces_of, walk

ORIGINAL, POSITIONS = 32, 128
"""Positions before and after the extension by a factor of 4."""
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 4.0,  # of frequencies this few, some are to be kept, some mixed and some divided
        "beta_slow": 0.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
MODES = ["absolute", "in_cache"]


def model_of(kind, **changes):
    return tiny_llama(max_positions=POSITIONS, rope_parameters=copy.deepcopy(ROPES[kind]), **changes)


def plain(model):
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


@torch.no_grad()
def eager_logits(model, ids):
    return plain(model)(torch.tensor([ids]), use_cache=False).logits[0]


def sparse_plan(mode, policy="attention_mass", **changes):
    return CachePlan(
        0, 32, Selection(policy, chunk=4, sinks=4, recent=4, window=4), mode, 5, prefill_chunk=8, **changes
    )


def test_every_supported_type_is_here():
    assert set(ROPES) == set(ROPE_TYPES)


@pytest.mark.parametrize("kind", ROPES)
def test_the_types_differ_where_they_should(kind):
    """Or the tests below would show nothing about the type."""
    rotary, base = model_of(kind).model.rotary_emb, model_of("default").model.rotary_emb.inv_freq
    ratio = base / rotary.inv_freq
    expected = {"default": {1.0}, "linear": {4.0}}.get(kind)
    if expected:
        assert set(ratio.tolist()) == expected
    else:
        assert ratio.min() == 1.0 and ratio.max() == pytest.approx(4.0)
        assert ((ratio > 1.01) & (ratio < 3.99)).any()
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1.0 if kind == "yarn" else 1.0)


@pytest.mark.parametrize("kind", ROPES)
def test_logits_far_beyond_the_original_positions_are_the_models_own(kind, prompt):
    model, ids = model_of(kind), prompt(POSITIONS)
    stepper = Stepper(model, CachePlan(capacity=POSITIONS, block=16, prefill_chunk=16))
    pieces = [stepper.feed(ids[i : i + 16])[0] for i in range(0, 112, 16)]
    pieces += [stepper.feed(ids[112:123])[0], stepper.feed(ids[123:])[0]]
    assert_logits(torch.cat(pieces), eager_logits(model, ids))


@pytest.mark.parametrize("kind", ROPES)
def test_the_reference_is_the_model_itself_while_nothing_is_dropped(kind, prompt):
    model, ids = model_of(kind), prompt(100)
    for mode in MODES:
        reference = Explicit(model, mode)
        mine = torch.cat([reference.feed(ids[:60]), reference.feed(ids[60:])])
        assert_logits(mine, eager_logits(model, ids))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["attention_mass", "random"])
@pytest.mark.parametrize("kind", ROPES)
def test_sparse_logits_are_those_of_keys_rotated_anew_to_explicit_positions(kind, policy, mode, prompt):
    model, pieces = model_of(kind), [*pieces_of(prompt(93)), prompt(1), prompt(4)]
    stepper, logits, kept = walk(model, sparse_plan(mode, policy), pieces)
    assert stepper.logical > ORIGINAL + 32 and stepper.physical <= 32 + 5
    reference = Explicit(model, mode)
    for piece, alive, mine in zip(pieces, kept, logits, strict=True):
        torch.testing.assert_close(mine, reference.feed(piece, alive), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ROPES)
def test_both_modes_are_the_dense_model_while_nothing_is_dropped(kind, prompt):
    model, ids = model_of(kind), prompt(32)
    for mode in MODES:
        logits = Stepper(model, sparse_plan(mode)).prefill(ids)[0]
        assert_logits(logits, eager_logits(model, ids)[-1])


@pytest.mark.parametrize("kind", ROPES)
def test_queries_go_on_at_the_tokens_position_or_behind_the_cached_keys(kind, prompt):
    for mode, first in (("absolute", 100), ("in_cache", 28)):
        stepper = Stepper(model_of(kind), sparse_plan(mode))
        stepper.prefill(prompt(100))
        stepper.fit(4)
        assert stepper.next_positions(3).tolist() == [[first, first + 1, first + 2]]


@pytest.mark.parametrize("kind", ROPES)
def test_speculation_gives_the_plain_greedy_text(kind, prompt):
    model, ids = model_of(kind), prompt(80)
    text = list(ids)
    for _ in range(16):
        text.append(int(eager_logits(model, text)[-1].argmax()))
    assert len(set(text[80:])) > 4, "constant text would show little"
    drafter = Drafter(noisy_copy(model, scale=0.005), None)
    for plan in (CachePlan(0, prefill_chunk=16), *(sparse_plan(mode) for mode in MODES)):
        start = prefill(model, ids, new_tokens=16, gamma=4, chunk=16)
        decoded = decode(start, drafter, plan, gamma=4, new_tokens=16, eos=frozenset())
        assert decoded.tokens == text[80:]


# --- drafters


@pytest.mark.parametrize("kind", ROPES)
def test_a_slice_keeps_the_rope_fields_of_its_verifier_when_saved_and_loaded(kind, tmp_path, prompt):
    """Fewer positions of its own do not change the frequencies it was sliced with."""
    verifier = model_of(kind, layers=3)
    drafter = slice_verifier(verifier, [0, 2], ids=None, rope_theta=None, max_positions=64)
    save_drafter(drafter, tmp_path, tokenizer=NoTokenizer(), facts={})
    loaded = load_drafter(str(tmp_path), verifier_vocab=128, dtype=torch.float32, device="cpu")
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"] == verifier.config.rope_parameters
    for model in (drafter.model, loaded.model):
        assert model.config.rope_parameters == verifier.config.rope_parameters
        assert torch.equal(model.model.rotary_emb.inv_freq, verifier.model.rotary_emb.inv_freq)
        assert model.model.rotary_emb.attention_scaling == verifier.model.rotary_emb.attention_scaling
    short = copy.deepcopy(verifier)
    short.model.layers = torch.nn.ModuleList([short.model.layers[i] for i in (0, 2)])
    short.config.num_hidden_layers = 2
    ids = prompt(60)
    stepper = Stepper(loaded.model, CachePlan(capacity=64, prefill_chunk=16))
    assert_logits(stepper.prefill(ids)[0], eager_logits(short, ids)[-1])


@pytest.mark.parametrize("kind", ROPES)
def test_a_drafter_of_64_positions_refuses_a_prompt_of_100_unless_it_is_told_how(kind, prompt):
    verifier, ids = model_of(kind), prompt(100)
    drafter = slice_verifier(verifier, [0, 1], ids=None, rope_theta=None, max_positions=64).model
    with pytest.raises(PositionError, match=r"beyond the model's 64; use position_mode = in_cache"):
        Stepper(drafter, sparse_plan("absolute")).prefill(ids)
    Stepper(drafter, sparse_plan("in_cache")).prefill(ids)
    Stepper(drafter, sparse_plan("absolute", extrapolate=True)).prefill(ids)


def test_another_base_leaves_the_other_rope_fields_alone():
    drafter = slice_verifier(model_of("yarn"), [0], ids=None, rope_theta=500.0, max_positions=None)
    assert drafter.model.config.rope_parameters == {**ROPES["yarn"], "rope_theta": 500.0}


# --- what is refused, from the config alone

TINY = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32, "factor": 4.0}


def refused(folder, config, message):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        check_model("drafter.source", str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("dynamic", {"factor": 2.0}, "changes its frequencies with length"),
        ("longrope", LONG, "changes its frequencies with length"),
        ("proportional", {}, "is not known to keep its frequencies"),
        ("spiral", {}, "is not known to keep its frequencies"),
    ],
)
def test_a_type_that_may_change_with_length_is_refused_by_name_with_those_that_do_not(kind, fields, reason, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **fields}
    message = rf"drafter\.source = .*: RoPE type '{kind}' {reason}; .*default, linear, yarn or llama3 RoPE$"
    refused(tmp_path, {**TINY, "rope_parameters": rope}, message)


def test_a_type_is_refused_in_the_older_spelling_too(tmp_path):
    refused(tmp_path, {**TINY, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' changes")


@pytest.mark.parametrize("layers", ["full_attention", "sliding_attention"])
def test_a_type_of_one_kind_of_layer_is_enough_to_refuse_the_model(layers, tmp_path):
    ropes = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")}
    ropes[layers] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    refused(tmp_path, {**TINY, "model_type": "gemma3_text", "rope_parameters": ropes}, "RoPE type 'dynamic' changes")


@pytest.mark.parametrize("field", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_a_rotation_of_part_of_the_head_is_refused(field, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **field.get("rope_parameters", {})}
    config = {**TINY, **field, "rope_parameters": rope}
    refused(tmp_path, config, r"partial_rotary_factor = 0\.5 is not supported; .* = 1$")


@pytest.mark.parametrize("kind", ROPES)
def test_a_type_that_keeps_its_frequencies_is_accepted(kind, tmp_path):
    config = {**TINY, "max_position_embeddings": POSITIONS, "rope_parameters": ROPES[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_model("drafter.source", str(tmp_path)).rope_parameters["rope_type"] == kind
