"""What can be known before any model is loaded: shapes, positions, corpora. Raises ConfigError in one line."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from bdcore.config import Config, ConfigError, CorpusConfig, GridConfig, TrainingConfig
from bdcore.decoding.methods import METHODS
from bdcore.documents import Document, Prompt, check_corpus, load_documents, shared
from bdcore.evaluation.grid import GREEDY, REPLAY, SAMPLED, cells, unused_exclusions, writes
from bdcore.evaluation.texts import documents_of, prompts_of
from bdcore.kv.budget import STORES_ALL, keys_within
from bdcore.models.loading import check_model, check_vocabulary, load_tokenizer
from bdcore.models.shape import ModelShape, drafter_shape, verifier_shape
from bdcore.runtime import Runtime, seed_for, torch_dtype
from bdcore.targets.prompts import distinct_prompts, one_text
from bdcore.training.batches import none_left


@dataclass(frozen=True)
class Inputs:
    """The documents of a study and the shapes of its models."""

    verifier: ModelShape
    drafter: ModelShape
    training: list[Document]
    corpora: list[list[Document]]
    """For evaluation: the documents of each corpus of the grid."""

    @property
    def evaluation(self) -> list[Document]:
        return [document for documents in self.corpora for document in documents]


def check(config: Config) -> tuple[ModelShape, ModelShape]:
    """Models and corpora exist and fit together. Returns the shapes of verifier and drafter."""
    for field, corpora in (("corpus", config.corpus), ("grid.corpus", config.grid.corpus)):
        for corpus in corpora:
            _check_corpus(field, corpus)
    verifier = verifier_shape(config.verifier)
    drafter = drafter_shape(config.drafter, verifier)
    for name, source in config.grid.drafters.items():
        check_model(f"grid.drafters.{name}", source)
    if config.targets.top_k > verifier.vocab:
        raise ConfigError(
            f"targets.top_k = {config.targets.top_k} exceeds the verifier's vocabulary of {verifier.vocab} ids; "
            f"ask for at most {verifier.vocab}"
        )
    _check_methods(config.grid)
    _check_exclusions(config.grid)
    _check_caches(config.grid)
    _check_positions(config, verifier, drafter)
    return verifier, drafter


def with_budgets(config: Config, runtime: Runtime) -> Config:
    """The study with `grid.budget_bytes` turned into keys, which takes the drafter's shape and the grid's dtype."""
    grid = config.grid
    if not grid.budget_bytes:
        return config
    if found := STORES_ALL.intersection(grid.policy):
        raise ConfigError(
            f"grid.budget_bytes: policy = {min(found)} stores every key, so no budget bounds its memory; give "
            "grid.budgets in keys"
        )
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
    training = [d for corpus in config.corpus for d in _documents("corpus", corpus)]
    found = Inputs(verifier, drafter, training, [_documents("grid.corpus", corpus) for corpus in config.grid.corpus])
    _check_lengths("targets.length", config.targets.length, config.targets.forced, training)
    _check_lengths("targets.prompt_tokens", config.targets.prompt_tokens, config.targets.generated, training)
    for documents in found.corpora:
        _check_lengths(_longest(config.grid), config.grid.longest, config.grid.prompts, documents)
    names = Counter(d.doc_id for d in found.evaluation)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise ConfigError(
            f"grid.corpus: {len(twice)} documents are in two of its corpora (such as {twice[0]}); give each its own"
        )
    if both := shared(training, found.evaluation):
        raise ConfigError(
            f"grid.corpus: {len(both)} of its documents are training documents too (such as {min(both)}); "
            "use another split or another corpus, or remove the copies"
        )
    return found


def check_tokens(config: Config, found: Inputs, tokenizer: Any) -> None:
    """What takes the verifier's tokenizer to know: long enough documents, some left by validation, and
    that a pretrained drafter shares it.
    """
    targets, grid = config.targets, config.grid
    made: dict[str, list[Prompt]] = {}
    for field, mode, length, count in (
        ("targets.length", "forced", targets.length, targets.forced),
        ("targets.prompt_tokens", "generated", targets.prompt_tokens, targets.generated),
    ):
        if count:
            with _named(f"{field} = {length}"):
                seed = seed_for(config.seed, mode)
                made[mode] = distinct_prompts(found.training, tokenizer, length=length, count=count, seed=seed).prompts
    for name, stage in (("base", config.base), ("training", config.training)):
        if stage is not None:
            _check_mixture(name, stage, made)
    seed = seed_for(config.seed, "grid")
    with _named(f"{_longest(grid)} = {grid.longest}"):
        documents_of(grid, found.corpora, tokenizer, seed)
    if writes(grid) and any(d.question for d in found.evaluation):  # the smallest context has least room for one
        with _named("grid.contexts"):
            prompts_of(grid, found.corpora, tokenizer, seed, min(grid.contexts))
    for source in grid.drafters.values():
        check_vocabulary(tokenizer, load_tokenizer(source))
    if config.drafter.kind == "pretrained":
        check_vocabulary(tokenizer, load_tokenizer(config.drafter.source, config.drafter.revision))
        if found.drafter.vocab < len(tokenizer):
            raise ConfigError(
                f"drafter.source = {config.drafter.source}: its {found.drafter.vocab} ids do not cover the "
                f"verifier's {len(tokenizer)}; use a drafter of the same vocabulary"
            )


@contextmanager
def _named(where: str) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_mixture(name: str, stage: TrainingConfig, made: dict[str, list[Prompt]]) -> None:
    """Validation must leave something to train on of every kind of sequence."""
    last = made["forced"][len(made["forced"]) - stage.validation.sequences :]
    for kind, weight in stage.mixture.model_dump().items():
        prompts = made["generated" if kind == "generated" else "forced"] if weight else []
        if prompts and all(any(one_text(p.doc_id, p.ids, q.doc_id, q.ids) for q in last) for p in prompts):
            raise ConfigError(f"{name}.{none_left(kind, weight)}")


def _longest(grid: GridConfig) -> str:
    """What `grid.longest` is made of."""
    return "grid.contexts and the replay after them" if REPLAY in grid.workloads else "grid.contexts"


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


def _check_methods(grid: GridConfig) -> None:
    for name in grid.methods:
        method = METHODS[name]
        if not method.alone and not set(method.workloads) & set(grid.workloads):
            legal = " and ".join(method.workloads)
            raise ConfigError(
                f"grid.workloads = {grid.workloads}: `{name}` is measured on {legal} alone; add one of these to "
                f"workloads, or take {name} out of grid.methods"
            )


def _check_exclusions(grid: GridConfig) -> None:
    if unused := unused_exclusions(grid):
        raise ConfigError(f"grid.exclude: no cell is like {unused[0]}; mend it or take it out")
    if not any(cell.gamma for cell in cells(grid)) and grid.methods != ["ar"]:
        raise ConfigError("grid.exclude: every cell that drafts is excluded")


def _check_caches(grid: GridConfig) -> None:
    for cell in cells(grid):
        if cell.policy in STORES_ALL and cell.position_mode == "in_cache":
            raise ConfigError(
                f"grid.policy = {cell.policy}: keys that come back have no place in the order of position_mode = "
                f"in_cache; use absolute, or exclude {{policy: {cell.policy}, position_mode: in_cache}}"
            )


def _check_positions(config: Config, verifier: ModelShape, drafter: ModelShape) -> None:
    after = _after(config.grid)
    for context, (field, most) in product(config.grid.contexts, after.items()):
        if context + most > verifier.positions:
            raise ConfigError(
                f"grid.contexts = {context}: with {field} = {most} it exceeds the verifier's "
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


def _after(grid: GridConfig) -> dict[str, int]:
    """Tokens after a context, by the setting that asks for them."""
    written = "grid.new_tokens", grid.new_tokens
    asked = {GREEDY: written, SAMPLED: written, REPLAY: ("the replay's tokens", grid.replay_tokens)}
    return dict(asked[workload] for workload in grid.workloads)


def _check_drafter_positions(config: Config, drafter: ModelShape) -> None:
    grid, longest = config.grid, max(config.grid.contexts) + max(_after(config.grid).values())
    # The position mode of a cell with two levels is that of its middle one.
    unbounded = any(c.drafter and c.position_mode == "absolute" and not c.how.two_levels for c in cells(grid))
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
