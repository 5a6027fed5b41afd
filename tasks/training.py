"""Stage 2: the base drafter, and the drafter trained on many sparse views."""

import time
from pathlib import Path
from typing import Any

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from bdcore.config import TrainingConfig
from bdcore.identity import exclusive, read_manifest, staging, write_json, write_manifest
from bdcore.models.drafter import Drafter, load_drafter, prune, read_facts, save_drafter, slice_verifier
from bdcore.models.heads import choose_layers, layer_scores
from bdcore.models.loading import load_model, load_tokenizer, quiet
from bdcore.runtime import environment, seed_for
from bdcore.study import Study
from bdcore.targets.rows import TargetRows, id_counts
from bdcore.training.checkpoint import Checkpoints, TrainingState
from bdcore.training.loop import Stage, train
from bdcore.training.processes import train_together
from bdcore.training.weights import keep_other
from tasks.progress import ArtifactRef, OnRecord, Progress, announce

LOG = "training_log.json"


@task(cache_policy=NO_CACHE)
def make_base(
    study: Study, verifier: ArtifactRef, targets: ArtifactRef, on_record: OnRecord | None = None
) -> ArtifactRef:
    """The drafter before multi-view training: sliced from the verifier and trained briefly, or a pretrained model."""
    return _drafter(study, "base", study.keys.base, lambda out: _make_base(study, verifier, targets, out, on_record))


@task(cache_policy=NO_CACHE)
def train_drafter(
    study: Study, verifier: ArtifactRef, base: ArtifactRef, targets: ArtifactRef, on_record: OnRecord | None = None
) -> ArtifactRef:
    """The BudgetDraft drafter: the base trained on full and sparse views of the same prefixes."""
    return _drafter(
        study, "trained", study.keys.trained, lambda out: _make_trained(study, verifier, base, targets, out, on_record)
    )


def _drafter(study: Study, role: str, key: str, make: Any) -> ArtifactRef:
    directory, checkpoints = study.workspace.drafter(key), _checkpoints(study, key)
    with exclusive(directory):
        checkpoints.remove_partials()  # each as large as weights and optimizer, and no rerun writes the same name
        manifest = read_manifest(directory)
        announce(f"{role} drafter", directory, manifest)
        reused = manifest is not None
        if not reused:
            start = time.perf_counter()
            with quiet(), staging(directory) as partial:
                facts = make(partial)
                seconds = time.perf_counter() - start
                write_manifest(partial, key, seconds=seconds, environment=environment(), **facts)
        checkpoints.remove()
    return ArtifactRef(str(directory), key, 0, reused)


def _checkpoints(study: Study, key: str) -> Checkpoints:
    # Beside the artifact, so that a killed run finds them and a finished one can drop them.
    return Checkpoints(study.workspace.drafter(key).with_name(f".{key}.checkpoint.pt"))


def _make_base(
    study: Study, verifier: ArtifactRef, targets: ArtifactRef, out: Path, on_record: OnRecord | None
) -> dict[str, Any]:
    config = study.config
    tokenizer = load_tokenizer(verifier.path, config.verifier.revision)
    drafter, facts = _pretrained(study) if config.drafter.kind == "pretrained" else _slice(study, verifier.path)
    if config.drafter.vocab_size is not None:
        counts = id_counts(Path(targets.path), study.inputs.verifier.vocab)
        drafter = prune(drafter, counts, config.drafter.vocab_size)
    state = TrainingState()
    if config.base is not None:
        state = _train(study, "base", drafter, config.base, Path(targets.path), study.keys.base, on_record)
        keep_other(_checkpoints(study, study.keys.base), config.base, state, out)
    return _save(study, drafter, tokenizer, out, {**facts, "stage": "base"}, state)


def _pretrained(study: Study) -> tuple[Drafter, dict[str, Any]]:
    source, revision = study.config.drafter.source, study.config.drafter.revision
    where = {"dtype": torch.float32, "device": study.runtime.device}
    drafter = load_drafter(source, verifier_vocab=study.inputs.verifier.vocab, revision=revision, **where)
    return drafter, {"kind": "pretrained", "source": source}


def _slice(study: Study, source: str) -> tuple[Drafter, dict[str, Any]]:
    config = study.config.drafter
    model = load_model(
        source, dtype=torch.float32, device=study.runtime.device, revision=study.config.verifier.revision
    )
    scores = layer_scores(model, seed=seed_for(study.config.seed, "heads"))
    layers = config.layers or choose_layers(scores, config.num_layers)
    get_run_logger().info(
        "base drafter: verifier layers %s (%s)", layers, "configured" if config.layers else "by measured copying scores"
    )
    drafter = slice_verifier(model, layers, ids=None, rope_theta=config.rope_theta, max_positions=config.max_positions)
    scored = [vars(score) for score in scores]
    return drafter, {"kind": "sliced", "source": study.config.verifier.source, "layers": layers, "layer_scores": scored}


def _make_trained(
    study: Study, verifier: ArtifactRef, base: ArtifactRef, targets: ArtifactRef, out: Path, on_record: OnRecord | None
) -> dict[str, Any]:
    drafter = load_drafter(
        base.path, verifier_vocab=study.inputs.verifier.vocab, dtype=torch.float32, device=study.runtime.device
    )
    stage = study.config.training
    state = _train(study, "trained", drafter, stage, Path(targets.path), study.keys.trained, on_record)
    keep_other(_checkpoints(study, study.keys.trained), stage, state, out)
    _extend_positions(drafter, stage)
    facts = {k: v for k, v in read_facts(base.path).items() if k != "head_ids"}
    tokenizer = load_tokenizer(verifier.path, study.config.verifier.revision)
    return _save(study, drafter, tokenizer, out, {**facts, "stage": "trained", "base": base.key}, state)


def _extend_positions(drafter: Drafter, stage: TrainingConfig) -> None:
    """A drafter trained at absolute positions beyond its own knows them now."""
    config = drafter.model.config
    config.max_position_embeddings = max(config.max_position_embeddings, stage.longest)


def _train(
    study: Study,
    role: str,
    drafter: Drafter,
    config: TrainingConfig,
    targets: Path,
    key: str,
    on_record: OnRecord | None,
) -> TrainingState:
    progress: list[Progress] = []
    since = time.monotonic()

    def step(record: dict[str, Any]) -> None:
        if not progress:
            done = record["step"] - 1
            what = (f"{role}-drafter", f"{role} drafter", config.steps, "steps")
            progress.append(Progress(*what, done=done, since=since))
        progress[0](record["step"], _losses(record))
        if on_record:
            on_record(record)

    stage = Stage(
        drafter,
        TargetRows(targets),
        config,
        seed=seed_for(study.config.seed, role, config.seed),
        dtype=study.runtime.training_dtype,
        checkpoints=_checkpoints(study, key),
        freeze_embedding=study.config.drafter.kind == "sliced",
        threads=study.config.runtime.threads,
    )
    state = train_together(stage, targets, step) if config.processes > 1 else train(stage, step)
    _tell_end(role, config, state)
    return state


def _tell_end(role: str, config: TrainingConfig, state: TrainingState) -> None:
    logger, skipped = get_run_logger(), sum(record["skipped"] for record in state.log)
    if skipped:
        logger.warning("%s drafter: %d of %d steps skipped (nothing finite to learn)", role, skipped, state.step)
    if state.step < config.steps:
        logger.info(
            "%s drafter: stopped at step %d of %d, %d validations without a better one",
            *(role, state.step, config.steps, state.stale),
        )
    if state.best_step:
        kept = state.best_step if config.validation.keep == "best" else state.step
        logger.info(
            "%s drafter: best validation %.1f %% at step %d; the weights of step %d are kept",
            *(role, 100 * state.best_score, state.best_step, kept),
        )


def _losses(record: dict[str, Any]) -> str:
    parts = []
    for name, branch in (("L_A", "a"), ("L_C", "c")):
        if record[f"loss_{branch}"] is not None:
            parts.append(f"{name} {record[f'loss_{branch}']:.2f}, agreement {record[f'agree_{branch}']:.0%}")
    return "; ".join(parts)


def _save(
    study: Study, drafter: Drafter, tokenizer: Any, out: Path, facts: dict[str, Any], state: TrainingState
) -> dict[str, Any]:
    config = study.config
    stage = config.base if facts["stage"] == "base" else config.training
    facts = {
        **facts,
        "study": config.name,
        "targets": study.keys.targets,
        "verifier": config.verifier.source,
        "training": stage.model_dump(mode="json") if stage else None,
        "trained_tokens": sum(record["tokens"] for record in state.log),
        "steps": state.step,
        "skipped_steps": sum(record["skipped"] for record in state.log),
        "best_step": state.best_step or None,
        "best_score": state.best_score if state.best_step else None,
    }
    save_drafter(drafter, out, tokenizer=tokenizer, facts=facts)
    write_json(out / LOG, state.log)
    return {k: v for k, v in facts.items() if k != "layer_scores"}
