"""Views of one sequence: what a sparse view sees, and that gradients reach its keys as without any cache object."""

from collections import Counter
from functools import partial

import pytest
import torch

from bdcore.kv.budget import FULL
from bdcore.kv.selection import Evidence, select
from bdcore.training.losses import IGNORE
from bdcore.training.objective import Draw, draw, losses, supervised
from bdcore.training.views import Block, Sight, View, checkpoint_layers, detached, extend, sparse
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


def only(weights):
    (value,) = weights
    return value


def sight(config, budget):
    return Sight(only(config.views.policy), budget, only(config.views.position_mode))


def sparse_view(model, view, config, budget, seed=0):
    return view_of(model, view, config, [Block(int(view.next_positions_B[0]), sight(config, budget))], seed)


def view_of(model, view, config, blocks, seed=0):
    rule = partial(config.views.selection, seed=seed)
    return sparse(view, blocks, rule=rule, window=config.views.window, model=model)


def step_losses(drafter, batch, config, *, prefix, budget, seed=0):
    blocks = [] if budget is None else [Block(prefix, sight(config, budget))]
    return losses(drafter, batch, config, Draw(prefix, blocks), seed=seed)


def prefix_of(model, ids, prefix, config=None):
    return extend(model, torch.tensor([ids[:prefix]]))[1]


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
    assert (seen.cached, seen.next_positions_B.tolist()) == (PREFIX, [PREFIX])
    full, same = (tail_logits(model, ids, PREFIX, v) for v in (view, seen))
    torch.testing.assert_close(full, same, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_positions_go_on_at_the_prefix_or_at_the_cache(model):
    for mode, position in (("absolute", PREFIX), ("in_cache", 16)):
        config = stage(views={"position_mode": mode})
        view = prefix_of(model, token_ids(40), PREFIX, config)
        assert sparse_view(model, view, config, 16).next_positions_B.tolist() == [position]


def tensors(view: View):
    found = [t for layer in view.layers for t in (layer.keys_BHPD, layer.values_BHPD, layer.queries_BQPD)]
    return [t for t in found if t is not None]


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
    assert (longer.cached, longer.next_positions_B.tolist(), view.cached) == (PREFIX + 5, [PREFIX + 5], PREFIX)


@pytest.mark.parametrize("supervise", ["continuation", "all"])
def test_both_losses_of_a_step_are_the_references_and_the_same_when_computed_again(supervise):
    drafter, ids = fresh_drafter(), token_ids(40)
    config, batch = stage(supervise=supervise), batch_of(ids)
    labels = window(ids).labels.tolist()
    out = step_losses(drafter, batch, config, prefix=PREFIX, budget=16, seed=5)
    again = step_losses(drafter, batch, config, prefix=PREFIX, budget=16, seed=5)
    assert torch.equal(out.full.total, again.full.total) and torch.equal(out.sparse.total, again.sparse.total)
    full = reference_logits(drafter.model, ids, prefix=PREFIX, config=config)
    seen = reference_logits(drafter.model, ids, prefix=PREFIX, config=config, budget=16, seed=5)
    start = 0 if supervise == "all" else PREFIX
    torch.testing.assert_close(out.full.mean(), cross_entropy(full[start:], labels[start:]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.sparse.mean(), cross_entropy(seen[PREFIX:], labels[PREFIX:]), atol=1e-4, rtol=1e-4)
    assert supervised(batch, config, Draw(PREFIX, [Block(PREFIX, sight(config, 16))])) == (40 - start, 8)


def test_full_loss_does_not_depend_on_the_sparse_branch():
    drafter, batch = fresh_drafter(), batch_of(token_ids(40))
    alone = step_losses(drafter, batch, stage(), prefix=PREFIX, budget=None)
    beside = step_losses(drafter, batch, stage(), prefix=PREFIX, budget=16)
    assert alone.sparse is None and torch.equal(alone.full.total, beside.full.total)


def test_prefix_runs_without_gradients_in_the_papers_scheme():
    drafter, ids = fresh_drafter(), token_ids(40)
    batch = batch_of(ids, labels=[[5] * 32 + [IGNORE] * 7 + [9]])
    out = step_losses(drafter, batch, stage(), prefix=PREFIX, budget=16)
    (out.full.mean() + out.sparse.mean()).backward()
    grad = drafter.model.model.embed_tokens.weight.grad
    assert not grad[[i for i in set(ids[:32]) if i not in ids[32:]]].any() and grad[ids[39]].any()


# Several views in one pass.


def every_kind():
    """Blocks at several places, of several policies, budgets and modes, so that all but the longest are filled up."""
    kinds = [("attention_mass", 16, "absolute"), ("sink_recent", 24, "in_cache"), ("random", FULL, "absolute")]
    return [Block(start, Sight(*kind)) for start in (24, 10, 32) for kind in kinds]


@torch.no_grad()
def test_blocks_read_together_are_what_each_is_alone(model):
    config = stage()
    batch = torch.tensor([token_ids(40, seed=1), token_ids(40, seed=2)])
    _, view = extend(model, batch)
    blocks = every_kind()
    together = view_of(model, view, config, blocks, seed=4)
    assert together.filled_BP is not None and together.cached == 32
    hidden, _ = extend(model, torch.cat([batch[:, b.start : b.start + 8] for b in blocks]), view=together)
    for block, mine in zip(blocks, hidden.split(2), strict=True):
        alone = view_of(model, view, config, [block], seed=4)
        assert alone.filled_BP is None
        theirs, _ = extend(model, batch[:, block.start : block.start + 8], view=alone)
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_view_of_the_middle_of_a_sequence_knows_nothing_of_what_comes_after(model):
    config, ids = stage(), token_ids(40)
    other = ids[:24] + token_ids(16, seed=9)
    seen = [
        view_of(model, extend(model, torch.tensor([x]))[1], config, [Block(24, sight(config, 16))])
        for x in (ids, other)
    ]
    assert all(map(torch.equal, tensors(seen[0]), tensors(seen[1])))
    short = view_of(model, prefix_of(model, ids, 24), config, [Block(24, sight(config, 16))])
    for mine, theirs in zip(tensors(seen[0]), tensors(short), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_dense_supervision_covers_every_block_with_a_view_of_its_own_prefix():
    config = stage(supervise="dense", prefix_lengths={32: 1}, views={"budgets": {16: 1}})
    chosen = draw(config, 0, 0)
    assert [b.start for b in chosen.blocks] == [8, 16, 24, 32]
    drafter, ids = fresh_drafter(), token_ids(40)
    labels = window(ids).labels.tolist()
    out = losses(drafter, batch_of(ids), config, chosen, seed=5)
    assert supervised(batch_of(ids), config, chosen) == (40, 32) == (out.full.tokens, out.sparse.tokens)
    expected = 0.0
    for start in (8, 16, 24, 32):
        seen = reference_logits(
            drafter.model, ids[: start + 8], prefix=start, config=config, budget=min(16, start), seed=5
        )
        expected += 8 * float(cross_entropy(seen[start:], labels[start : start + 8]).detach())
    assert float(out.sparse.total.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("prefix", "starts"), [(32, [8, 16, 24, 32]), (35, [3, 11, 19, 27, 35]), (5, [5]), (8, [8])])
def test_dense_blocks_end_with_the_sequence(prefix, starts):
    config = stage(supervise="dense", prefix_lengths={prefix: 1})
    assert [b.start for b in draw(config, 0, 0).blocks] == starts


def test_several_views_per_step_see_the_same_continuation():
    config = stage(views={"per_step": 3, "budgets": {16: 0.5, 24: 0.5}}, prefix_lengths={32: 1})
    steps = [draw(config, 0, step) for step in range(20)]
    assert all([b.start for b in d.blocks] == [32] * 3 for d in steps)
    assert any(len({b.sight for b in d.blocks}) == 2 for d in steps)
    drafter, batch = fresh_drafter(), batch_of(token_ids(40))
    both = Draw(32, [Block(32, sight(config, 16)), Block(32, sight(config, 24))])
    out = losses(drafter, batch, config, both, seed=0)
    alone = [step_losses(drafter, batch, config, prefix=32, budget=b) for b in (16, 24)]
    assert set(out.views) == {"budget_16", "budget_24"}
    for one, name in zip(alone, ("budget_16", "budget_24"), strict=True):
        assert float(out.views[name].total.detach()) == pytest.approx(float(one.sparse.total.detach()), rel=1e-5)
    assert out.sparse.tokens == 16


@pytest.mark.parametrize("detach", [False, True])
def test_gradient_checkpointing_changes_no_gradient(detach):
    config = stage(supervise="dense", detach_prefix=detach, prefix_lengths={32: 1})
    batch, found = batch_of(token_ids(40)), []
    for again in (False, True):
        drafter, calls = double_drafter(), Counter()
        drafter.model.train()
        if again:
            checkpoint_layers(drafter.model)
        drafter.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=calls: seen.update(["mlp"]))
        out = losses(drafter, batch, config, draw(config, 0, 1), seed=0)
        forwards = calls["mlp"]
        (out.full.mean() + 0.5 * out.sparse.mean()).backward()
        assert forwards == 2 and calls["mlp"] == (4 if again else 2)
        found.append([p.grad for p in drafter.model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 10
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-9)


# Gradients through the kept keys and values, in fp64.


def sparse_loss(drafter, batch, config, detach):
    """L_C alone, through the product."""
    config = config.model_copy(update={"supervise": "all", "detach_prefix": detach})
    return step_losses(drafter, batch, config, prefix=16, budget=8).sparse.mean()


def kv_weights(model):
    attention = model.model.layers[0].self_attn
    return [attention.k_proj.weight, attention.v_proj.weight]


MODES = ["absolute", "in_cache"]
"""`in_cache` turns kept keys by another rotation, which gradients must pass as well."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["attention_mass", "sink_recent"])
@pytest.mark.parametrize("detach", [False, True])
def test_gradient_through_the_prefix_equals_a_reference_without_cache(policy, detach, mode):
    config, ids = tight(views={"policy": policy, "position_mode": mode}), token_ids(24)
    drafter, batch = double_drafter(), batch_of(ids)
    got = torch.autograd.grad(sparse_loss(drafter, batch, config, detach), kv_weights(drafter.model))
    logits = reference_logits(drafter.model, ids, prefix=16, config=config, budget=8, detach=detach)
    expected = torch.autograd.grad(
        cross_entropy(logits[16:], window(ids).labels[16:].tolist()), kv_weights(drafter.model)
    )
    for mine, theirs in zip(got, expected, strict=True):
        assert theirs.norm() > 1e-4
        assert (mine - theirs).norm() / theirs.norm() < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_detached_gradient_differs_from_the_one_through_the_prefix(mode):
    drafter, batch, config = double_drafter(), batch_of(token_ids(24)), tight(views={"position_mode": mode})
    through, cut = (
        torch.autograd.grad(sparse_loss(drafter, batch, config, d), kv_weights(drafter.model)) for d in (False, True)
    )
    for a, b in zip(through, cut, strict=True):
        assert (a - b).norm() / a.norm() > 1e-2


FAR_FROM_TIES = 1
"""Tokens whose chunks are chosen the same way on both sides of the step."""


@pytest.mark.parametrize("mode", MODES)
def test_gradient_through_the_prefix_equals_central_differences(mode):
    ids = token_ids(24, seed=FAR_FROM_TIES)
    drafter, batch, config = double_drafter(), batch_of(ids), tight(views={"position_mode": mode})
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


@pytest.mark.parametrize("mode", MODES)
def test_dropped_positions_get_exactly_no_gradient(mode):
    drafter, ids, config = double_drafter(), token_ids(24), tight(views={"position_mode": mode})
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
        rule = config.views.selection("attention_mass", 0)
        kept = select(Evidence(layer.queries_BQPD[:, :, -1:], layer.keys_BHPD, scale), budget=8, selection=rule)
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
