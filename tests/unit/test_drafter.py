"""Slicing a drafter from its verifier, pruning its head, and the folder it is kept in."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bdcore.models.drafter import Drafter, load_drafter, most_frequent, prune, read_facts, save_drafter, slice_verifier
from tests.conftest import noisy_copy, tiny_llama

IDS = torch.tensor([5, 9, 17, 40, 41, 77, 100, 126])


class NoTokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def sliced(verifier, layers=(0, 1), ids=None, **changes):
    return slice_verifier(verifier, list(layers), ids=ids, **{"rope_theta": None, "max_positions": None, **changes})


def logits(drafter, ids):
    with torch.inference_mode():
        return drafter.model(ids, use_cache=False).logits


def saved(drafter, folder, **facts):
    save_drafter(drafter, folder, tokenizer=NoTokenizer(), facts=facts)
    return str(folder)


def loaded(folder, vocab=128):
    return load_drafter(folder, verifier_vocab=vocab, dtype=torch.float32, device="cpu")


@pytest.fixture
def texts():
    return torch.randint(0, 128, (16, 24), generator=torch.Generator().manual_seed(3))


# --- slicing


def test_a_slice_of_every_layer_is_the_verifier(verifier, texts):
    drafter = sliced(verifier)
    with torch.inference_mode():
        assert torch.equal(logits(drafter, texts), verifier(texts, use_cache=False).logits)


def test_a_slice_takes_the_named_layers_in_their_order():
    verifier = tiny_llama(layers=5)
    drafter = sliced(verifier, [0, 3, 4])
    assert drafter.model.config.num_hidden_layers == 3
    for mine, theirs in zip(drafter.model.model.layers, (0, 3, 4), strict=True):
        for name, weight in verifier.model.layers[theirs].state_dict().items():
            assert torch.equal(mine.state_dict()[name], weight)
    assert [layer.self_attn.layer_idx for layer in drafter.model.model.layers] == [0, 1, 2]


def test_training_a_slice_leaves_its_verifier_as_it_was(verifier):
    before = [p.clone() for p in verifier.parameters()]
    for parameter in sliced(verifier, ids=IDS).model.parameters():
        parameter.data.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, verifier.parameters(), strict=True))


def test_a_slice_of_a_half_precision_verifier_is_fp32():
    drafter = sliced(tiny_llama().bfloat16(), ids=IDS)
    assert {p.dtype for p in drafter.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("layers", [[0, 2], [-1, 0]])
def test_layers_that_the_verifier_does_not_have_are_refused(verifier, layers):
    with pytest.raises(ValueError, match=r"the verifier has layers 0\.\.1"):
        sliced(verifier, layers)


def test_positions_and_rope_base_are_as_configured_and_else_the_verifiers(verifier):
    assert sliced(verifier).model.config.rope_parameters == verifier.config.rope_parameters
    changed = sliced(verifier, rope_theta=500.0, max_positions=64)
    assert changed.model.config.rope_parameters["rope_theta"] == 500.0
    assert changed.model.config.max_position_embeddings == 64
    expected = 500.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(changed.model.model.rotary_emb.inv_freq, expected)
    assert verifier.config.max_position_embeddings == 512


def test_rope_fields_of_a_yarn_verifier_survive_slicing():
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    verifier = tiny_llama(rope_parameters=yarn)
    drafter = sliced(verifier, [0])
    assert drafter.model.config.rope_parameters == verifier.config.rope_parameters
    assert torch.equal(drafter.model.model.rotary_emb.inv_freq, verifier.model.rotary_emb.inv_freq)
    assert drafter.model.model.rotary_emb.attention_scaling == verifier.model.rotary_emb.attention_scaling != 1.0


# --- the head


def test_the_most_frequent_ids_come_back_ascending_and_ties_go_to_the_lower_id():
    assert most_frequent(torch.tensor([3, 9, 0, 3, 7, 3]), 4).tolist() == [0, 1, 3, 4]


def test_a_pruned_head_computes_the_kept_rows_and_drafts_verifier_ids(verifier, texts):
    full, pruned = sliced(verifier), sliced(verifier, ids=IDS)
    # The widths of the two products differ, so their sums may round differently.
    torch.testing.assert_close(logits(pruned, texts), logits(full, texts)[..., IDS], atol=1e-5, rtol=0)
    drafted = pruned.to_ids(logits(pruned, texts).argmax(-1))
    assert set(drafted.flatten().tolist()) <= set(IDS.tolist())
    assert torch.equal(drafted, IDS[logits(full, texts)[..., IDS].argmax(-1)])


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_drafter_keeps_the_most_frequent_of_the_ids_it_has(texts, tmp_path, tied):
    """Of 140 rows 12 are padding, however often they would occur."""
    tiny_llama(vocab=140, tie_word_embeddings=tied).save_pretrained(tmp_path / "hub")
    full = loaded(str(tmp_path / "hub"))
    before, embedding = logits(full, texts), full.model.model.embed_tokens.weight.detach().clone()
    counts = torch.zeros(128, dtype=torch.long)
    counts[IDS] = 5
    pruned = prune(full, counts, len(IDS))
    assert pruned.ids.tolist() == IDS.tolist()
    torch.testing.assert_close(logits(pruned, texts), before[..., IDS], atol=1e-5, rtol=0)
    counts[IDS[:3]] = 6
    again = loaded(saved(prune(pruned, counts, 3), tmp_path / "small"))
    assert again.ids.tolist() == IDS[:3].tolist() and torch.equal(again.model.model.embed_tokens.weight, embedding)
    torch.testing.assert_close(logits(again, texts), before[..., IDS[:3]], atol=1e-5, rtol=0)


def test_a_head_without_more_ids_than_to_keep_is_left_alone():
    drafter = Drafter(tiny_llama(tie_word_embeddings=True), None)
    assert prune(drafter, torch.ones(128), 128) is drafter
    assert drafter.model.lm_head.weight is drafter.model.model.embed_tokens.weight


def test_an_unpruned_head_drafts_its_own_ids(verifier):
    assert sliced(verifier).to_ids(torch.tensor([3, 4])).tolist() == [3, 4]


# --- the folder


@pytest.mark.parametrize("ids", [None, IDS])
def test_a_saved_and_loaded_drafter_gives_bit_equal_logits(verifier, texts, tmp_path, ids):
    drafter = sliced(noisy_copy(verifier), ids=ids)
    again = loaded(saved(drafter, tmp_path, stage="base"))
    assert torch.equal(logits(again, texts), logits(drafter, texts))
    outputs = torch.arange(8)
    assert torch.equal(again.to_ids(outputs), drafter.to_ids(outputs))


def test_saving_leaves_the_drafter_as_it_was(verifier, texts, tmp_path):
    drafter = sliced(verifier, ids=IDS)
    before = logits(drafter, texts)
    saved(drafter, tmp_path)
    assert drafter.model.lm_head.out_features == 8
    assert torch.equal(logits(drafter, texts), before)


@pytest.mark.parametrize("ids", [None, IDS, IDS[:2]])
def test_the_plain_checkpoint_drafts_the_same_greedy_ids(verifier, texts, tmp_path, ids):
    drafter = sliced(noisy_copy(verifier), ids=ids)
    plain = AutoModelForCausalLM.from_pretrained(saved(drafter, tmp_path), dtype=torch.float32)
    assert plain.lm_head.out_features == 128
    with torch.inference_mode():
        theirs = plain(texts, use_cache=False).logits.argmax(-1)
    ours = drafter.to_ids(logits(drafter, texts).argmax(-1))
    if ids is not None:
        assert len(ours.unique()) == len(ids), "every kept id must be drafted somewhere, or the test shows little"
    assert torch.equal(theirs, ours)


def test_facts_are_written_beside_the_heads_ids(verifier, tmp_path):
    folder = saved(sliced(verifier, ids=IDS), tmp_path, stage="trained", layers=[0, 1])
    assert read_facts(folder) == {"stage": "trained", "layers": [0, 1], "head_ids": IDS.tolist()}
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 128
    assert (tmp_path / "tokenizer.json").is_file()


def test_a_model_that_is_not_ours_has_no_facts(tmp_path):
    assert read_facts(str(tmp_path)) == {}


def test_a_drafter_of_a_tied_verifier_is_saved_and_loaded_with_a_head_of_its_own(texts, tmp_path):
    verifier = tiny_llama(tie_word_embeddings=True)
    assert verifier.lm_head.weight is verifier.model.embed_tokens.weight
    drafter = sliced(verifier, ids=IDS)
    with torch.no_grad():
        drafter.model.lm_head.weight.mul_(1.5)
    again = loaded(saved(drafter, tmp_path))
    assert torch.equal(logits(again, texts), logits(drafter, texts))
    assert torch.equal(again.model.model.embed_tokens.weight, verifier.model.embed_tokens.weight)


def test_a_tied_model_stays_tied_when_it_is_saved_and_loaded(texts, tmp_path):
    drafter = Drafter(tiny_llama(tie_word_embeddings=True), None)
    again = loaded(saved(drafter, tmp_path))
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert torch.equal(logits(again, texts), logits(drafter, texts))


def test_padding_rows_of_a_longer_drafter_head_are_never_drafted(texts, tmp_path):
    model = tiny_llama(vocab=140)
    model.save_pretrained(tmp_path)
    drafter = loaded(str(tmp_path))
    assert drafter.model.lm_head.out_features == 128
    assert int(drafter.to_ids(logits(drafter, texts).argmax(-1)).max()) < 128


def test_a_tied_longer_drafter_keeps_its_trained_head_when_saved(texts, tmp_path):
    """Cutting padding rows unties the head; training then moves it away from the embedding."""
    tiny_llama(vocab=140, tie_word_embeddings=True).save_pretrained(tmp_path / "hub")
    drafter = loaded(str(tmp_path / "hub"))
    with torch.no_grad():
        drafter.model.lm_head.weight.add_(0.1 * torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
    again = loaded(saved(drafter, tmp_path / "trained"))
    assert torch.equal(logits(again, texts), logits(drafter, texts))


def test_a_pruned_head_is_trainable_and_owns_its_rows(verifier):
    head = sliced(verifier, ids=IDS).model.lm_head
    assert isinstance(head, nn.Linear)
    assert isinstance(head.weight, nn.Parameter)
    assert head.weight.requires_grad
    assert head.weight.shape == (8, 64)
    assert torch.equal(head.weight.detach(), verifier.lm_head.weight[IDS])


@pytest.mark.parametrize("outputs", [5, 9])
def test_logits_of_a_smaller_or_pruned_head_stand_at_their_ids_and_nowhere_else(outputs):
    logits = torch.arange(float(outputs)).repeat(2, 1)
    ids = torch.tensor(range(1, 2 * outputs, 2))
    for drafter, at in ((Drafter(None, ids), ids), (Drafter(None, None), torch.arange(outputs))):
        spread = drafter.spread(logits, 20)
        assert spread.shape == (2, 20)
        assert torch.equal(spread[:, at], logits)
        assert torch.isinf(spread).sum() == 2 * (20 - outputs)
    assert Drafter(None, None).spread(logits, outputs) is logits
