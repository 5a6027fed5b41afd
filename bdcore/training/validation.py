"""Held-out documents while training: agreement with the verifier by view, teacher-forced and through a real cache."""

from collections.abc import Sequence

import torch

from bdcore.config import TrainingConfig
from bdcore.kv.budget import FULL, FULL_POLICY
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan, Stepper
from bdcore.targets.rows import TargetRows
from bdcore.training.batches import Batch, collate_for, from_row
from bdcore.training.losses import IGNORE
from bdcore.training.objective import Draw, losses
from bdcore.training.views import Block, Sight

FULL_SIGHT = Sight(FULL_POLICY, FULL, "absolute")
_MOST_JUDGED = 256


def judged(config: TrainingConfig) -> int:
    """Newest tokens of a held-out sequence that are judged: as many as the paper continues, less where it is short."""
    return min(_MOST_JUDGED, config.longest // 2)


def sights(config: TrainingConfig) -> list[Sight]:
    """Every sparse view a stage may draw; none where lam = 0."""
    views = config.views
    found = [
        Sight(policy, budget, mode)
        for policy, a in sorted(views.policy.items())
        for budget, b in sorted(views.budgets.items())
        for mode, c in sorted(views.position_mode.items())
        if a * b * c > 0
    ]
    return found if config.lam else []


@torch.no_grad()
def agreement(drafter: Drafter, batches: list[Batch], config: TrainingConfig, *, seed: int) -> dict[str, float]:
    """Share of the continuation's tokens at which the drafter's choice is the verifier's, by view; `full`: L_A's.

    Teacher-forced, at the end of the longest sequences of the stage. What a pruned head cannot say is a miss, as it is
    when drafting.
    """
    prefix = config.longest - judged(config)
    tail = config.model_copy(update={"supervise": "continuation", "continuation": judged(config)})
    chosen = Draw(prefix, [Block(prefix, sight) for sight in sights(config)])
    sums: dict[str, list[int]] = {}
    for batch in batches:
        out = losses(drafter, batch, tail, chosen, seed=seed)
        asked = batch.targets[prefix:].known  # by every view
        for name, part in {"full": out.full, **out.views}.items():
            agreed, tokens = sums.setdefault(name, [0, 0])
            sums[name] = [agreed + part.agreed, tokens + asked]
    return {name: agreed / tokens for name, (agreed, tokens) in sums.items() if tokens}


def decoded(drafter: Drafter, batches: list[Batch], config: TrainingConfig, *, seed: int) -> dict[str, float]:
    """The same share with the cache of decoding: the text before is read piece by piece within the budget, then token
    by token, each position a draft of one token. By view, over `validation.decode_tokens` positions per sequence.
    """
    count = min(config.validation.decode_tokens, judged(config))
    prefix = config.longest - judged(config)
    out: dict[str, float] = {}
    for sight in [FULL_SIGHT, *sights(config)]:
        hits = [hit for batch in batches for hit in _walk(drafter, batch, sight, config, prefix, count, seed)]
        if hits:
            out[sight.name] = sum(hits) / len(hits)
    return out


def _walk(
    drafter: Drafter, batch: Batch, sight: Sight, config: TrainingConfig, prefix: int, count: int, seed: int
) -> list[bool]:
    ids, labels = batch.ids_BT[0].tolist(), batch.targets.labels[0].tolist()
    plan = CachePlan(
        capacity=0,
        budget=sight.budget,
        selection=config.views.selection(sight.policy, seed),
        position_mode=sight.position_mode,
        block=2,
        extrapolate=True,
    )
    stepper = Stepper(drafter.model, plan.sized(len(ids)))
    stepper.prefill(ids[:prefix])
    hits: list[bool] = []
    for position in range(prefix, prefix + count):
        stepper.fit()
        best = int(stepper.feed(ids[position : position + 1], last_only=True)[0, -1].argmax())
        if labels[position] != IGNORE:
            hits.append(best == labels[position])
    return hits


def held_out_batches(rows: TargetRows, use: Sequence[int], drafter: Drafter, longest: int) -> list[Batch]:
    """The last `longest` tokens of every row to be used, one (1, longest) batch each.

    Nothing is drawn: stages and seeds are judged on the same text, and stages of other lengths on the same last tokens.
    """
    found = [from_row(rows[i]) for i in use]
    return [collate_for(drafter, [tokens.window(max(0, len(tokens) - longest), longest)]) for tokens in found]


def validate(
    drafter: Drafter, batches: list[Batch], config: TrainingConfig, *, seed: int
) -> dict[str, dict[str, float]]:
    """{`agreement`: by view, `decoded`: by view (where asked for)} on the same windows at every validation."""
    drafter.model.eval()
    found = {"agreement": agreement(drafter, batches, config, seed=seed)}
    if config.validation.decode_tokens:
        found["decoded"] = decoded(drafter, batches, config, seed=seed)
    drafter.model.train()
    return found


def score(found: dict[str, dict[str, float]]) -> float:
    """One figure to keep the best weights by: the mean over views, through a real cache where that was measured."""
    values = list((found.get("decoded") or found["agreement"]).values())
    return sum(values) / len(values) if values else float("-inf")
