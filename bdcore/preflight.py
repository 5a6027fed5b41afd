"""What can be known before any model is loaded: shapes, positions, corpora. Raises ConfigError in one line."""

from dataclasses import dataclass
from typing import Any

from bdcore.config import Config, ConfigError, CorpusConfig
from bdcore.documents import Document, build_prompts, check_corpus, load_documents
from bdcore.evaluation.grid import cells
from bdcore.kv.budget import FULL, keys_within
from bdcore.models.loading import check_vocabulary, load_tokenizer
from bdcore.models.shape import ModelShape, drafter_shape, verifier_shape
from bdcore.runtime import Runtime, torch_dtype


@dataclass(frozen=True)
class Inputs:
    """The documents of a study and the shapes of its models."""

    verifier: ModelShape
    drafter: ModelShape
    training: list[Document]
    evaluation: list[Document]


def check(config: Config) -> tuple[ModelShape, ModelShape]:
    """Models and corpora exist and fit together. Returns the shapes of verifier and drafter."""
    _check_corpus("corpus", config.corpus)
    _check_corpus("grid.corpus", config.grid.corpus)
    verifier = verifier_shape(config.verifier)
    drafter = drafter_shape(config.drafter, verifier)
    _check_positions(config, verifier, drafter)
    return verifier, drafter


def with_budgets(config: Config, runtime: Runtime) -> Config:
    """The study with `grid.budget_bytes` turned into keys, which takes the drafter's shape and the grid's dtype."""
    grid = config.grid
    if not grid.budget_bytes:
        return config
    drafter = drafter_shape(config.drafter, verifier_shape(config.verifier))
    key_bytes = drafter.kv_bytes(1, torch_dtype(runtime.grid_dtype).itemsize)
    try:
        found = [
            keys_within(
                size,
                key_bytes=key_bytes,
                block=max(max(grid.gammas) + 1, 2),
                chunk=grid.chunk,
                sinks=grid.sinks,
                recent=grid.recent,
            )
            for size in grid.budget_bytes
        ]
    except ValueError as error:
        raise ConfigError(f"grid.{error}") from error
    budgets = list(dict.fromkeys([*grid.budgets, *found]))
    return config.model_copy(update={"grid": grid.model_copy(update={"budgets": budgets, "budget_bytes": []})})


def inputs(config: Config) -> Inputs:
    """Everything `check` knows, and the documents, of which there must be enough that are long enough."""
    verifier, drafter = check(config)
    training = _documents("corpus", config.corpus)
    evaluation = _documents("grid.corpus", config.grid.corpus)
    _check_lengths("targets.length", config.targets.length, config.targets.forced, training)
    _check_lengths("targets.prompt_tokens", config.targets.prompt_tokens, config.targets.generated, training)
    _check_lengths("grid.contexts", max(config.grid.contexts), config.grid.prompts, evaluation)
    shared = {d.doc_id for d in training} & {d.doc_id for d in evaluation}
    if shared:
        raise ConfigError(
            f"grid.corpus: {len(shared)} of its documents are training documents too (such as {sorted(shared)[0]}); "
            "use another split or another corpus"
        )
    return Inputs(verifier, drafter, training, evaluation)


def check_tokens(config: Config, found: Inputs, tokenizer: Any) -> None:
    """What takes the verifier's tokenizer to know: long enough documents, and that a pretrained drafter shares it."""
    targets, grid = config.targets, config.grid
    wanted = (
        ("targets.length", found.training, targets.length, targets.forced),
        ("targets.prompt_tokens", found.training, targets.prompt_tokens, targets.generated),
        ("grid.contexts", found.evaluation, max(grid.contexts), grid.prompts),
    )
    for field, documents, length, count in wanted:
        if count:
            try:
                build_prompts(documents, tokenizer, length=length, count=count, seed=config.seed)
            except ConfigError as error:
                raise ConfigError(f"{field} = {length}: {error}") from error
    if config.drafter.kind == "pretrained":
        check_vocabulary(tokenizer, load_tokenizer(config.drafter.source, config.drafter.revision))
        if found.drafter.vocab < len(tokenizer):
            raise ConfigError(
                f"drafter.source = {config.drafter.source}: its {found.drafter.vocab} ids do not cover the "
                f"verifier's {len(tokenizer)}; use a drafter of the same vocabulary"
            )


def _check_corpus(field: str, corpus: CorpusConfig) -> None:
    try:
        check_corpus(corpus)
    except ConfigError as error:
        raise ConfigError(_prefixed(field, error)) from error


def _documents(field: str, corpus: CorpusConfig) -> list[Document]:
    try:
        return load_documents(corpus)
    except ConfigError as error:
        raise ConfigError(_prefixed(field, error)) from error


def _prefixed(field: str, error: ConfigError) -> str:
    text = str(error)
    return text.replace("corpus", field, 1) if text.startswith("corpus") else f"{field}: {text}"


def _check_lengths(field: str, length: int, count: int, documents: list[Document]) -> None:
    # A token is at least one byte: fewer bytes than tokens wanted is too short for sure.
    enough = sum(len(d.text.encode()) >= length for d in documents)
    if enough < count:
        raise ConfigError(
            f"{field} = {length}: {count} documents of that many tokens are needed, at most {enough} of "
            f"{len(documents)} are long enough; lower {field}, ask for fewer, or use another corpus"
        )


def _check_positions(config: Config, verifier: ModelShape, drafter: ModelShape) -> None:
    grid, most = config.grid, config.grid.new_tokens
    for context in grid.contexts:
        if context + most > verifier.positions:
            raise ConfigError(
                f"grid.contexts = {context}: with grid.new_tokens = {most} it exceeds the verifier's "
                f"{verifier.positions} positions; the longest legal context is {verifier.positions - most}"
            )
    if config.targets.length > verifier.positions:
        raise ConfigError(
            f"targets.length = {config.targets.length} exceeds the verifier's {verifier.positions} positions"
        )
    generated = config.targets.prompt_tokens + config.targets.new_tokens
    if config.targets.generated and generated > verifier.positions:
        raise ConfigError(
            f"targets.prompt_tokens + targets.new_tokens = {generated} exceeds the verifier's "
            f"{verifier.positions} positions"
        )
    if config.drafter.beyond_positions == "refuse":
        _check_drafter_positions(config, drafter)


def _check_drafter_positions(config: Config, drafter: ModelShape) -> None:
    grid, longest = config.grid, max(config.grid.contexts) + config.grid.new_tokens
    # Keys of a full cache stand at their own positions in both modes.
    unbounded = grid.position_mode == "absolute" or any(c.drafter and c.budget == FULL for c in cells(grid))
    if longest > drafter.positions and unbounded:
        raise ConfigError(
            f"grid.contexts = {max(grid.contexts)}: beyond the drafter's {drafter.positions} positions; use a "
            "shorter context, drafter.beyond_positions = extrapolate, or grid.position_mode = in_cache with sparse "
            "budgets alone"
        )
    for name, stage in (("base", config.base), ("training", config.training)):
        if stage is not None and stage.longest > drafter.positions:
            raise ConfigError(
                f"{name}: prefix + continuation = {stage.longest} is beyond the drafter's {drafter.positions} "
                "positions; use shorter ones or drafter.beyond_positions = extrapolate"
            )
