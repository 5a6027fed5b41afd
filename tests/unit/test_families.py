"""Every family as a tiny random model: its own plain greedy text, its own attention weights, its own layers.

Legend: Q query heads, H KV heads, T tokens of a block, S keys in reach, D head dim.
"""

import copy
import json
import tempfile
from functools import cache, partial

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from bdcore.config import ConfigError
from bdcore.decoding.decoder import decode, decode_batch, prefill
from bdcore.kv.budget import FULL, Selection
from bdcore.kv.selection import select, window_mass
from bdcore.models.drafter import Drafter, load_drafter, save_drafter, slice_verifier
from bdcore.models.loading import FAMILIES, check_model, load_model
from bdcore.models.shape import from_config
from bdcore.models.stepper import CachePlan, Stepper, feed_together
from bdcore.training.views import Block, Sight, extend, sparse
from tests.conftest import noisy_copy
from tests.unit.reference import Survivors

NEVER = frozenset()
WINDOW = 20
"""Sliding window in tokens: less than any prompt here, more than the keys that are always kept."""
LAYERS = 4
MODES = ["absolute", "in_cache"]

# Each gives layers 1 and 2, of which drafters are sliced, kinds that the family would not give them by itself.
CONFIGS = {
    "llama": LlamaConfig,
    "mistral": partial(MistralConfig, sliding_window=WINDOW, head_dim=16),
    "qwen2": Qwen2Config,
    "qwen2_sliding": partial(Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": partial(Qwen3Config, head_dim=32),
    "qwen3_sliding": partial(
        Qwen3Config, head_dim=32, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "gemma2": partial(
        Gemma2Config,
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": partial(
        Gemma3TextConfig,
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,  # a field that the family has and does not apply
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}
NAMES = list(CONFIGS)
WINDOWED = ["mistral", "qwen2_sliding", "qwen3_sliding", "gemma2", "gemma3_text"]
HEAD_DIM = {"llama": 16, "mistral": 16, "qwen2": 16, "qwen2_sliding": 16}


def config_of(name, **changes):
    return CONFIGS[name](
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
        **changes,
    )


@cache
def model_of(name):
    """A checkpoint of the family with nothing at its neutral value, loaded as a study loads it."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter += 0.2 * torch.randn(parameter.shape)
        if name.startswith("gemma"):  # a tied embedding that is read times 8 only says its own token again
            model.model.embed_tokens.weight *= 0.1
            model.model.norm.weight += 4.0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        check_model("verifier.source", folder)
        return load_model(folder, dtype=torch.float32, device="cpu")


@cache
def plain(name):
    """The same model with the library's own eager attention."""
    model = copy.deepcopy(model_of(name))
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


@cache
def tokens(length, seed=0):
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(100 * length + seed)).tolist()


@torch.no_grad()
def eager_logits(name, ids):
    return plain(name)(torch.tensor([ids]), use_cache=False).logits[0]


def assert_logits(mine, expected):
    """Equal but for rounding: within 1e-5 of the size of the logits."""
    torch.testing.assert_close(mine, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@cache
def greedy_text(name, length, new_tokens, seed=0):
    """By cache-free forwards of the library's own attention."""
    ids = list(tokens(length, seed))
    for _ in range(new_tokens):
        ids.append(int(eager_logits(name, ids)[-1].argmax()))
    return ids[length:]


def window_of(config, layer):
    """By the config alone; more than any distance where the layer has none."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral":
        kinds = ["sliding_attention"] * config.num_hidden_layers
    return config.sliding_window if kinds and kinds[layer] == "sliding_attention" else 10_000


# --- the reference: the model's own modules over keys that every read rotates anew, without a cache object


def _unturned(x, position_ids, layer_type=None):
    zeros = torch.zeros(1, position_ids.shape[1], 1)
    return zeros + 1, zeros


def _explicit(module, query, key, value, attention_mask, *, scaling, reference, softcap=None, **_):
    assert attention_mask is None
    out_QTD = reference.attend(module.layer_idx, query[0], key[0], value[0], scaling, softcap)
    return out_QTD.transpose(0, 1)[None], None


AttentionInterface.register("explicit", _explicit)


class Explicit:
    """Feed it blocks and the tokens each layer and KV head still keeps; positions and masks are spelled out."""

    def __init__(self, model, mode="absolute"):
        self.model, self.mode, self.store, self.weights = copy.deepcopy(model), mode, {}, {}
        config, rotary = self.model.config, self.model.model.rotary_emb
        kinds = config.layer_types if config.model_type == "gemma3_text" else [None] * config.num_hidden_layers
        at = torch.arange(config.max_position_embeddings)[None]
        with torch.no_grad():
            self.turns = [rotary(torch.zeros(1), at, *([kind] if kind else [])) for kind in kinds]
        rotary.forward = _unturned
        self.model.set_attn_implementation("explicit")

    @torch.no_grad()
    def feed(self, ids, kept=None):
        """Logits (T, V); `kept[layer]` is (H, K), all tokens so far when None."""
        self.kept = kept
        return self.model(torch.tensor([ids]), use_cache=False, reference=self).logits[0]

    def turned(self, layer, x_SD, at_S):
        cos, sin = self.turns[layer]
        first, second = x_SD.chunk(2, -1)
        return x_SD * cos[0, at_S] + torch.cat([-second, first], -1) * sin[0, at_S]

    def attend(self, layer, q_QTD, k_HTD, v_HTD, scale, softcap):
        past = self.store.get(layer, (k_HTD[:, :0], v_HTD[:, :0]))
        keys, values = self.store[layer] = tuple(torch.cat(pair, 1) for pair in zip(past, (k_HTD, v_HTD), strict=True))
        T, seen, group = q_QTD.shape[1], past[0].shape[1], len(q_QTD) // len(k_HTD)
        out, weights = [], []
        for j, q_TD in enumerate(q_QTD):
            h = j // group
            kept = torch.arange(seen) if self.kept is None else self.kept[layer][h]
            reach = torch.cat([kept, torch.arange(seen, seen + T)])
            place = reach if self.mode == "absolute" else torch.arange(len(reach))
            key_SD = self.turned(layer, keys[h][reach], place)
            logits = self.turned(layer, q_TD, place[-T:]) @ key_SD.T * scale
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            distance = place[-T:, None] - place[None]
            hidden = (distance < 0) | (distance >= window_of(self.model.config, layer))
            weights.append(logits.masked_fill(hidden, float("-inf")).softmax(-1))
            out.append(weights[-1] @ values[h][reach])
        self.weights[layer] = torch.stack(weights)
        return torch.stack(out)


def walk(model, plan, pieces):
    """(stepper, logits of each piece, tokens each layer and head still cached before each piece)."""
    stepper = Stepper(model, plan)
    survivors, logits, kept = Survivors(stepper), [], []
    for piece in pieces:
        stepper.fit(len(piece))
        kept.append(list(survivors.alive))
        survivors.fed(stepper.logical, len(piece))
        logits.append(stepper.feed(piece)[0])
    return stepper, logits, kept


def sparse_plan(policy="attention_mass", mode="absolute", budget=32, window=4):
    return CachePlan(0, budget, Selection(policy, chunk=4, sinks=4, recent=4, window=window), mode, 5, prefill_chunk=8)


def pieces_of(ids, block=5):
    before = ids[:-block]
    return [*(before[i : i + 8] for i in range(0, len(before), 8)), ids[-block:]]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_model_itself_while_nothing_is_dropped(name):
    ids = tokens(60)
    reference = Explicit(model_of(name))
    mine = torch.cat([reference.feed(ids[:33]), reference.feed(ids[33:])])
    assert_logits(mine, eager_logits(name, ids))


def test_every_supported_family_is_here():
    assert {config_of(name).model_type for name in NAMES} == set(FAMILIES)
    for name in NAMES:
        reach = [window_of(config_of(name), i) for i in range(LAYERS)]
        assert (WINDOW in reach) == (name in WINDOWED)


# --- plain greedy text


@pytest.mark.parametrize("name", NAMES)
def test_the_verifier_alone_gives_its_plain_greedy_text(name):
    expected = greedy_text(name, 40, 24)
    assert len(set(expected)) > 8, "constant text would show little"
    start = prefill(model_of(name), tokens(40), new_tokens=24, gamma=0, chunk=16)
    assert decode(start, None, new_tokens=24, eos=NEVER).tokens == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_librarys_own_generate_gives_the_same_text(name):
    out = plain(name).generate(torch.tensor([tokens(40)]), max_new_tokens=24, do_sample=False)
    assert out[0, 40:].tolist() == greedy_text(name, 40, 24)


def noisy_drafter(name):
    return Drafter(noisy_copy(model_of(name), scale=0.005), None)


def speculate(name, drafter, plan, length=40, new_tokens=24):
    start = prefill(model_of(name), tokens(length), new_tokens=new_tokens, gamma=4, chunk=16, observe=4)
    return decode(start, drafter, plan, gamma=4, new_tokens=new_tokens, eos=NEVER)


def counts(decoded):
    return sum(r.accepted for r in decoded.rounds), sum(r.drafted for r in decoded.rounds)


@pytest.mark.parametrize("name", NAMES)
def test_speculation_with_a_full_drafter_gives_the_plain_greedy_text(name):
    decoded = speculate(name, noisy_drafter(name), CachePlan(0, FULL, prefill_chunk=16))
    assert decoded.tokens == greedy_text(name, 40, 24)
    accepted, drafted = counts(decoded)
    assert 0 < accepted < drafted, "the drafter must be right and wrong, or the test shows little"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_speculation_with_a_sparse_drafter_gives_the_plain_greedy_text(name, mode):
    drafter = noisy_drafter(name)
    for policy in ("attention_mass", "last_key", "oracle"):
        decoded = speculate(name, drafter, sparse_plan(policy, mode), new_tokens=8)
        assert decoded.tokens == greedy_text(name, 40, 24)[:8], policy
        assert 32 < decoded.drafter_cached_peak <= 32 + 5


@pytest.mark.parametrize("name", NAMES)
def test_every_draft_of_a_twin_with_a_full_cache_is_accepted(name):
    accepted, drafted = counts(speculate(name, Drafter(model_of(name), None), CachePlan(0, FULL, prefill_chunk=16)))
    assert accepted == drafted > 0


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_different_lengths_decoded_together_give_their_own_texts(name):
    drafter, lengths = noisy_drafter(name), (25, 40, 61)
    batch = [prefill(model_of(name), tokens(n), new_tokens=8, gamma=4, chunk=16) for n in lengths]
    for plan in (CachePlan(0, FULL, prefill_chunk=16), sparse_plan()):
        decoded = decode_batch(batch, drafter, plan, gamma=4, new_tokens=8, eos=NEVER)
        assert [d.tokens for d in decoded] == [greedy_text(name, n, 8) for n in lengths]


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_reading_chosen_keys_of_all_gives_the_logits_of_a_cache_that_dropped_the_others(name):
    ids, block = tokens(70), [5, 6, 7]
    retrieving = Stepper(model_of(name), sparse_plan("retrieval").sized(100))
    dropping = Stepper(model_of(name), sparse_plan(budget=100))  # nothing is dropped before `keep`
    for stepper in (retrieving, dropping):
        stepper.prefill(ids)
        stepper.fit()
    for mine, other in zip(retrieving.cache.layers, dropping.cache.layers, strict=True):
        assert mine.read.physical <= 32 < mine.physical == 70
        other.keep(mine.read.tokens[None], None)
    assert_logits(retrieving.feed(block)[0], dropping.feed(block)[0])
    retrieving.rollback(2)
    dropping.rollback(2)
    assert_logits(retrieving.feed([9])[0], dropping.feed([9])[0])


@pytest.mark.parametrize("name", NAMES)
def test_sparse_caches_fed_together_give_the_logits_of_each_alone(name):
    plan, prompts, blocks = sparse_plan("random"), [tokens(64), tokens(90)], [[5, 6, 7], [8, 9, 10, 11, 12]]

    def ready():
        steppers = [Stepper(model_of(name), plan) for _ in prompts]
        for stepper, ids in zip(steppers, prompts, strict=True):
            stepper.prefill(ids)
        return steppers

    together = feed_together(ready(), blocks)
    for stepper, block, mine in zip(ready(), blocks, together, strict=True):
        assert_logits(mine, stepper.feed(block)[0])


# --- logits and caches


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_pieces_and_a_block_to_verify_give_the_logits_of_one_forward(name):
    ids = tokens(62)
    stepper = Stepper(model_of(name), CachePlan(capacity=64, block=16, prefill_chunk=16))
    pieces = [stepper.feed(piece)[0] for piece in (ids[:16], ids[16:32], ids[32:48], ids[48:56], [ids[56]])]
    block = stepper.feed(ids[57:])[0]
    assert_logits(torch.cat([*pieces, block]), eager_logits(name, ids))


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_rejected_tokens_are_those_of_the_text_without_them(name):
    ids = tokens(62)
    stepper = Stepper(model_of(name), CachePlan(capacity=80, block=5, prefill_chunk=16))
    stepper.prefill(ids[:57])
    stepper.feed([5, 6, 7, 8, 9])
    stepper.rollback(5)
    assert_logits(stepper.feed(ids[57:])[0], eager_logits(name, ids)[57:])


@pytest.mark.parametrize("name", NAMES)
def test_caches_hold_kv_heads_of_the_familys_own_size(name):
    size = HEAD_DIM.get(name, 32)
    shape = from_config(model_of(name).config)
    assert (shape.query_heads, shape.kv_heads, shape.head_dim) == (4, 2, size)
    full, few = Stepper(model_of(name), CachePlan(capacity=64)), Stepper(model_of(name), sparse_plan())
    for stepper, cached in ((full, 64), (few, 32)):
        stepper.prefill(tokens(64))
        for layer in stepper.cache.layers:
            assert all(tensor.shape == (1, 2, cached, size) for tensor in layer.view())
    assert full.cache.bytes() == shape.kv_bytes(64, 4) == 2 * LAYERS * 2 * 64 * size * 4
    assert few.cache.bytes() == shape.kv_bytes(32 + 5, 4)


@pytest.mark.parametrize("name", NAMES)
def test_the_shape_counts_the_familys_weights(name):
    model = model_of(name)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert from_config(model.config).parameters == weights


@pytest.mark.parametrize("name", NAMES)
def test_the_selectors_scores_are_the_models_own_eager_weights(name):
    ids = tokens(60)
    stepper = Stepper(model_of(name), CachePlan(capacity=64, prefill_chunk=16, observe=6))
    stepper.prefill(ids)
    with torch.no_grad():
        attentions = plain(name)(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    for i, weights_1QTT in enumerate(attentions):
        expected = weights_1QTT[0, :, -6:].view(2, 2, 6, 60).mean((1, 2))
        torch.testing.assert_close(window_mass(stepper.evidence(i))[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_after_keys_were_dropped_the_scores_are_the_weights_on_those_that_are_left(name, mode):
    pieces = pieces_of(tokens(68), block=4)
    stepper, _, kept = walk(model_of(name), sparse_plan(mode=mode), pieces)
    reference = Explicit(model_of(name), mode)
    for piece, alive in zip(pieces, kept, strict=True):
        reference.feed(piece, alive)
    for i in range(LAYERS):
        expected = reference.weights[i].view(2, 2, 4, -1).mean((1, 2))
        assert expected.shape[1] < 68
        torch.testing.assert_close(window_mass(stepper.evidence(i))[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["attention_mass", "random"])
@pytest.mark.parametrize("name", NAMES)
def test_sparse_logits_are_those_of_explicit_positions_under_an_explicit_mask(name, policy, mode):
    pieces = pieces_of(tokens(69))
    _, logits, kept = walk(model_of(name), sparse_plan(policy, mode), pieces)
    reference = Explicit(model_of(name), mode)
    for piece, alive, mine in zip(pieces, kept, logits, strict=True):
        torch.testing.assert_close(mine, reference.feed(piece, alive), atol=1e-4, rtol=0)
    dropped = set(range(64 - WINDOW + 1, 64)) - set(kept[-1][1][0].tolist())
    assert policy != "random" or dropped, "keys must be dropped inside the window, or index and position agree"


# --- drafters sliced from a family


def muted(name, layers):
    """The verifier with every other layer adding nothing, in the library's eager attention."""
    model = copy.deepcopy(plain(name))
    for i, layer in enumerate(model.model.layers):
        if i not in layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def sliced(name, layers, **changes):
    return slice_verifier(
        model_of(name), list(layers), ids=None, **{"rope_theta": None, "max_positions": None, **changes}
    )


class NoTokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def saved_and_loaded(drafter, folder):
    save_drafter(drafter, folder, tokenizer=NoTokenizer(), facts={})
    return load_drafter(str(folder), verifier_vocab=128, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("layers", [(1, 2), (0, 3), (2,)])
@pytest.mark.parametrize("name", NAMES)
def test_a_slice_computes_what_its_layers_compute_in_the_verifier(name, layers, tmp_path):
    ids = tokens(60)
    drafter = sliced(name, layers)
    with torch.no_grad():
        expected = muted(name, layers)(torch.tensor([ids]), use_cache=False).logits[0]
    for model in (drafter.model, saved_and_loaded(drafter, tmp_path).model):
        stepper = Stepper(model, CachePlan(capacity=64, block=60))
        assert_logits(stepper.feed(ids)[0], expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_saves_the_fields_of_its_layers_and_keeps_the_others(name, tmp_path):
    saved_and_loaded(sliced(name, (1, 2)), tmp_path)
    mine, theirs = json.loads((tmp_path / "config.json").read_text()), model_of(name).config.to_dict()
    if theirs.get("layer_types"):
        assert mine["layer_types"] == theirs["layer_types"][1:3]
    same = {"sliding_window", "rope_parameters", "head_dim", "query_pre_attn_scalar", "num_key_value_heads"}
    same |= {"attn_logit_softcapping", "final_logit_softcapping", "use_sliding_window", "max_position_embeddings"}
    for field in same & set(theirs):
        assert mine[field] == theirs[field], field


@pytest.mark.parametrize("name", NAMES)
def test_another_rope_base_of_a_slice_reaches_every_layer(name, tmp_path):
    drafter = saved_and_loaded(sliced(name, (1, 2), rope_theta=500.0), tmp_path)
    size = HEAD_DIM.get(name, 32)
    expected = 500.0 ** (-torch.arange(0, size, 2) / size)
    found = [facts.inv_freq for facts in Stepper(drafter.model, CachePlan(capacity=8)).layers]
    factors = [1.0, 4.0] if name == "gemma3_text" else [1.0, 1.0]
    for inv_freq, factor in zip(found, factors, strict=True):
        torch.testing.assert_close(inv_freq, expected / factor)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WINDOWED)
def test_a_sparse_slice_drafts_for_its_verifier_without_changing_the_text(name, mode):
    decoded = speculate(name, sliced(name, (1, 2)), sparse_plan(mode=mode))
    assert decoded.tokens == greedy_text(name, 40, 24)


# --- training views


def head(model, hidden):
    logits, cap = model.lm_head(hidden), getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def kept_tokens(full_HPD, few_HKD):
    """Which rows are left, per head, when no token occurs twice: (H, K)."""
    return (few_HKD[:, :, None] == full_HPD[:, None]).all(-1).int().argmax(2)


def chosen(name, ids):
    """What decoding would keep of a prefix it has read in full: (H, K) per layer."""
    stepper, rule = Stepper(model_of(name), CachePlan(capacity=64, block=48, observe=4)), sparse_plan().selection
    stepper.feed(ids)
    return [select(stepper.evidence(i), budget=24, selection=rule.for_layer(i))[0] for i in range(LAYERS)]


def sparse_view(model, view, *blocks):
    """Views of blocks given as (start, budget, position mode)."""
    rule = sparse_plan().selection
    made = [Block(start, Sight(rule.policy, budget, mode)) for start, budget, mode in blocks]
    return sparse(view, made, rule=lambda _: rule, window=rule.window, model=model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_training_view_of_two_rows_is_what_each_computes_from_its_kept_keys(name, mode):
    generator = torch.Generator().manual_seed(5)
    model, rows = model_of(name), [(torch.randperm(125, generator=generator)[:56] + 3).tolist() for _ in range(2)]
    ids_BT = torch.tensor(rows)
    prefix, view = extend(model, ids_BT[:, :48])
    seen = sparse_view(model, view, (48, 24, mode))
    after_full, after_few = (head(model, extend(model, ids_BT[:, 48:], view=v)[0]) for v in (view, seen))
    for row, ids in enumerate(rows):
        whole = torch.cat([head(model, prefix), after_full], 1)[row]
        assert_logits(whole, eager_logits(name, ids))
        pairs = zip(view.layers, seen.layers, strict=True)
        kept = [kept_tokens(x.values_BHPD[row], y.values_BHPD[row]) for x, y in pairs]
        assert any(not torch.equal(*heads) for heads in kept), "heads must keep sets of their own"
        assert all(map(torch.equal, kept, chosen(name, ids[:48]))), "training and decoding must keep the same keys"
        reference = Explicit(model, mode)
        reference.feed(ids[:48])
        torch.testing.assert_close(after_few[row], reference.feed(ids[48:], kept), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_a_sparse_view_extended_twice_is_the_view_extended_once(name):
    model, ids_1T = model_of(name), torch.tensor([tokens(56)])
    _, view = extend(model, ids_1T[:, :48])
    seen = sparse_view(model, view, (48, 24, "absolute"))
    once, _ = extend(model, ids_1T[:, 48:], view=seen)
    first, longer = extend(model, ids_1T[:, 48:51], view=seen)
    second, _ = extend(model, ids_1T[:, 51:], view=longer)
    assert_logits(torch.cat([first, second], 1), once)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_views_of_several_places_read_together_are_what_each_is_alone(name):
    """Shorter ones are filled up: filling is seen by no layer, with a sliding window or without."""
    model, ids_1T = model_of(name), torch.tensor([tokens(56)])
    _, view = extend(model, ids_1T)
    blocks = [(12, 24, "absolute"), (48, 24, "absolute"), (40, 16, "in_cache"), (32, 24, "in_cache")]
    hidden, _ = extend(
        model, torch.cat([ids_1T[:, b : b + 8] for b, _, _ in blocks]), view=sparse_view(model, view, *blocks)
    )
    for mine, block in zip(hidden, blocks, strict=True):
        alone, _ = extend(model, ids_1T[:, block[0] : block[0] + 8], view=sparse_view(model, view, block))
        torch.testing.assert_close(mine, alone[0], atol=1e-4, rtol=1e-4)


# --- what is refused, from the config alone


def refused(folder, config, message):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        check_model("verifier.source", str(folder))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"verifier.source = {folder}: ")
    assert [path.name for path in folder.iterdir()] == ["config.json"]


TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
HYBRID = ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba", "num_hidden_layers": 2},
        {"model_type": "jamba", "num_hidden_layers": 2},
        {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 2, "layer_types": HYBRID}},
        {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": HYBRID},
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_family_that_cannot_be_rolled_back_is_refused_by_name_with_those_that_can(config, tmp_path):
    name = config["model_type"]
    refused(tmp_path, config, rf"family '{name}' is not supported .*; supported: {', '.join(FAMILIES)}$")


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_layers_of_another_kind_are_refused_by_name_in_a_supported_family(family, kind, tmp_path):
    config = {**TINY, "model_type": family, "layer_types": [kind, "full_attention"]}
    refused(tmp_path, config, rf"layers of kind \['{kind}'\] are not supported")


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("llama", {"is_causal": False}),
    ],
)
def test_bidirectional_attention_is_refused(family, field, tmp_path):
    refused(tmp_path, {**TINY, "model_type": family, **field}, "bidirectional attention is not supported")


def test_sliding_layers_without_a_window_are_refused(tmp_path):
    config = {**TINY, "model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]}
    refused(tmp_path, config, "'sliding_attention' and no sliding_window")


@pytest.mark.parametrize("field", [{"num_attention_heads": "four"}, {"rope_parameters": {"rope_type": "linear"}}])
def test_a_config_that_the_library_rejects_is_named_in_one_line(field, tmp_path):
    refused(
        tmp_path, {**TINY, "model_type": "llama", **field}, f"config.*{'factor' if 'rope' in str(field) else 'int'}"
    )


def test_a_model_is_refused_before_its_weights_are_read(tmp_path):
    (tmp_path / "model.safetensors").write_text("not weights")
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "gemma2", "is_causal": False}))
    with pytest.raises(ConfigError, match="bidirectional"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")
