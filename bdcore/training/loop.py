"""The resumable training loop: draw a batch and a budget, one step on L_A + lam * L_C, log, validate, checkpoint."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bdcore.config import TrainingConfig
from bdcore.kv.budget import FULL
from bdcore.models.drafter import Drafter
from bdcore.runtime import seed_for, torch_dtype
from bdcore.training import checkpoint
from bdcore.training.batches import Batch, Sampler, collate, head_index
from bdcore.training.checkpoint import TrainingState
from bdcore.training.losses import LossSum
from bdcore.training.objective import StepLoss, joint_loss

OnStep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Draw:
    """What a step trains on, a function of (seed, step) alone."""

    prefix: int
    budget: int | None


def draw(config: TrainingConfig, seed: int, step: int) -> Draw:
    rng = random.Random(seed_for(seed, "view", step))
    prefix, budget = _weighted(rng, config.prefix_lengths), _weighted(rng, config.views.budgets)
    if not config.lam:
        return Draw(prefix, None)
    return Draw(prefix, prefix if budget == FULL else budget)


def _weighted(rng: random.Random, weights: dict[int, float]) -> int:
    # Ascending: the order in which a configuration lists them is no part of its key.
    values = sorted(weights)
    return rng.choices(values, [weights[v] for v in values])[0]


def rate(step: int, config: TrainingConfig) -> float:
    """Learning-rate factor: linear warmup, then cosine to 0."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train(
    drafter: Drafter,
    rows: Sequence[dict[str, Any]],
    config: TrainingConfig,
    *,
    seed: int,
    dtype: str,
    checkpoint_path: Path,
    freeze_embedding: bool = True,
    on_step: OnStep | None = None,
) -> list[dict[str, Any]]:
    """Train `drafter` in place and return the log, one record per step.

    Continues from `checkpoint_path` when it exists; an interrupted run then ends bit-equal to an uninterrupted one on
    the CPU. A step with a loss or gradient that is not finite is skipped and counted. The last `config.validation`
    forced rows are never trained on.
    """
    model = drafter.model
    model.model.embed_tokens.requires_grad_(not freeze_embedding)
    optimizer = _optimizer(model, config)
    state = checkpoint.load(checkpoint_path, model, optimizer) or TrainingState(0, [])
    kept, held_out = split_validation(rows, config.validation)
    sampler = Sampler(kept, config.mixture, seed)
    validation = Sampler(held_out, config.mixture.model_copy(update={"forced": 1, "generated": 0, "repeated": 0}), seed)
    model.train()
    while state.step < config.steps:
        record = _step(drafter, optimizer, sampler, config, seed=seed, step=state.step, dtype=dtype)
        state.step += 1
        if held_out and (state.step % config.eval_every == 0 or state.step == config.steps):
            record["agreement"] = agreement_by_view(drafter, validation, len(held_out), config, seed, dtype)
        state.log.append(record)
        if on_step:
            on_step(record)
        if state.step % config.checkpoint_every == 0 or state.step == config.steps:
            checkpoint.save(checkpoint_path, state, model, optimizer)
    model.eval()
    return state.log


def split_validation(rows: Sequence[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, validation rows): the last `count` forced rows and all else of their documents are held out."""
    forced = [row["doc_id"] for row in rows if row["mode"] == "forced"]
    held_out = set(forced[len(forced) - count :])
    kept = [row for row in rows if row["doc_id"] not in held_out]
    return kept, [row for row in rows if row["doc_id"] in held_out and row["mode"] == "forced"]


def _optimizer(model: Any, config: TrainingConfig) -> torch.optim.AdamW:
    head = list(model.lm_head.parameters())
    body = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("lm_head.")]
    groups = [
        {"params": body, "lr": config.learning_rate, "base": config.learning_rate},
        {"params": head, "lr": config.learning_rate, "base": config.learning_rate * config.head_scale},
    ]
    return torch.optim.AdamW(groups, weight_decay=config.weight_decay, betas=(0.9, 0.95))


def _batch(drafter: Drafter, sampler: Sampler, count: int, step: int, length: int) -> Batch:
    windows = [sampler.draw(step, index, length) for index in range(count)]
    model = drafter.model
    return collate(windows, head_index(drafter.ids, model.config.vocab_size), str(model.device))


def _step(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    sampler: Sampler,
    config: TrainingConfig,
    *,
    seed: int,
    step: int,
    dtype: str,
) -> dict[str, Any]:
    chosen = draw(config, seed, step)
    batch = _batch(drafter, sampler, config.batch_size, step, chosen.prefix + config.continuation)
    factor = rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * factor
    optimizer.zero_grad(set_to_none=True)
    with _autocast(drafter, dtype):
        out = joint_loss(
            drafter, batch, config, prefix=chosen.prefix, budget=chosen.budget, seed=seed_for(seed, "policy", step)
        )
    supervised = out.full.tokens + (out.sparse.tokens if out.sparse else 0)
    record = _record(step, chosen, out, config.learning_rate * factor)
    if not supervised or not torch.isfinite(out.loss):
        return {**record, "skipped": True}
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_((p for p in drafter.model.parameters() if p.requires_grad), config.clip)
    if not torch.isfinite(norm):
        return {**record, "skipped": True}
    optimizer.step()
    return {**record, "grad_norm": float(norm)}


def _autocast(drafter: Drafter, dtype: str) -> Any:
    device = drafter.model.device.type
    return torch.autocast(device, dtype=torch_dtype(dtype), enabled=dtype != "float32")


def _record(step: int, chosen: Draw, out: StepLoss, learning_rate: float) -> dict[str, Any]:
    def figures(part: LossSum | None) -> tuple[float | None, float | None, int]:
        if part is None or not part.tokens:
            return None, None, 0
        mean = float(part.mean().detach())
        return (mean if math.isfinite(mean) else None), part.agreed / part.tokens, part.tokens

    loss_a, agree_a, tokens_a = figures(out.full)
    loss_c, agree_c, tokens_c = figures(out.sparse)
    return {
        "step": step + 1,
        "prefix": chosen.prefix,
        "budget": chosen.budget,
        "loss_a": loss_a,
        "loss_c": loss_c,
        "agree_a": agree_a,
        "agree_c": agree_c,
        "tokens": tokens_a + tokens_c,
        "learning_rate": learning_rate,
        "skipped": False,
        "grad_norm": None,
    }


@torch.no_grad()
def agreement_by_view(
    drafter: Drafter, sampler: Sampler, rows: int, config: TrainingConfig, seed: int, dtype: str
) -> dict[str, float]:
    """Teacher-forced agreement with the verifier on held-out documents: `full`, and each sparse budget by number.

    Continuations after the longest prefix; the same windows at every validation.
    """
    prefix = max(config.prefix_lengths)
    only_tail = config.model_copy(update={"supervise": "continuation", "lam": 1.0})
    sums: dict[str, list[int]] = {}
    budgets = [b for b in config.views.budgets if b != FULL] if config.lam else []
    drafter.model.eval()
    for row in range(rows):
        batch = _batch(drafter, sampler, 1, -1 - row, prefix + config.continuation)
        for budget in budgets or [None]:
            with _autocast(drafter, dtype):
                out = joint_loss(drafter, batch, only_tail, prefix=prefix, budget=budget, seed=seed)
            for name, part in (("full", out.full), (str(budget), out.sparse)):
                if part is not None:
                    agreed, tokens = sums.setdefault(name, [0, 0])
                    sums[name] = [agreed + part.agreed, tokens + part.tokens]
    drafter.model.train()
    return {name: agreed / tokens for name, (agreed, tokens) in sums.items() if tokens}
