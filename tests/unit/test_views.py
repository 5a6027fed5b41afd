"""Views of one prefix: what a sparse view sees, and that gradients reach its keys as without any cache object."""

import pytest
import torch

from bdcore.kv.selection import Evidence, select
from bdcore.training.losses import IGNORE
from bdcore.training.objective import joint_loss
from bdcore.training.views import View, detached, extend, sparse
from tests.unit.training_helpers import (
    batch_of,
    cross_entropy,
    double_drafter,
    fresh_drafter,
    reference_logits,
    stage,
    token_ids,
    window,
)

PREFIX, TAIL = 32, 8


def tight(**changes):
    """Prefix 16, budget 8, blocks of 4: only the newest key is forced beside one chosen chunk."""
    views = {"chunk": 4, "sinks": 0, "recent": 1, "window": 1, "budgets": {16: 1}} | changes.pop("views", {})
    return stage(prefix_lengths={16: 1}, views=views, **changes)


def sparse_view(model, view, config, budget, seed=0):
    return sparse(
        view,
        budget=budget,
        selection=config.views.selection(seed),
        position_mode=config.views.position_mode,
        model=model,
    )


def prefix_of(model, ids, prefix, config):
    return extend(model, torch.tensor([ids[:prefix]]), window=config.views.window)[1]


def tail_logits(model, ids, prefix, view):
    with torch.no_grad():
        return model.lm_head(extend(model, torch.tensor([ids[prefix:]]), view=view)[0])[0]


@pytest.fixture(scope="module")
def model():
    return fresh_drafter().model


@torch.no_grad()
def test_full_view_extended_equals_one_forward(model):
    ids = token_ids(40)
    view = prefix_of(model, ids, PREFIX, stage())
    whole = reference_logits(model, ids, prefix=PREFIX, config=stage())
    torch.testing.assert_close(tail_logits(model, ids, PREFIX, view), whole[PREFIX:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["attention_mass", "last_key", "sink_recent", "random"])
@pytest.mark.parametrize("mode", ["absolute", "in_cache"])
def test_sparse_view_equals_an_explicit_mask(model, policy, mode):
    config = stage(views={"policy": policy, "position_mode": mode})
    ids = token_ids(40)
    seen = sparse_view(model, prefix_of(model, ids, PREFIX, config), config, 16, seed=3)
    assert seen.cached == 16
    kept = []
    masked = reference_logits(model, ids, prefix=PREFIX, config=config, budget=16, seed=3, kept_out=kept)
    assert all(k.shape == (2, 16) for k in kept)
    torch.testing.assert_close(tail_logits(model, ids, PREFIX, seen), masked[PREFIX:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_kv_heads_of_a_view_keep_sets_of_their_own(model):
    kept = []
    reference_logits(model, token_ids(40), prefix=PREFIX, config=stage(), budget=16, kept_out=kept)
    assert any(not torch.equal(k[0], k[1]) for k in kept)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["absolute", "in_cache"])
@pytest.mark.parametrize("budget", [PREFIX, 4 * PREFIX])
def test_budget_as_large_as_the_prefix_is_the_full_view(model, mode, budget):
    config, ids = stage(views={"position_mode": mode}), token_ids(40)
    view = prefix_of(model, ids, PREFIX, config)
    seen = sparse_view(model, view, config, budget)
    assert (seen.cached, seen.next_position) == (PREFIX, PREFIX)
    full, same = (tail_logits(model, ids, PREFIX, v) for v in (view, seen))
    torch.testing.assert_close(full, same, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_positions_go_on_at_the_prefix_or_at_the_cache(model):
    for mode, position in (("absolute", PREFIX), ("in_cache", 16)):
        config = stage(views={"position_mode": mode})
        view = prefix_of(model, token_ids(40), PREFIX, config)
        assert sparse_view(model, view, config, 16).next_position == position


def tensors(view: View):
    return [t for layer in view.layers for t in (layer.keys_BHPD, layer.values_BHPD, layer.queries_BQWD)]


@torch.no_grad()
@pytest.mark.parametrize("mode", ["absolute", "in_cache"])
def test_extending_a_view_or_making_it_sparse_does_not_change_it(model, mode):
    config, ids = stage(views={"position_mode": mode}), token_ids(40)
    view = prefix_of(model, ids, PREFIX, config)
    before = [t.clone() for t in tensors(view)]
    first = tail_logits(model, ids, PREFIX, view)
    for budget in (16, 24, 16):
        tail_logits(model, ids, PREFIX, sparse_view(model, view, config, budget))
    assert all(map(torch.equal, before, tensors(view)))
    assert torch.equal(first, tail_logits(model, ids, PREFIX, view))


@torch.no_grad()
def test_extension_gives_a_longer_view_and_leaves_the_first_one_short(model):
    view = prefix_of(model, token_ids(40), PREFIX, stage())
    _, longer = extend(model, torch.tensor([token_ids(5)]), view=view)
    assert (longer.cached, longer.next_position, view.cached) == (PREFIX + 5, PREFIX + 5, PREFIX)


@pytest.mark.parametrize("supervise", ["continuation", "all"])
def test_both_losses_of_a_step_are_the_references_and_the_same_when_computed_again(supervise):
    drafter, ids = fresh_drafter(), token_ids(40)
    config, batch = stage(supervise=supervise), batch_of(ids)
    labels = window(ids).labels
    out = joint_loss(drafter, batch, config, prefix=PREFIX, budget=16, seed=5)
    again = joint_loss(drafter, batch, config, prefix=PREFIX, budget=16, seed=5)
    assert torch.equal(out.loss, again.loss) and out.cached == 16
    full = reference_logits(drafter.model, ids, prefix=PREFIX, config=config)
    seen = reference_logits(drafter.model, ids, prefix=PREFIX, config=config, budget=16, seed=5)
    start = 0 if supervise == "all" else PREFIX
    l_a = cross_entropy(full[start:], labels[start:])
    l_c = cross_entropy(seen[PREFIX:], labels[PREFIX:])
    torch.testing.assert_close(out.full.mean(), l_a, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.sparse.mean(), l_c, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.loss, l_a + 0.5 * l_c, atol=1e-4, rtol=1e-4)


def test_full_loss_does_not_depend_on_the_sparse_branch():
    drafter, batch = fresh_drafter(), batch_of(token_ids(40))
    alone = joint_loss(drafter, batch, stage(), prefix=PREFIX, budget=None, seed=0)
    beside = joint_loss(drafter, batch, stage(), prefix=PREFIX, budget=16, seed=0)
    assert alone.sparse is None and torch.equal(alone.full.total, beside.full.total)


def test_prefix_runs_without_gradients_in_the_papers_scheme():
    drafter, ids = fresh_drafter(), token_ids(40)
    batch = batch_of(ids, labels=[[5] * 32 + [IGNORE] * 7 + [9]])
    out = joint_loss(drafter, batch, stage(), prefix=PREFIX, budget=16, seed=0)
    out.loss.backward()
    grad = drafter.model.model.embed_tokens.weight.grad
    assert not grad[[i for i in set(ids[:32]) if i not in ids[32:]]].any() and grad[ids[39]].any()


# Gradients through the kept keys and values, in fp64.


def sparse_loss(drafter, batch, config, detach):
    """L_C alone, through the product: the joint loss minus the full branch."""
    config = config.model_copy(update={"supervise": "all", "detach_prefix": detach})
    return joint_loss(drafter, batch, config, prefix=16, budget=8, seed=0).sparse.mean()


def kv_weights(model):
    attention = model.model.layers[0].self_attn
    return [attention.k_proj.weight, attention.v_proj.weight]


@pytest.mark.parametrize("policy", ["attention_mass", "sink_recent"])
@pytest.mark.parametrize("detach", [False, True])
def test_gradient_through_the_prefix_equals_a_reference_without_cache(policy, detach):
    config, ids = tight(views={"policy": policy}), token_ids(24)
    drafter, batch = double_drafter(), batch_of(ids)
    got = torch.autograd.grad(sparse_loss(drafter, batch, config, detach), kv_weights(drafter.model))
    logits = reference_logits(drafter.model, ids, prefix=16, config=config, budget=8, detach=detach)
    expected = torch.autograd.grad(cross_entropy(logits[16:], window(ids).labels[16:]), kv_weights(drafter.model))
    for mine, theirs in zip(got, expected, strict=True):
        assert theirs.norm() > 1e-4
        assert (mine - theirs).norm() / theirs.norm() < 1e-6


def test_detached_gradient_differs_from_the_one_through_the_prefix():
    drafter, batch = double_drafter(), batch_of(token_ids(24))
    through, cut = (
        torch.autograd.grad(sparse_loss(drafter, batch, tight(), d), kv_weights(drafter.model)) for d in (False, True)
    )
    for a, b in zip(through, cut, strict=True):
        assert (a - b).norm() / a.norm() > 1e-2


FAR_FROM_TIES = 1
"""Tokens whose chunks are chosen the same way on both sides of the step."""


def test_gradient_through_the_prefix_equals_central_differences():
    ids = token_ids(24, seed=FAR_FROM_TIES)
    drafter, batch, config = double_drafter(), batch_of(ids), tight()
    weights = kv_weights(drafter.model)
    grads = torch.autograd.grad(sparse_loss(drafter, batch, config, False), weights)

    def shifted(weight, by):
        with torch.no_grad():
            weight += by
            kept = []
            reference_logits(drafter.model, ids, prefix=16, config=config, budget=8, kept_out=kept)
            loss = float(sparse_loss(drafter, batch, config, False))
            weight -= by
        return loss, kept

    for weight, grad in zip(weights, grads, strict=True):
        step = 4e-3 * grad / grad.norm()
        (up, kept_up), (down, kept_down) = shifted(weight, step), shifted(weight, -step)
        assert all(map(torch.equal, kept_up, kept_down)), "the step changed the selection"
        assert (up - down) / (2 * 4e-3) == pytest.approx(float(grad.norm()), rel=1e-3)


def test_dropped_positions_get_exactly_no_gradient():
    drafter, ids, config = double_drafter(), token_ids(24), tight()
    model = drafter.model
    view = prefix_of(model, ids, 16, config)
    leaves = detached(view)
    for layer in leaves.layers:
        layer.keys_BHPD.requires_grad_(), layer.values_BHPD.requires_grad_()
    seen = sparse_view(model, leaves, config, 8)
    hidden, _ = extend(model, torch.tensor([ids[16:]]), view=seen)
    model.lm_head(hidden).pow(2).sum().backward()
    scale = model.model.layers[0].self_attn.scaling
    for layer in leaves.layers:
        rule = config.views.selection(0)
        kept = select(Evidence(layer.queries_BQWD, layer.keys_BHPD, scale), budget=8, selection=rule)
        keeps = torch.zeros(1, 2, 16, dtype=torch.bool).scatter(2, kept, True)
        for grad in (layer.keys_BHPD.grad, layer.values_BHPD.grad):
            assert not grad[~keeps].any() and (grad[keeps].abs().sum(-1) > 0).all()


def test_training_makes_no_inference_tensors():
    drafter, config = fresh_drafter(), stage()
    with torch.no_grad():
        view = prefix_of(drafter.model, token_ids(40), PREFIX, config)
    seen = sparse_view(drafter.model, detached(view), config, 16)
    assert not any(t.is_inference() for t in tensors(view) + tensors(seen))


def test_views_are_chosen_alike_under_autocast_and_without():
    drafter, config = fresh_drafter(), stage(views={"policy": "attention_mass"})
    chosen = []
    for seed in range(8):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            view = prefix_of(drafter.model, token_ids(200, seed), 200, config)
            inside = sparse_view(drafter.model, view, config, 64)
        chosen.append((inside, sparse_view(drafter.model, view, config, 64)))
    for inside, outside in chosen:
        assert all(map(torch.equal, tensors(inside), tensors(outside)))
