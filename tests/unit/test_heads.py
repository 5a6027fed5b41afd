"""Copying scores of layers whose heads are made by hand, and the slice chosen from scores."""

from types import SimpleNamespace

import pytest
import torch

from bdcore.models.heads import LayerScore, choose_layers, layer_scores
from tests.conftest import tiny_llama

LENGTH = 16


class ScriptedHeads:
    """A model whose heads attend where they are told: one list of heads per layer, each a function query -> key."""

    device = torch.device("cpu")

    def __init__(self, *layers):
        self.layers = layers
        self.config = SimpleNamespace(num_hidden_layers=len(layers), vocab_size=128, model_type="llama")
        attention = SimpleNamespace(self_attn=SimpleNamespace(scaling=1.0))
        rotary = SimpleNamespace(inv_freq=torch.ones(1))
        self.model = SimpleNamespace(layers=[attention] * len(layers), rotary_emb=rotary)

    def __call__(self, ids, *, cache, observer, **_):
        B, T = ids.shape
        assert torch.equal(ids[:, :LENGTH], ids[:, LENGTH:]), "the sequence is repeated"
        keys = torch.eye(T).expand(B, 1, T, T)
        for i, heads in enumerate(self.layers):
            queries = torch.stack([100.0 * torch.eye(T)[[head(q) for q in range(T)]] for head in heads])
            cache.layers[i].update(keys, keys)
            observer.observe(i, queries.expand(B, -1, -1, -1))


def before(q):
    return max(q - 1, 0)


def after_last_occurrence(q):
    return q - LENGTH + 1 if q >= LENGTH else 0


def itself(q):
    return q


def test_each_layer_is_scored_by_its_best_head():
    scores = layer_scores(ScriptedHeads([itself, before], [after_last_occurrence, itself]), seed=0, length=LENGTH)
    assert [s.layer for s in scores] == [0, 1]
    assert scores[0].previous_token == pytest.approx(1.0, abs=1e-5)
    assert scores[0].induction == pytest.approx(0.0, abs=1e-5)
    assert scores[1].induction == pytest.approx(1.0, abs=1e-5)


def test_induction_counts_the_second_half_only():
    def copies_the_first_half_of_the_repeat(q):
        return q - LENGTH + 1 if LENGTH <= q < LENGTH + LENGTH // 2 else q

    def sink(q):
        return 0

    scores = layer_scores(ScriptedHeads([copies_the_first_half_of_the_repeat], [sink]), seed=0, length=LENGTH)
    assert scores[0].induction == pytest.approx(0.5, abs=1e-5)
    assert scores[1].induction == pytest.approx(0.0, abs=1e-5)


def test_scores_of_a_real_model_are_the_means_of_its_eager_attention():
    scores = layer_scores(tiny_llama(), seed=5, length=12, batch=3)
    half = torch.randint(0, 128, (3, 12), generator=torch.Generator().manual_seed(5))
    eager = tiny_llama()
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = eager(torch.cat([half, half], 1), use_cache=False, output_attentions=True).attentions
    for score, weights in zip(scores, attentions, strict=True):
        previous = torch.stack([weights[:, :, q, q - 1] for q in range(1, 24)]).mean((0, 1)).max()
        induction = torch.stack([weights[:, :, q, q - 11] for q in range(12, 24)]).mean((0, 1)).max()
        assert score.previous_token == pytest.approx(float(previous), abs=1e-5)
        assert score.induction == pytest.approx(float(induction), abs=1e-5)


# --- the slice


def thirty_layers():
    """Copying scores like those measured on a 30-layer verifier."""
    induction = {17: 0.82, 18: 0.93, 20: 0.45, 23: 0.56}
    previous = {1: 0.61, 2: 0.72, 11: 0.97, 16: 0.85}
    return [LayerScore(i, previous.get(i, 0.05), induction.get(i, 0.02)) for i in range(30)]


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [
        (2, [0, 29]),
        (3, [0, 18, 29]),
        (4, [0, 11, 18, 29]),
        (5, [0, 11, 17, 18, 29]),
        (6, [0, 11, 16, 17, 18, 29]),
        (8, [0, 2, 11, 16, 17, 18, 23, 29]),
        (10, [0, 1, 2, 11, 16, 17, 18, 20, 23, 29]),
        (30, list(range(30))),
    ],
)
def test_the_slice_has_the_ends_the_best_copying_layers_and_the_best_layers_that_feed_them(num_layers, layers):
    assert choose_layers(thirty_layers(), num_layers) == layers


def test_a_previous_token_layer_above_the_copying_ones_does_not_feed_them():
    scores = [LayerScore(0, 0.1, 0), LayerScore(1, 0.3, 0), LayerScore(2, 0.1, 0.9), LayerScore(3, 0.99, 0),
              LayerScore(4, 0.1, 0)]  # fmt: skip
    assert choose_layers(scores, 4) == [0, 1, 2, 4]


@pytest.mark.parametrize("num_layers", [1, 31])
def test_a_slice_of_one_layer_or_of_more_than_there_are_is_refused(num_layers):
    with pytest.raises(ValueError, match=f"drafter.num_layers = {num_layers}: the verifier has 30 layers"):
        choose_layers(thirty_layers(), num_layers)


@pytest.mark.parametrize("num_layers", range(2, 31))
def test_a_slice_has_as_many_layers_as_asked_each_once(num_layers):
    layers = choose_layers(thirty_layers(), num_layers)
    assert len(layers) == len(set(layers)) == num_layers
    assert layers == sorted(layers)
