"""Losses by token: nothing supervised adds nothing, means never mix, the top-k term is what it says."""

import pytest
import torch
import torch.nn.functional as F

from bdcore.training.losses import IGNORE, LossSum, Targets, head_loss, token_loss, top_k_kl
from bdcore.training.objective import joint_loss
from tests.unit.training_helpers import batch_of, fresh_drafter, stage, token_ids

INF = float("-inf")


def targets(labels, k=2):
    shape = (*torch.tensor(labels).shape, k)
    return Targets(torch.tensor(labels), torch.full(shape, -100), torch.full(shape, INF))


@pytest.fixture
def head():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 11, bias=False)


def test_batch_without_labels_adds_zero_and_no_gradient(head):
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    out = head_loss(head, hidden, targets([[IGNORE] * 3] * 2), kl_weight=0.5)
    assert (out.tokens, out.agreed, float(out.mean())) == (0, 0, 0.0)
    (out.mean() + (hidden * 0).sum()).backward()
    assert head.weight.grad is None and not hidden.grad.any()


def test_unsupervised_positions_change_neither_loss_nor_gradient(head):
    hidden = torch.randn(1, 4, 8)
    alone = head_loss(head, hidden[:, :2], targets([[3, 4]]), kl_weight=0).mean()
    mixed = head_loss(head, hidden, targets([[3, 4, IGNORE, IGNORE]]), kl_weight=0).mean()
    assert torch.equal(alone, mixed)
    grads = [torch.autograd.grad(loss, head.weight)[0] for loss in (alone, mixed)]
    assert torch.equal(*grads)


def test_means_are_over_tokens_and_not_over_batches():
    parts = [LossSum(torch.tensor(2 * 1.0), 2, 0), LossSum(torch.tensor(8 * 2.0), 8, 0)]
    both = LossSum(parts[0].total + parts[1].total, 10, 0)
    assert float(both.mean()) == pytest.approx(1.8)


def logits_of_loss(losses):
    """Two-way logits whose cross-entropy to label 0 is each of `losses`."""
    p = torch.exp(-torch.tensor(losses))
    return torch.stack([p.log(), (1 - p).log()], -1)


def test_two_tokens_at_one_and_eight_at_two_mean_1_8_through_the_head():
    hidden = logits_of_loss([1.0] * 2 + [9.0] * 6 + [2.0] * 8).view(2, 8, 2)
    labels = [[0, 0] + [IGNORE] * 6, [0] * 8]
    identity = torch.nn.Linear(2, 2, bias=False)
    identity.weight.data = torch.eye(2)
    out = head_loss(identity, hidden, targets(labels), kl_weight=0)
    assert out.tokens == 10 and float(out.mean().detach()) == pytest.approx(1.8, abs=1e-5)


def test_gradient_of_a_mixed_batch_equals_the_tokens_together(head):
    hidden = torch.randn(2, 8, 8)
    labels = [[1, 2] + [IGNORE] * 6, [3, 4, 5, 6, 7, 8, 9, 10]]
    mean = head_loss(head, hidden, targets(labels), kl_weight=0).mean()
    flat = torch.cat([hidden[0, :2], hidden[1]])
    together = F.cross_entropy(head(flat), torch.tensor(labels[0][:2] + labels[1]))
    torch.testing.assert_close(
        torch.autograd.grad(mean, head.weight)[0], torch.autograd.grad(together, head.weight)[0], rtol=1e-5, atol=1e-7
    )


def test_each_branch_of_a_step_states_its_own_count():
    ids = [token_ids(40, seed=s) for s in range(2)]
    labels = [[5] * 34 + [IGNORE] * 6, [5] * 40]  # 2 and 8 supervised tokens of the tail
    for supervise, whole in (("continuation", 10), ("all", 34 + 40)):
        out = joint_loss(
            fresh_drafter(),
            batch_of(*ids, labels=labels),
            stage(supervise=supervise),
            prefix=32,
            budget=16,
            seed=0,
        )
        assert (out.full.tokens, out.sparse.tokens) == (whole, 10)
        expected = out.full.total / whole + 0.5 * out.sparse.total / 10
        torch.testing.assert_close(out.loss, expected)


def test_agreement_counts_argmax_hits():
    hidden = torch.eye(3)[None]
    identity = torch.nn.Linear(3, 3, bias=False)
    identity.weight.data = torch.eye(3)
    assert head_loss(identity, hidden, targets([[0, 2, 2]]), kl_weight=0).agreed == 2


def test_top_k_term_is_cross_entropy_to_the_renormalised_top_k():
    logprobs = torch.randn(1, 5).log_softmax(-1)
    p = torch.tensor([0.6, 0.2])
    expected = -((p / p.sum()) * logprobs[0, [4, 1]]).sum()
    torch.testing.assert_close(top_k_kl(logprobs, torch.tensor([[4, 1]]), p.log()[None])[0], expected)


def test_top_k_ids_that_the_head_lacks_drop_out():
    logprobs = torch.randn(1, 5).log_softmax(-1)
    known = top_k_kl(logprobs, torch.tensor([[4]]), torch.tensor([[-0.5]]))
    some = top_k_kl(logprobs, torch.tensor([[4, -1]]), torch.tensor([[-0.5, -0.1]]))
    torch.testing.assert_close(known, some)


@pytest.mark.parametrize("ids", [[-100, -100], [-1, -1]])
def test_token_without_a_known_top_k_keeps_plain_cross_entropy(ids):
    logits = torch.randn(1, 5)
    t = Targets(torch.tensor([2]), torch.tensor([ids]), torch.tensor([[INF, INF]]))
    torch.testing.assert_close(token_loss(logits, t, kl_weight=0.9), F.cross_entropy(logits, t.labels)[None])


def test_kl_weight_mixes_the_two_terms_and_ignores_unsupervised_tokens():
    logits = torch.randn(2, 5)
    t = Targets(torch.tensor([2, IGNORE]), torch.tensor([[2, 0]] * 2), torch.tensor([[-0.3, -2.0]] * 2))
    logprobs = logits.log_softmax(-1)
    ce, kl = -logprobs[0, 2], top_k_kl(logprobs, t.topk_ids, t.topk_logprobs)[0]
    loss = token_loss(logits, t, kl_weight=0.25)
    torch.testing.assert_close(loss, torch.stack([0.75 * ce + 0.25 * kl, torch.tensor(0.0)]))


def test_loss_of_half_precision_logits_is_computed_in_fp32():
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    assert token_loss(logits, targets([1, 2, 3]), kl_weight=0).dtype == torch.float32
