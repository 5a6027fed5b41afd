"""Layers that a model can spare, on tiny models whose useless layers are known."""

import pytest
import torch
from torch import nn

from bdcore.models.drafter import slice_verifier
from bdcore.models.removal import Removal, removals
from tests.conftest import tiny_llama

IDS = torch.randint(0, 128, (3, 16), generator=torch.Generator().manual_seed(5))


def without(model, layers):
    """What a slice of these layers really says on the judged half."""
    drafter = slice_verifier(model, layers, ids=None, rope_theta=None, max_positions=None)
    with torch.inference_mode():
        return drafter.model(IDS, use_cache=False).logits[:, 8:].log_softmax(-1)


def silenced(model, *layers):
    """Layers that add nothing to what comes in."""
    for i in layers:
        nn.init.zeros_(model.model.layers[i].self_attn.o_proj.weight)
        nn.init.zeros_(model.model.layers[i].mlp.down_proj.weight)
    return model


def test_layers_that_add_nothing_go_first_and_cost_nothing():
    found = list(removals(silenced(tiny_llama(layers=5), 1, 3), IDS))
    assert [r.layer for r in found[:2]] == [1, 3]
    assert [r.divergence for r in found[:2]] == pytest.approx([0, 0], abs=1e-6)
    assert len(found) == 4 and found[2].divergence > 0.01


def test_divergence_is_that_of_the_slice_and_the_removal_is_the_best_there_is():
    model = tiny_llama(layers=5)
    whole, kept = without(model, range(5)), [0, 1, 2, 3, 4]
    for found in removals(model, IDS):
        costs = {}
        for i in kept:
            rest = without(model, [k for k in kept if k != i])
            costs[i] = float((whole.exp() * (whole - rest)).sum(-1).mean())
        assert found.layer == min(costs, key=costs.__getitem__)
        assert found.divergence == pytest.approx(costs[found.layer], rel=1e-3)
        kept.remove(found.layer)
    assert len(kept) == 1


def test_goes_on_where_it_stopped():
    model = tiny_llama(layers=6)
    whole = list(removals(model, IDS))
    assert list(removals(model, IDS, done=[r.layer for r in whole[:2]])) == whole[2:]


def test_the_model_is_whole_between_removals_and_after_an_error():
    model = tiny_llama(layers=4)
    layers = list(model.model.layers)
    for found in removals(model, IDS):
        assert isinstance(found, Removal) and list(model.model.layers) == layers
    with pytest.raises(IndexError):
        next(removals(model, torch.full((1, 4), 999)))
    assert list(model.model.layers) == layers
