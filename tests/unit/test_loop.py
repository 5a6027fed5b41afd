"""The training loop: steps that are skipped and counted, precision, what is drawn, what is held out."""

import math
import os
import signal
from collections import Counter
from dataclasses import replace

import pytest
import torch

from bdcore.models.drafter import Drafter
from bdcore.targets.rows import TargetRows
from bdcore.training import loop
from bdcore.training.batches import Tokens, split_validation
from bdcore.training.checkpoint import Checkpoints
from bdcore.training.loop import Interrupted, Stage, rate, train
from bdcore.training.losses import IGNORE
from bdcore.training.objective import StepLoss, draw
from tests.unit.training_helpers import forced_row, fresh_drafter, generated_row, rows, stage


def run(folder, drafter, data, config, *, dtype="float32", on_step=None):
    return ended(folder, drafter, data, config, dtype=dtype, on_step=on_step).log


def ended(folder, drafter, data, config, *, dtype="float32", on_step=None):
    checkpoints = Checkpoints(folder / "checkpoint.pt")
    return train(Stage(drafter, TargetRows.of(data), config, 3, dtype, checkpoints), on_step)


def weights(drafter):
    return {name: p.detach().clone() for name, p in drafter.model.named_parameters()}


def test_training_lowers_both_losses(tmp_path):
    drafter = fresh_drafter()
    log = run(
        tmp_path,
        drafter,
        rows(2, 40),
        stage(steps=40, validation={"sequences": 0}, learning_rate=5e-3, prefix_lengths={32: 1}),
    )
    assert [r["step"] for r in log] == list(range(1, 41)) and not any(r["skipped"] for r in log)
    for name in ("loss_a", "loss_c"):
        assert sum(r[name] for r in log[-5:]) < 0.7 * sum(r[name] for r in log[:5])


def test_step_without_labels_is_skipped_and_counted_and_changes_nothing(tmp_path):
    empty = {**forced_row(0), "target_ids": [IGNORE] * 48}
    drafter = fresh_drafter()
    before = weights(drafter)
    log = run(tmp_path, drafter, [empty], stage(steps=3, validation={"sequences": 0}))
    assert [r["skipped"] for r in log] == [True] * 3 and log[0]["tokens"] == 0
    assert log[0]["loss_a"] is None and log[0]["grad_norm"] is None
    assert all(torch.equal(before[n], p) for n, p in weights(drafter).items())


def test_empty_sequence_beside_a_valid_one_gives_the_valid_ones_step(tmp_path, monkeypatch):
    valid, empty = forced_row(0, 40), {**forced_row(1, 40), "target_ids": [IGNORE] * 40}
    config = stage(steps=1, validation={"sequences": 0}, prefix_lengths={32: 1}, warmup=0)
    ended = []
    for data in ([valid], [valid, empty]):
        drafter = fresh_drafter()
        size = len(data)
        monkeypatch.setattr(loop.Sampler, "draw", lambda self, step, index, length: loop_row(self, index))
        (record,) = run(tmp_path / str(size), drafter, data, config.model_copy(update={"batch_size": size}))
        ended.append((record, weights(drafter)))
    (one, alone), (two, beside) = ended
    assert one["tokens"] == two["tokens"] == 16 and one["loss_a"] == pytest.approx(two["loss_a"], rel=1e-5)
    assert all(torch.allclose(alone[n], beside[n], rtol=1e-4, atol=1e-6) for n in alone)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_step_that_is_not_finite_is_skipped_and_the_weights_stay_finite(tmp_path, monkeypatch, fault):
    drafter = fresh_drafter()
    real = loop.losses

    def broken(*args, **kwargs):
        out = real(*args, **kwargs)
        total = out.full.total
        if fault == "loss":
            return StepLoss(replace(out.full, total=total * math.nan), out.views)
        if total.requires_grad:  # the validation runs without
            total.register_hook(lambda grad: grad * math.inf)
        return out

    monkeypatch.setattr(loop, "losses", broken)
    before = weights(drafter)
    log = run(tmp_path, drafter, rows(3), stage(steps=2))
    assert [r["skipped"] for r in log] == [True, True]
    assert all(torch.equal(before[n], p) for n, p in weights(drafter).items())
    monkeypatch.undo()
    (tmp_path / "checkpoint.pt").unlink()
    assert not any(r["skipped"] for r in run(tmp_path, drafter, rows(3), stage(steps=2)))
    assert all(torch.isfinite(p).all() for p in weights(drafter).values())


def test_fp32_master_weights_change_under_bf16_autocast_at_a_tiny_rate(tmp_path):
    drafter = fresh_drafter()
    norm = drafter.model.model.norm.weight
    assert (norm == 1).all()
    config = stage(steps=1, warmup=0, learning_rate=1e-5, weight_decay=0)
    (record,) = run(tmp_path, drafter, rows(3), config, dtype="bfloat16")
    assert not record["skipped"] and all(p.dtype == torch.float32 for p in drafter.model.parameters())
    assert (norm != 1).any() and float((norm.detach() - 1).abs().max()) < 2e-5
    assert (norm.to(torch.bfloat16) == 1).all(), "a bf16 weight would not have moved"


def test_embedding_is_frozen_and_everything_else_learns(tmp_path):
    drafter = fresh_drafter()
    before = weights(drafter)
    run(tmp_path, drafter, rows(3), stage(steps=2))
    changed = {name for name, p in weights(drafter).items() if not torch.equal(p, before[name])}
    assert set(before) - changed == {"model.embed_tokens.weight"}


def test_head_learns_at_its_own_rate(tmp_path):
    moved = {}
    for scale in (1.0, 1e-3):
        drafter = fresh_drafter()
        before = weights(drafter)["lm_head.weight"]
        config = stage(steps=1, warmup=0, head_scale=scale, weight_decay=0)
        run(tmp_path / str(scale), drafter, rows(3), config)
        moved[scale] = float((weights(drafter)["lm_head.weight"] - before).abs().max())
    assert moved[1e-3] == pytest.approx(moved[1.0] * 1e-3, rel=0.05)


def test_attention_dropout_of_a_checkpoint_changes_no_step(tmp_path):
    """Our attention has none: it would end the first step."""
    dropping, plain = fresh_drafter(attention_dropout=0.3), fresh_drafter()
    logs = [run(tmp_path / str(i), drafter, rows(3), stage(steps=2)) for i, drafter in enumerate((dropping, plain))]
    assert logs[0] == logs[1] and dropping.model.config.attention_dropout == 0.3
    assert all(torch.equal(p, weights(plain)[n]) for n, p in weights(dropping).items())


def test_pruned_head_is_trained_on_what_it_can_say(tmp_path):
    ids = torch.arange(3, 128, 2)
    model = fresh_drafter().model
    model.lm_head = torch.nn.Linear(64, len(ids), bias=False)
    log = run(tmp_path, Drafter(model, ids), rows(4), stage(steps=4, loss_a={"ce": 0.5, "kl": 0.5}))
    assert all(0 < r["tokens"] < 16 for r in log) and not any(r["skipped"] for r in log)


@pytest.mark.parametrize("supervise", ["continuation", "all", "dense"])
def test_gradient_checkpointing_trains_the_same_with_each_layer_read_again(tmp_path, supervise):
    found = []
    for again in (False, True):
        drafter, calls = fresh_drafter(), Counter()
        drafter.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=calls: seen.update(["mlp"]))
        config = stage(steps=3, supervise=supervise, gradient_checkpointing=again, validation={"sequences": 0})
        log = run(tmp_path / str(again), drafter, rows(3), config)
        assert [r["skipped"] for r in log] == [False] * 3
        found.append((calls["mlp"], log, weights(drafter)))
    (once, plain, without), (twice, other, with_it) = found
    forwards = 3 if supervise == "continuation" else 2  # the prefix is read without gradients, so never again
    assert once == 3 * forwards and twice == once + 3 * 2
    for mine, theirs in zip(other, plain, strict=True):
        assert mine["loss_a"] == pytest.approx(theirs["loss_a"], rel=1e-5)
        assert mine["loss_c"] == pytest.approx(theirs["loss_c"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert all(torch.allclose(with_it[n], p, rtol=1e-4, atol=1e-6) for n, p in without.items())


def test_rate_warms_up_and_falls_to_zero():
    config = stage(steps=20, warmup=4)
    factors = [rate(step, config) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[4] == 1.0 and factors[20] == pytest.approx(0)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert rate(0, stage(warmup=0)) == 1.0


def test_logged_rate_is_the_one_that_was_used(tmp_path):
    config = stage(steps=4)
    log = run(tmp_path, fresh_drafter(), rows(3), config)
    assert [r["learning_rate"] for r in log] == [1e-3 * rate(s, config) for s in range(4)]


def test_prefix_and_budget_are_drawn_by_weight_from_seed_and_step():
    config = stage(views={"budgets": {16: 0.75, 24: 0.25}}, prefix_lengths={24: 0.2, 32: 0.8})
    drawn = [draw(config, 0, step) for step in range(1000)]
    assert drawn == [draw(config, 0, step) for step in range(1000)]
    assert drawn != [draw(config, 1, step) for step in range(1000)]
    assert 0.7 < Counter(d.blocks[0].sight.budget for d in drawn)[16] / 1000 < 0.8
    assert 0.15 < Counter(d.prefix for d in drawn)[24] / 1000 < 0.25


def test_policy_and_position_mode_are_drawn_by_weight_too():
    views = {"policy": {"attention_mass": 0.9, "random": 0.1}, "position_mode": {"absolute": 0.3, "in_cache": 0.7}}
    drawn = [draw(stage(views=views), 0, step).blocks[0].sight for step in range(1000)]
    assert 0.06 < Counter(d.policy for d in drawn)["random"] / 1000 < 0.14
    assert 0.65 < Counter(d.position_mode for d in drawn)["in_cache"] / 1000 < 0.75
    both = sum(d.policy == "random" and d.position_mode == "in_cache" for d in drawn) / 1000
    assert 0.04 < both < 0.1  # drawn apart: 0.1 x 0.7


def test_without_lambda_no_sparse_view_is_drawn_and_prefixes_stay_the_same():
    with_views, without = stage(), stage(lam=0)
    assert all(draw(without, 0, s).blocks == [] for s in range(20))
    assert [draw(without, 0, s).prefix for s in range(20)] == [draw(with_views, 0, s).prefix for s in range(20)]


def test_log_says_which_view_and_tokens_each_step_had(tmp_path):
    config = stage(steps=6)
    log = run(tmp_path, fresh_drafter(), rows(3), config)
    for step, record in enumerate(log):
        drawn = draw(config, 3, step)
        assert (record["prefix"], record["tokens"]) == (drawn.prefix, 16)
        (view,) = record["views"].items()
        assert view[0] == drawn.blocks[0].sight.name and view[1]["tokens"] == 8
        assert view[1]["loss"] == pytest.approx(record["loss_c"])
        assert record["grad_norm"] > 0 and 0 <= record["agree_c"] <= 1


@pytest.mark.parametrize("supervise", ["continuation", "dense"])
def test_accumulated_forwards_are_one_step_over_all_their_tokens(tmp_path, monkeypatch, supervise):
    """B30: of two sequences one has 2 labels and one 8; the step is the same in one forward or in two."""
    few = {**forced_row(0, 40), "target_ids": [*[IGNORE] * 38, 5, 6]}
    config = stage(steps=1, validation={"sequences": 0}, prefix_lengths={32: 1}, warmup=0, supervise=supervise)
    monkeypatch.setattr(loop.Sampler, "draw", lambda self, step, index, length: loop_row(self, index).window(0, length))
    found = []
    for split in ({"batch_size": 2}, {"accumulate": 2}):
        drafter = fresh_drafter()
        (record,) = run(tmp_path / str(split), drafter, [few, forced_row(1, 40)], config.model_copy(update=split))
        found.append((record, weights(drafter)))
    (one, together), (two, apart) = found
    assert one["tokens"] == two["tokens"] == (20 if supervise == "continuation" else 2 + 40 + 2 + 32)
    assert one["loss_a"] == pytest.approx(two["loss_a"], rel=1e-5)
    assert one["loss_c"] == pytest.approx(two["loss_c"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    assert all(torch.allclose(together[n], apart[n], rtol=1e-4, atol=1e-6) for n in together)


def loop_row(sampler, index):
    return Tokens(*(getattr(sampler.rows[index], n) for n in ("prompt_ids", "target_ids", "topk_ids", "topk_logprobs")))


def test_held_out_documents_are_never_trained_on(tmp_path, monkeypatch):
    data = [*rows(5), generated_row(4, [3] * 24, [9] * 24, "length"), generated_row(0, [4] * 24, [9] * 24, "length")]
    found = TargetRows.of(data)
    kept, held_out = split_validation(found, 2)
    assert [found.doc_ids[i] for i in held_out] == ["doc-3", "doc-4"]
    assert all(found.modes[i] == "forced" for i in held_out)
    assert {found.doc_ids[i] for i in kept} == {"doc-0", "doc-1", "doc-2"}
    seen, drawn = [], loop.Sampler.draw

    def watched(self, step, index, length):
        tokens = drawn(self, step, index, length)
        seen.append(tokens.ids.tolist())
        return tokens

    monkeypatch.setattr(loop.Sampler, "draw", watched)
    mixture = {"forced": 0.4, "generated": 0.3, "repeated": 0.3}
    run(tmp_path, fresh_drafter(), data, stage(steps=30, validation={"sequences": 2, "every": 30}, mixture=mixture))
    forbidden = [tuple(data[n]["prompt_ids"][i : i + 6]) for n in (3, 4) for i in range(43)] + [(3,) * 6]
    trained = {tuple(ids[i : i + 6]) for ids in seen for i in range(len(ids) - 5)}
    assert len(seen) == 30 and not trained & set(forbidden)


@pytest.mark.parametrize("name", ["needle@0.1/doc-4", "copy of doc-4"])
def test_the_text_of_a_held_out_document_is_held_out_under_every_name(name):
    """A needle has its filler's tokens up to the first needle alone; a copy is known by the tokens it begins with."""
    text = forced_row(4)["prompt_ids"]
    same = generated_row(0, [*text[:8], 3] if name.startswith("needle") else text[:8], [9] * 4, "length")
    needle = {**forced_row(7), "doc_id": "needle@0.9/doc-4"}
    other = generated_row(0, [*text[:7], 3], [9] * 4, "length")
    data = [needle, *rows(5), {**same, "doc_id": name}, {**other, "doc_id": "other"}]
    found = TargetRows.of(data)
    kept, held_out = split_validation(found, 1)
    assert [found.doc_ids[i] for i in kept] == ["doc-0", "doc-1", "doc-2", "doc-3", "other"]
    assert [found.doc_ids[i] for i in held_out] == ["needle@0.9/doc-4", "doc-4"]


def test_no_validation_keeps_every_row(tmp_path):
    kept, held_out = split_validation(TargetRows.of(rows(3)), 0)
    assert len(kept) == 3 and not held_out
    assert not any(
        "agreement" in r for r in run(tmp_path, fresh_drafter(), rows(3), stage(steps=2, validation={"sequences": 0}))
    )


def test_validation_agreement_is_logged_by_view_and_does_not_disturb_training(tmp_path):
    often, never = fresh_drafter(), fresh_drafter()
    log = run(tmp_path / "often", often, rows(4), stage(steps=4, validation={"sequences": 2, "every": 2}))
    run(tmp_path / "never", never, rows(4), stage(steps=4, validation={"sequences": 2, "every": 99}))
    assert [set(r.get("agreement", ())) for r in log] == [set(), {"full", "budget_16", "budget_24"}] * 2
    assert all(0 <= v <= 1 for v in log[-1]["agreement"].values())
    assert all(torch.equal(p, weights(never)[n]) for n, p in weights(often).items())


def test_validation_without_sparse_views_measures_the_full_one_alone(tmp_path):
    log = run(tmp_path, fresh_drafter(), rows(4), stage(steps=1, lam=0))
    assert set(log[0]["agreement"]) == {"full"} and log[0]["loss_c"] is None and not log[0]["views"]


def test_each_step_is_told_once_and_in_order(tmp_path):
    told = []
    log = run(tmp_path, fresh_drafter(), rows(3), stage(steps=3), on_step=told.append)
    assert told == log and not fresh_drafter().model.training


# Validation through a real cache, the best weights, early stopping.


def test_decoded_validation_is_what_the_steppers_cache_gives(tmp_path):
    """With the full cache that is teacher-forced agreement on the same positions: half of 40 tokens."""
    validation = {"sequences": 2, "every": 2, "decode_tokens": 20}
    log = run(tmp_path, fresh_drafter(), rows(6, 48), stage(steps=30, learning_rate=5e-3, validation=validation))
    last = log[-1]
    assert set(last["decoded"]) == {"full", "budget_16", "budget_24"}
    assert last["decoded"]["full"] == pytest.approx(last["agreement"]["full"])
    assert last["score"] == pytest.approx(sum(last["decoded"].values()) / 3)


def scripted(monkeypatch, scores):
    """Validations that find these scores, one after another."""
    left = iter(scores)
    monkeypatch.setattr(loop, "validate", lambda *_, **__: {"agreement": {"full": next(left)}})


@pytest.mark.parametrize("keep", ["best", "last"])
def test_best_weights_are_kept_where_asked_for(tmp_path, monkeypatch, keep):
    scripted(monkeypatch, [0.1, 0.4, 0.3])
    drafter, seen = fresh_drafter(), {}

    def on_step(record):
        seen[record["step"]] = weights(drafter)

    config = stage(steps=6, validation={"sequences": 1, "every": 2, "keep": keep})
    state = ended(tmp_path, drafter, rows(), config, on_step=on_step)
    assert (state.best_step, state.best_score, state.stale) == (4, 0.4, 1)
    kept = 4 if keep == "best" else 6
    assert all(torch.equal(p, seen[kept][n]) for n, p in weights(drafter).items())


def test_training_stops_when_validation_gets_no_better(tmp_path, monkeypatch):
    scripted(monkeypatch, [0.2, 0.5, 0.5, 0.4, 0.9])
    config = stage(steps=10, validation={"sequences": 1, "every": 1, "patience": 2})
    state = ended(tmp_path, fresh_drafter(), rows(), config)
    assert (state.step, state.best_step) == (4, 2)
    again = ended(tmp_path, fresh_drafter(), rows(), config)  # a finished stage trains no further
    assert again == state


def test_sigterm_saves_the_step_and_the_same_command_goes_on_bit_equal(tmp_path):
    config = stage(steps=6, checkpoint_every=100)
    whole = fresh_drafter()
    log = run(tmp_path / "whole", whole, rows(), config)

    def stop(record):
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="after step 3 of 6"):
        run(tmp_path / "cut", fresh_drafter(), rows(), config, on_step=stop)
    assert signal.getsignal(signal.SIGTERM) is before
    drafter = fresh_drafter()
    assert run(tmp_path / "cut", drafter, rows(), config) == log
    assert all(torch.equal(p, weights(whole)[n]) for n, p in weights(drafter).items())
