"""The resumable training loop: draw sequences and views, one step on L_A + lam * L_C, log, validate, checkpoint."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from bdcore.config import TrainingConfig
from bdcore.models.drafter import Drafter
from bdcore.runtime import seed_for, torch_dtype
from bdcore.targets.rows import TargetRows
from bdcore.training import checkpoint
from bdcore.training.batches import Batch, Sampler, collate_for, split_validation
from bdcore.training.checkpoint import Checkpoints, TrainingState
from bdcore.training.losses import LossSum
from bdcore.training.objective import Draw, StepLoss, draw, joined, losses, supervised
from bdcore.training.team import ALONE, Team
from bdcore.training.validation import held_out_batches, score, validate
from bdcore.training.views import checkpoint_layers

Record = dict[str, Any]
OnStep = Callable[[Record], None]


class Interrupted(RuntimeError):
    """Training was asked to end (SIGTERM). Says which step is saved; the same command goes on from there."""


def rate(step: int, config: TrainingConfig) -> float:
    """Learning-rate factor: linear warmup, then cosine to 0."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True)
class Stage:
    """What a training stage works with."""

    drafter: Drafter
    rows: TargetRows
    config: TrainingConfig
    seed: int
    dtype: str
    """Of autocast; weights stay float32."""
    checkpoints: Checkpoints
    freeze_embedding: bool = True
    team: Team = ALONE
    threads: int | None = None
    """CPU threads of each process that `train_together` starts; None: its share of the cores."""


def train(stage: Stage, on_step: OnStep | None = None) -> TrainingState:
    """Train the drafter in place and return the state at its end, with one log record per step.

    Continues from the checkpoint when there is one; an interrupted run then ends bit-equal to an uninterrupted one on
    the CPU. A step with a loss or gradient that is not finite is skipped and counted. The last
    `validation.sequences` forced rows are never trained on. With `validation.keep = best` the drafter ends with the
    best weights; else with the last. Nothing is dropped out, whatever the model's config says. Raises Interrupted on
    SIGTERM.
    """
    config, model, team = stage.config, stage.drafter.model, stage.team
    model.model.embed_tokens.requires_grad_(not stage.freeze_embedding)
    _without_dropout(model)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    optimizer = _optimizer(model, config)
    state = checkpoint.load(stage.checkpoints.state, model, optimizer) or TrainingState()
    kept, held_out = split_validation(stage.rows, config.validation.sequences)
    sampler = Sampler(stage.rows, kept, config.mixture, stage.seed)
    judged = held_out_batches(stage.rows, held_out, stage.drafter, config.longest) if team.leads else []
    model.train()
    with _listening() as told:
        while state.step < config.steps and not _stale(state, config):
            record = _step(stage, optimizer, sampler, state.step)
            state.step += 1
            if held_out and (state.step % config.validation.every == 0 or state.step == config.steps):
                _judge(stage, state, record, partial(validate, stage.drafter, judged, config))
            state.log.append(record)
            if on_step and team.leads:
                on_step(record)
            stop = bool(team.sums(float(told.is_set()))[0])
            if team.leads and (stop or state.step % config.checkpoint_every == 0 or ended(state, config)):
                checkpoint.save(stage.checkpoints.state, state, model, optimizer)
            if stop and not ended(state, config):
                raise Interrupted(f"stopped after step {state.step} of {config.steps}; run the same command to go on")
    if config.validation.keep == "best" and state.best_step not in (0, state.step):
        checkpoint.load(stage.checkpoints.best, model)
    model.eval()
    return state


def _without_dropout(model: Any) -> None:
    """Our attention has none, and a step then is a function of (seed, step) alone. The config keeps what it says."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0


def _stale(state: TrainingState, config: TrainingConfig) -> bool:
    return bool(config.validation.patience) and state.stale >= config.validation.patience


def ended(state: TrainingState, config: TrainingConfig) -> bool:
    """Whether there is nothing left to train: all steps are done, or validation gets no better."""
    return state.step == config.steps or _stale(state, config)


@contextlib.contextmanager
def _listening() -> Generator[threading.Event]:
    """Set on SIGTERM, so that a step is finished and saved first. Only the main thread may listen."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def hear(number: int, frame: FrameType | None) -> None:
        told.set()

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _optimizer(model: Any, config: TrainingConfig) -> torch.optim.AdamW:
    head = list(model.lm_head.parameters())
    apart = {id(p) for p in head}  # by identity: a tied head is named after the embedding, and learns as the head
    body = [p for p in model.parameters() if p.requires_grad and id(p) not in apart]
    groups = [
        {"params": body, "lr": config.learning_rate, "base": config.learning_rate},
        {"params": head, "lr": config.learning_rate, "base": config.learning_rate * config.head_scale},
    ]
    return torch.optim.AdamW(groups, weight_decay=config.weight_decay, betas=(0.9, 0.95))


def _step(stage: Stage, optimizer: torch.optim.Optimizer, sampler: Sampler, step: int) -> Record:
    config, drafter, team = stage.config, stage.drafter, stage.team
    chosen = draw(config, stage.seed, step)
    first, length = team.rank * config.accumulate, chosen.prefix + config.continuation
    batches = [
        collate_for(stage.drafter, [sampler.draw(step, i, length) for i in _indices(config, m)])
        for m in range(first, first + config.accumulate)
    ]
    # Means are over all tokens of the step, whichever forward or process they are in; their number is known before.
    counts = [supervised(batch, config, chosen) for batch in batches]
    tokens_a, tokens_c = (int(n) for n in team.sums(sum(a for a, _ in counts), sum(c for _, c in counts)))
    factor = rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * factor
    optimizer.zero_grad(set_to_none=True)
    found = [_backward(stage, batch, chosen, tokens_a, tokens_c, step) for batch in batches] if tokens_a else []
    record = _record(team, step, chosen, found, config.learning_rate * factor)
    if not found:
        return {**record, "skipped": True}
    parameters = [p for p in drafter.model.parameters() if p.requires_grad]
    team.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip)
    if not torch.isfinite(norm):
        return {**record, "skipped": True}
    optimizer.step()
    return {**record, "grad_norm": float(norm)}


def _indices(config: TrainingConfig, micro_batch: int) -> range:
    return range(micro_batch * config.batch_size, (micro_batch + 1) * config.batch_size)


def _backward(stage: Stage, batch: Batch, chosen: Draw, tokens_a: int, tokens_c: int, step: int) -> StepLoss:
    """Add this batch's share to the gradients. Its sums, without a graph."""
    device = stage.drafter.model.device.type
    with torch.autocast(device, dtype=torch_dtype(stage.dtype), enabled=stage.dtype != "float32"):
        out = losses(stage.drafter, batch, stage.config, chosen, seed=seed_for(stage.seed, "policy", step))
    loss = out.full.total / tokens_a
    if out.sparse is not None and tokens_c:
        loss = loss + stage.config.lam * out.sparse.total / tokens_c
    loss.backward()
    return StepLoss(_bare(out.full), {name: _bare(part) for name, part in out.views.items()})


def _bare(part: LossSum) -> LossSum:
    return LossSum(part.total.detach(), part.tokens, part.agreed)


def _record(team: Team, step: int, chosen: Draw, found: list[StepLoss], learning_rate: float) -> Record:
    names = sorted({block.sight.name for block in chosen.blocks})
    parts = [[out.full for out in found], *([out.views[name] for out in found] for name in names)]
    figures = [_figures(team, part) for part in parts]
    sparse = _figures(team, [part for group in parts[1:] for part in group])
    return {
        "step": step + 1,
        "prefix": chosen.prefix,
        "loss_a": figures[0]["loss"],
        "agree_a": figures[0]["agreement"],
        "loss_c": sparse["loss"],
        "agree_c": sparse["agreement"],
        "views": dict(zip(names, figures[1:], strict=True)),
        "tokens": figures[0]["tokens"] + sparse["tokens"],
        "learning_rate": learning_rate,
        "skipped": False,
        "grad_norm": None,
    }


def _figures(team: Team, parts: list[LossSum]) -> Record:
    """Mean loss, agreement and number of tokens over all forwards and processes; None where undefined."""
    whole = joined(parts) if parts else None
    mine = (float(whole.total), whole.tokens, whole.agreed) if whole else (0.0, 0, 0)
    total, tokens, agreed = team.sums(*mine)
    mean = total / tokens if tokens else float("nan")
    return {
        "loss": mean if math.isfinite(mean) else None,
        "agreement": agreed / tokens if tokens else None,
        "tokens": int(tokens),
    }


def _judge(stage: Stage, state: TrainingState, record: Record, measure: Callable[..., dict[str, Any]]) -> None:
    """Validate on the leading rank; everyone learns the score, so that all stop at the same step."""
    found: dict[str, Any] = {}
    if stage.team.leads:
        found = measure(seed=seed_for(stage.seed, "validation"))
    value = stage.team.sums(score(found) if stage.team.leads else 0.0)[0]
    record.update(found, score=value if math.isfinite(value) else None)
    if value > state.best_score:
        state.best_step, state.best_score, state.stale = state.step, value, 0
        if stage.team.leads:
            checkpoint.save_weights(stage.checkpoints.best, stage.drafter.model)
    else:
        state.stale += 1
