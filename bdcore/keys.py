"""The keys of a study's artifacts, each from its own settings, its inputs' keys and the code of `bdcore`."""

from dataclasses import dataclass

from bdcore.config import Config, ModelConfig
from bdcore.documents import documents_key
from bdcore.identity import digest, stage_key
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
    run = stage_key("evaluation", grid, {"base": base, "trained": trained, "corpus": evaluation, "verifier": verifier})
    return Keys(verifier, training, evaluation, targets, base, trained, run)
