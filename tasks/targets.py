"""Stage 1: the verifier's greedy tokens to Parquet, shard by shard."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from bdcore.config import ConfigError
from bdcore.documents import Prompt
from bdcore.identity import exclusive, file_digest, read_manifest, write_manifest
from bdcore.models.loading import eos_ids, load_model, load_tokenizer, materialise, quiet
from bdcore.runtime import environment, seed_for, torch_dtype
from bdcore.schema import TARGETS, write_rows
from bdcore.study import Study
from bdcore.targets.generate import Greedy, OnTokens, forced, generated
from bdcore.targets.prompts import DistinctPrompts, check_held_out, distinct_prompts
from bdcore.targets.rows import row
from bdcore.targets.shards import shard_facts
from tasks.progress import ArtifactRef, Progress, announce


@task(cache_policy=NO_CACHE)
def prepare_verifier(study: Study) -> ArtifactRef:
    """The verifier as a folder or hub id that loads; the embedded one is converted once."""
    get_run_logger().info("verifier: %s on %s", study.config.verifier.source, study.runtime.reason)
    with quiet():
        source = materialise(study.config.verifier, study.workspace.models)
    return ArtifactRef(source, study.keys.verifier, 0, reused=False)


@task(cache_policy=NO_CACHE)
def generate_targets(study: Study, verifier: ArtifactRef) -> ArtifactRef:
    """Forced and generated targets as Parquet shards; finished shards of a killed run are kept, damaged ones remade."""
    directory, key = study.workspace.targets(study.keys.targets), study.keys.targets
    with exclusive(directory):
        manifest = _undamaged(directory, read_manifest(directory))
        announce("targets", directory, manifest)
        if manifest is None:
            manifest = _make(study, verifier.path, directory, key)
            return ArtifactRef(str(directory), key, manifest["rows"], reused=False)
    return ArtifactRef(str(directory), key, manifest["rows"], reused=True)


def _undamaged(directory: Path, manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """The manifest if every shard has the bytes that were written; shards that have not are named and removed.

    Size and a read do not tell: Parquet has no checksum of its own, and a changed byte may give other ids.
    """
    if manifest is None:
        return None
    damaged = [name for name, known in manifest["digests"].items() if file_digest(directory / name) != known]
    for name in damaged:
        get_run_logger().warning("targets: %s is damaged; making it again", directory / name)
        (directory / name).unlink()
    return None if damaged else manifest


@dataclass(frozen=True)
class Shard:
    """One Parquet file to be: its mode and the prompts of its rows."""

    path: Path
    mode: str
    prompts: list[Prompt]


def _make(study: Study, source: str, directory: Path, key: str) -> dict[str, Any]:
    start = time.perf_counter()
    with quiet():
        tokenizer = load_tokenizer(source, study.config.verifier.revision)
        sets = _prompt_sets(study, tokenizer)
        shards = _shards(directory, sets, study.config.targets.shard_size)
        finished = {shard.path: _finished(shard) for shard in shards}
        kept = {path: tokens for path, tokens in finished.items() if tokens is not None}
        made = _write_missing(study, source, tokenizer, shards, kept)
    return write_manifest(
        directory,
        key,
        stage="targets",
        config=study.config.targets.model_dump(mode="json"),
        inputs={"verifier": study.keys.verifier, "corpus": study.keys.training_corpus},
        rows=sum(len(shard.prompts) for shard in shards),
        tokens=sum(kept.values()) + sum(tokens for tokens, _ in made.values()),
        too_short={mode: found.too_short for mode, found in sets.items()},
        duplicates={mode: found.duplicates for mode, found in sets.items()},
        digests={shard.path.name: file_digest(shard.path) for shard in shards},
        **_speeds(made),
        seconds=time.perf_counter() - start,
        environment=environment(),
    )


def _prompt_sets(study: Study, tokenizer: Any) -> dict[str, DistinctPrompts]:
    """The prompts of each mode: the same for the same study, whatever an earlier run has finished."""
    targets = study.config.targets
    wanted = {
        "forced": ("length", targets.length, targets.forced),
        "generated": ("prompt_tokens", targets.prompt_tokens, targets.generated),
    }
    sets: dict[str, DistinctPrompts] = {}
    for mode, (field, length, count) in wanted.items():
        if not count:
            continue
        seed = seed_for(study.config.seed, mode)
        try:
            found = distinct_prompts(study.inputs.training, tokenizer, length=length, count=count, seed=seed)
        except ConfigError as error:
            raise ConfigError(f"targets.{field} = {length}: {error}") from error
        check_held_out(found.prompts, study.inputs.training, study.inputs.evaluation)
        if found.duplicates:
            get_run_logger().info("targets: %d repeated %s prompts replaced", found.duplicates, mode)
        sets[mode] = found
    return sets


def _shards(directory: Path, sets: dict[str, DistinctPrompts], size: int) -> list[Shard]:
    return [
        Shard(directory / f"part-{mode}-{start // size:05d}.parquet", mode, found.prompts[start : start + size])
        for mode, found in sets.items()
        for start in range(0, len(found.prompts), size)
    ]


def _finished(shard: Shard) -> int | None:
    """Tokens of a shard that an earlier run left whole. A damaged one is named and made again."""
    if not shard.path.is_file():
        return None
    facts = shard_facts(shard.path)
    if facts is not None and facts[0] == [prompt.doc_id for prompt in shard.prompts]:
        return facts[1]
    get_run_logger().warning("targets: %s is damaged or of another set; making it again", shard.path)
    return None


def _write_missing(
    study: Study, source: str, tokenizer: Any, shards: list[Shard], kept: dict[Path, int]
) -> dict[str, tuple[int, float]]:
    """Make the shards that are not kept. (tokens, seconds) of each mode that anything was made of."""
    missing = [shard for shard in shards if shard.path not in kept]
    if not missing:
        return {}
    model = load_model(
        source,
        dtype=torch_dtype(study.runtime.dtype),
        device=study.runtime.device,
        revision=study.config.verifier.revision,
    )
    made: dict[str, tuple[int, float]] = {}
    for mode in dict.fromkeys(shard.mode for shard in missing):
        done = sum(kept.get(shard.path, 0) for shard in shards if shard.mode == mode)
        made[mode] = _write_mode(study, model, tokenizer, [s for s in missing if s.mode == mode], done)
    return made


def _write_mode(study: Study, model: Any, tokenizer: Any, shards: list[Shard], done: int) -> tuple[int, float]:
    """Make shards of one mode, of which earlier runs made `done` tokens: (tokens, seconds)."""
    mode, targets = shards[0].mode, study.config.targets
    most = targets.length if mode == "forced" else targets.new_tokens
    prompts = [prompt.ids for shard in shards for prompt in shard.prompts]
    progress = Progress(f"targets-{mode}", f"targets, {mode}", done + most * len(prompts), "tokens", done=done)
    start, tokens = time.perf_counter(), 0
    rows = _greedy(study, model, tokenizer, mode, prompts, lambda made: progress(done + made))
    for shard in shards:
        greedy = list(islice(rows, len(shard.prompts)))
        written = [row(prompt, g, mode) for prompt, g in zip(shard.prompts, greedy, strict=True)]
        # A training step reads one row of a random shard: each is a row group of its own.
        write_rows(shard.path, written, TARGETS, row_group_size=1)
        tokens += sum(len(g.ids) for g in greedy)
        progress.total -= sum(most - len(g.ids) for g in greedy)  # what an early EOS saved
    if tokens < most * len(prompts):  # else it has heard that all is done
        progress(done + tokens)
    return tokens, time.perf_counter() - start


def _greedy(
    study: Study, model: Any, tokenizer: Any, mode: str, prompts: list[list[int]], on_tokens: OnTokens
) -> Iterator[Greedy]:
    targets = study.config.targets
    if mode == "generated":
        yield from generated(
            model,
            prompts,
            new_tokens=targets.new_tokens,
            top_k=targets.top_k,
            eos=eos_ids(model, tokenizer),
            batch_size=targets.batch_size,
            on_tokens=on_tokens,
        )
        return
    before = 0
    for ids in prompts:
        yield forced(model, ids, top_k=targets.top_k, on_tokens=lambda made, before=before: on_tokens(before + made))
        before += len(ids)


def _speeds(made: dict[str, tuple[int, float]]) -> dict[str, float | None]:
    """What this run made of each mode, and how fast; NULL where it made nothing."""
    facts: dict[str, float | None] = {}
    for mode in ("forced", "generated"):
        tokens, seconds = made.get(mode, (None, None))
        facts[f"{mode}_tokens"], facts[f"{mode}_seconds"] = tokens, seconds
        facts[f"{mode}_tokens_per_s"] = tokens / seconds if tokens and seconds else None
    return facts
