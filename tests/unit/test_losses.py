"""Losses by token against values worked by hand; the lean head loss against the eager one; sums that never mix."""

from math import log

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bdcore.config import LossConfig
from bdcore.training import losses
from bdcore.training.losses import (
    IGNORE,
    LOSSES,
    UNSAYABLE,
    LossSum,
    Targets,
    cross_entropy,
    head_loss,
    head_loss_reference,
    kl,
    lk,
    reverse_kl,
    token_loss,
    total_variation,
)

NONE = float("-inf")
Q = torch.tensor([[0.4, 0.3, 0.1, 0.2]]).log()
CE = LossConfig()
EACH = [LossConfig(**{"ce": 0, name: 1}) for name in LOSSES] + [LossConfig(ce=0.5, kl=1, reverse_kl=2, tv=3, lk=0.25)]


def one(label, ids, probabilities):
    return Targets(torch.tensor([label]), torch.tensor([ids]), torch.tensor([probabilities]).log())


def plain(labels, k=2):
    """Targets without a top-k."""
    shape = (*torch.tensor(labels).shape, k)
    return Targets(torch.tensor(labels), torch.full(shape, IGNORE), torch.full(shape, NONE))


def random_targets(*shape, vocab=11, k=3, seed=0):
    """Supervised with a top-k, with one that the head knows in part, without one, and not at all."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.rand(*shape, vocab, generator=rng).topk(k).indices
    logprobs = torch.randn(*shape, k + 2, generator=rng).log_softmax(-1)[..., :k]
    kind = torch.arange(ids[..., 0].numel()).view(shape) % 4
    labels = torch.where(kind == 3, IGNORE, ids[..., 0])
    ids[..., 1] = torch.where(kind == 1, -1, ids[..., 1])
    ids[kind == 2] = -1
    logprobs[kind == 2] = NONE
    return Targets(labels, ids, logprobs)


@pytest.fixture
def head():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 11, bias=False)


def identity(n):
    layer = torch.nn.Linear(n, n, bias=False)
    layer.weight.data = torch.eye(n)
    return layer


# --- Values. The drafter is q = [.4, .3, .1, .2].


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        # p = [.5, ., .25, .]: of its top-k [2/3, 1/3], the drafter's ratio there [.8, .2]; accepted .4 + .1
        pytest.param(
            one(0, [0, 2], [0.5, 0.25]),
            (-log(0.4), 2 / 3 * log(5 / 3) + log(10 / 3) / 3, 0.8 * log(1.2) + 0.2 * log(0.6), 0.5, log(2)),
            id="top-k",
        ),
        # one id of three is lacking: it changes no ratio and was counted as never accepted before
        pytest.param(
            one(0, [0, -1, 2], [0.5, 0.2, 0.25]),
            (-log(0.4), 2 / 3 * log(5 / 3) + log(10 / 3) / 3, 0.8 * log(1.2) + 0.2 * log(0.6), 0.5, log(2)),
            id="one id lacking",
        ),
        # one known id is left: one-hot for both KL, but its own mass .3 bounds what is accepted
        pytest.param(one(0, [0, -1], [0.3, 0.6]), (-log(0.4), -log(0.4), -log(0.4), 0.7, -log(0.3)), id="one id known"),
        pytest.param(
            one(0, [0, 2], [0.3, 0.0]), (-log(0.4), -log(0.4), -log(0.4), 0.7, -log(0.3)), id="one id of no mass"
        ),
        # the verifier is surer than the drafter of one id and less sure of the other: .15 + .3
        pytest.param(
            one(3, [3, 1], [0.15, 0.6]),
            (-log(0.2), 0.2 * log(1) + 0.8 * log(8 / 3), 0.4 * log(2) + 0.6 * log(0.75), 0.55, -log(0.45)),
            id="both sides",
        ),
        pytest.param(plain([2]), (-log(0.1), -log(0.1), -log(0.1), 0.9, -log(0.1)), id="no top-k"),
        pytest.param(one(2, [-1, -1], [0.6, 0.3]), (-log(0.1), -log(0.1), -log(0.1), 0.9, -log(0.1)), id="none known"),
        pytest.param(
            one(2, [0, 1], [0.0, 0.0]), (-log(0.1), -log(0.1), -log(0.1), 0.9, -log(0.1)), id="all of no mass"
        ),
        # equal where the verifier knows: no divergence, no rejection
        pytest.param(one(0, [0, 1, 2, 3], [0.4, 0.3, 0.1, 0.2]), (-log(0.4), 0, 0, 0, 0), id="equal"),
    ],
)
def test_values_worked_by_hand(targets, expected):
    for loss, value in zip((cross_entropy, kl, reverse_kl, total_variation, lk), expected, strict=True):
        torch.testing.assert_close(
            loss(Q, targets), torch.tensor([float(value)]), rtol=1e-5, atol=1e-6, msg=loss.__name__
        )


@pytest.mark.parametrize("mark", [IGNORE, UNSAYABLE])
@pytest.mark.parametrize("name", LOSSES)
def test_unsupervised_token_is_zero_and_its_neighbour_unchanged(name, mark):
    whole, ignored = one(0, [0, 2], [0.5, 0.25]), one(mark, [0, 2], [0.5, 0.25])
    both = Targets(*(torch.cat(pair) for pair in zip(vars(whole).values(), vars(ignored).values(), strict=True)))
    weights = LossConfig(**{"ce": 0, name: 1})
    loss = token_loss(Q.repeat(2, 1), both, weights)
    assert float(loss[1]) == 0
    torch.testing.assert_close(loss[:1], LOSSES[name](Q, whole))


def test_losses_add_up_by_their_weights():
    targets = one(0, [0, 2], [0.5, 0.25])
    mixed = token_loss(Q, targets, LossConfig(ce=0.5, kl=1, reverse_kl=2, tv=3, lk=0.25))
    by_hand = 0.5 * -log(0.4) + 2 / 3 * log(5 / 3) + log(10 / 3) / 3 + 1.6 * log(1.2) + 0.4 * log(0.6) + 1.5
    assert float(mixed) == pytest.approx(by_hand + 0.25 * log(2), rel=1e-5)


def test_every_configured_loss_exists_and_weight_0_is_not_computed(monkeypatch):
    assert list(LOSSES) == list(LossConfig.model_fields)

    def refuse(*_):
        raise AssertionError("computed for nothing")

    for name in ("ce", "kl", "reverse_kl", "tv"):
        monkeypatch.setitem(LOSSES, name, refuse)
    assert float(token_loss(Q, plain([0]), LossConfig(ce=0, lk=1))) == pytest.approx(-log(0.4))


def test_slices_and_picks_keep_labels_and_top_k_together():
    targets = random_targets(2, 6)
    part = targets[1:4]
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 1], mask[1, 3] = True, True
    picked = targets.picked(mask)
    for name, whole in vars(targets).items():
        assert torch.equal(getattr(part, name), whole[:, 1:4])
        assert torch.equal(getattr(picked, name), torch.stack([whole[0, 1], whole[1, 3]]))
    assert targets.tokens == 9 and targets.supervised.sum() == 9 and not targets.supervised[0, 3]


# --- Gradients


@pytest.mark.parametrize("weights", EACH, ids=str)
def test_gradient_is_the_central_difference_in_fp64(weights):
    torch.manual_seed(0)
    logits = torch.randn(8, 11, dtype=torch.float64, requires_grad=True)
    assert token_loss(logits, random_targets(8), weights).dtype == torch.float64
    torch.autograd.gradcheck(lambda x: token_loss(x, random_targets(8), weights), (logits,), eps=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weights", EACH, ids=str)
def test_gradient_is_finite_where_nothing_would_be_accepted(weights):
    impossible = torch.tensor([[0.0, -500.0, -500.0, 0.0], [0.0, NONE, NONE, 0.0]])
    targets = Targets(torch.tensor([0, 0]), torch.tensor([[1, 2]] * 2), torch.tensor([[0.7, 0.2]] * 2).log())
    logits = impossible.clone().requires_grad_()
    token_loss(logits, targets, weights).sum().backward()
    assert logits.grad.isfinite().all()


def test_lk_learns_where_total_variation_cannot():
    """q of the verifier's token is e^-200, 0 in fp32."""
    grads = {}
    for name in ("tv", "lk"):
        logits = torch.tensor([[0.0, -200.0]], requires_grad=True)
        token_loss(logits, one(1, [1], [0.9]), LossConfig(**{"ce": 0, name: 1})).sum().backward()
        grads[name] = logits.grad[0].tolist()
    assert grads == {"tv": [0, 0], "lk": pytest.approx([1, -1])}


# --- Lean and eager


def results(loss, head, hidden, targets, weights, **options):
    leaf = hidden.clone().requires_grad_()
    out = loss(head, leaf, targets, weights, **options)
    grads = torch.autograd.grad(out.mean(), (head.weight, leaf))
    return out, grads


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("weights", EACH, ids=str)
def test_lean_loss_is_the_eager_one(head, weights, chunk):
    hidden, targets = torch.randn(2, 9, 8), random_targets(2, 9)
    lean, lean_grads = results(head_loss, head, hidden, targets, weights, chunk=chunk)
    eager, eager_grads = results(head_loss_reference, head, hidden, targets, weights)
    torch.testing.assert_close(lean.total, eager.total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lean_grads, eager_grads, rtol=1e-5, atol=1e-7)
    assert (lean.tokens, lean.agreed) == (eager.tokens, eager.agreed) and lean.tokens == 14
    assert not lean_grads[1][targets.labels == IGNORE].any()


@pytest.mark.parametrize("loss", [head_loss, head_loss_reference])
def test_under_autocast_the_loss_is_fp32(head, loss):
    hidden, targets = torch.randn(2, 9, 8), random_targets(2, 9)
    seen = []

    def spied(x):
        seen.append(head(x).dtype)
        return head(x)

    with torch.autocast("cpu", torch.bfloat16):
        out = loss(spied, hidden, targets, EACH[-1])
    torch.autograd.grad(out.total, head.weight)
    mask = targets.supervised
    logits = F.linear(hidden[mask].bfloat16(), head.weight.bfloat16()).float()
    assert set(seen) == {torch.bfloat16} and out.total.dtype == torch.float32
    torch.testing.assert_close(out.total, token_loss(logits, targets.picked(mask), EACH[-1]).sum())


def test_without_gradients_nothing_is_checkpointed(head, monkeypatch):
    hidden, targets = torch.randn(2, 9, 8), random_targets(2, 9)
    eager = head_loss_reference(head, hidden, targets, EACH[-1]).total

    def refuse(*_, **__):
        raise AssertionError("checkpointed")

    monkeypatch.setattr(losses, "checkpoint", refuse)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            torch.testing.assert_close(head_loss(head, hidden, targets, EACH[-1], chunk=4).total, eager)
    with pytest.raises(AssertionError, match="checkpointed"):
        head_loss(head, hidden, targets, EACH[-1], chunk=4)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation returned, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def watched(loss, **options):
    """Rows per call of the head, elements of the largest tensor saved for backward and of the largest ever.

    36 supervised tokens of 48, 64 outputs, hidden width 4: weight and its gradient have 256 elements.
    """
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 64, bias=False)
    rows, saved = [], []

    def spied(hidden_NE):
        rows.append(len(hidden_NE))
        return head(hidden_NE)

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    hidden, targets = torch.randn(2, 24, 4, requires_grad=True), random_targets(2, 24, vocab=64)
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(spied, hidden, targets, EACH[-1], **options).mean().backward()
    assert head.weight.grad.any() and hidden.grad.any()
    return rows, max(saved), largest.elements


def test_lean_loss_never_holds_the_logits_of_the_sequence():
    rows, saved, largest = watched(head_loss, chunk=5)
    assert rows[:8] == [5] * 7 + [1]  # each once forward, once more in the backward pass
    assert sorted(rows[8:]) == sorted(rows[:8])
    assert saved <= 5 * 64 and largest <= 5 * 64


def test_eager_loss_does_hold_them_so_the_watch_can_see():
    rows, saved, largest = watched(head_loss_reference)
    assert rows == [36] and saved == largest == 36 * 64


# --- Counts


@pytest.mark.parametrize("loss", [head_loss, head_loss_reference])
def test_empty_batch_adds_zero_and_no_gradient(head, loss):
    """B29: no label to learn, hidden states not finite; then one valid micro-batch in the same step."""
    hidden = torch.full((2, 3, 8), torch.inf, requires_grad=True)
    empty = loss(head, hidden, plain([[IGNORE, UNSAYABLE, IGNORE]] * 2), EACH[-1])
    assert (empty.tokens, empty.agreed, float(empty.total.detach()), float(empty.mean())) == (0, 0, 0.0, 0.0)
    valid = loss(head, torch.randn(1, 4, 8), random_targets(1, 4), EACH[-1])
    alone = torch.autograd.grad(valid.mean(), head.weight, retain_graph=True)[0]
    step = (empty.total + valid.total) / (empty.tokens + valid.tokens)
    torch.testing.assert_close(step, valid.mean())
    step.backward()
    torch.testing.assert_close(head.weight.grad, alone)
    assert hidden.grad is not None and not hidden.grad.any()


def test_mean_of_nothing_has_no_gradient():
    """B29"""
    mean = LossSum(torch.zeros((), requires_grad=True) * 1, 0, 0).mean()
    assert float(mean) == 0 and not mean.requires_grad


def logits_of_loss(values):
    """Two-way logits whose cross-entropy to label 0 is each of `values`."""
    p = torch.exp(-torch.tensor(values))
    return torch.stack([p.log(), (1 - p).log()], -1)


@pytest.mark.parametrize("loss", [head_loss, head_loss_reference])
def test_two_tokens_at_one_and_eight_at_two_mean_1_8(loss):
    """B30: two micro-batches by their sums, and both in one."""
    hidden = logits_of_loss([1.0] * 2 + [9.0] * 6 + [2.0] * 8).view(2, 8, 2)
    targets = plain([[0, 0] + [IGNORE] * 6, [0] * 8])
    parts = [
        loss(identity(2), hidden[b : b + 1], Targets(*(t[b : b + 1] for t in vars(targets).values())), CE)
        for b in (0, 1)
    ]
    assert [part.tokens for part in parts] == [2, 8]
    assert [float(part.mean().detach()) for part in parts] == pytest.approx([1.0, 2.0], abs=1e-5)
    both = LossSum(parts[0].total + parts[1].total, 10, 0)
    together = loss(identity(2), hidden, targets, CE)
    assert together.tokens == 10
    assert [float(x.mean().detach()) for x in (both, together)] == pytest.approx([1.8, 1.8], abs=1e-5)


@pytest.mark.parametrize("loss", [head_loss, head_loss_reference])
def test_gradient_of_micro_batches_equals_the_tokens_together(head, loss):
    """B30: by PyTorch's own cross-entropy of the ten tokens."""
    hidden = torch.randn(2, 8, 8)
    labels = [[1, 2] + [IGNORE] * 6, [3, 4, 5, 6, 7, 8, 9, 10]]
    parts = [loss(head, hidden[b : b + 1], plain(labels[b : b + 1]), CE) for b in (0, 1)]
    mean = (parts[0].total + parts[1].total) / (parts[0].tokens + parts[1].tokens)
    flat = torch.cat([hidden[0, :2], hidden[1]])
    together = F.cross_entropy(head(flat), torch.tensor(labels[0][:2] + labels[1]))
    torch.testing.assert_close(
        torch.autograd.grad(mean, head.weight)[0], torch.autograd.grad(together, head.weight)[0], rtol=1e-5, atol=1e-7
    )


def test_unsupervised_positions_change_neither_loss_nor_gradient(head):
    hidden = torch.randn(1, 4, 8)
    alone = head_loss(head, hidden[:, :2], plain([[3, 4]]), CE).mean()
    mixed = head_loss(head, hidden, plain([[3, 4, IGNORE, IGNORE]]), CE).mean()
    assert torch.equal(alone, mixed)
    grads = [torch.autograd.grad(loss, head.weight)[0] for loss in (alone, mixed)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("chunk", [1, 2, 512])
def test_agreement_counts_argmax_hits(chunk):
    assert head_loss(identity(3), torch.eye(3)[None], plain([[0, 2, 2]]), CE, chunk=chunk).agreed == 2


def test_loss_of_half_precision_logits_is_computed_in_fp32():
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    loss = token_loss(logits, plain([1, 2, 3]), CE)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), torch.tensor([1, 2, 3]), reduction="none"))
