"""The keys of a study's artifacts, each from its own settings, its inputs' keys and the code of `bdcore`."""

from dataclasses import dataclass
from pathlib import Path

from bdcore.config import Config, ModelConfig
from bdcore.documents import documents_key
from bdcore.identity import digest, read_manifest, stage_key
from bdcore.models.loading import model_key
from bdcore.preflight import Inputs
from bdcore.runtime import Runtime


@dataclass(frozen=True)
class Keys:
    verifier: str
    training_corpus: str
    evaluation_corpus: str
    targets: str
    base: str
    trained: str
    run: str

    def facts(self) -> dict[str, str]:
        return vars(self).copy()


def study_keys(config: Config, runtime: Runtime, inputs: Inputs) -> Keys:
    """What each stage's output will be called, before it exists."""
    verifier = model_key(config.verifier)
    evaluation = documents_key(inputs.evaluation)
    # Prompts are drawn from the documents in the order in which corpora are listed.
    training = digest(documents_key(inputs.training), [d.doc_id for d in inputs.training])
    common = {"seed": config.seed, "dtype": runtime.dtype, "device": runtime.device}
    targets = stage_key("targets", [config.targets, common], {"verifier": verifier, "corpus": training})
    sources = {"verifier": verifier, "targets": targets}
    if config.drafter.kind == "pretrained":  # by content: a folder may change under its name
        pretrained = ModelConfig(source=config.drafter.source, revision=config.drafter.revision)
        sources["drafter"] = model_key(pretrained)
    learning = {**common, "dtype": runtime.training_dtype}
    base = stage_key("base", [config.drafter, config.base, learning], sources)
    trained = stage_key("training", [config.training, learning], {"base": base, "targets": targets})
    grid = [config.grid, config.drafter.beyond_positions, config.seed, runtime.grid_dtype, runtime.device]
    measured = {"base": base, "trained": trained, "corpus": evaluation, "verifier": verifier}
    measured |= {f"drafter {name}": key for name, key in drafter_keys(config).items()}
    run = stage_key("evaluation", grid, measured)
    return Keys(verifier, training, evaluation, targets, base, trained, run)


def drafter_keys(config: Config) -> dict[str, str]:
    """Name -> key of the drafters a grid measures beside the study's own: one of our folders has a key of its own."""
    return {
        name: _made_key(source) or model_key(ModelConfig(source=source))
        for name, source in config.grid.drafters.items()
    }


def _made_key(source: str) -> str | None:
    manifest = read_manifest(Path(source))
    return None if manifest is None else manifest.get("key")
