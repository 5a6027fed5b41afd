"""Stage 1: the verifier's greedy tokens to Parquet, shard by shard."""

import time
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from bdcore.documents import build_prompts
from bdcore.documents.prompts import Prompt
from bdcore.identity import exclusive, read_manifest, write_manifest
from bdcore.models.loading import eos_ids, load_model, load_tokenizer, materialise, quiet
from bdcore.runtime import environment, seed_for, torch_dtype
from bdcore.schema import TARGETS, read_rows, write_rows
from bdcore.study import Study
from bdcore.targets.generate import forced, generated
from bdcore.targets.rows import row
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
    """Forced and generated targets as Parquet shards; finished shards of a killed run are kept."""
    directory, key = study.workspace.targets(study.keys.targets), study.keys.targets
    with exclusive(directory):
        manifest = read_manifest(directory)
        announce("targets", directory, manifest)
        if manifest is None:
            manifest = _make(study, verifier.path, directory, key)
            return ArtifactRef(str(directory), key, manifest["rows"], reused=False)
    return ArtifactRef(str(directory), key, manifest["rows"], reused=True)


def _make(study: Study, source: str, directory: Path, key: str) -> dict[str, Any]:
    config, targets = study.config, study.config.targets
    start = time.perf_counter()
    with quiet():
        tokenizer = load_tokenizer(source, config.verifier.revision)
        kinds = {"forced": (targets.length, targets.forced), "generated": (targets.prompt_tokens, targets.generated)}
        sets = {
            mode: build_prompts(
                study.inputs.training, tokenizer, length=length, count=count, seed=seed_for(config.seed, mode)
            )
            for mode, (length, count) in kinds.items()
            if count
        }
        shards = _shards({mode: found.prompts for mode, found in sets.items()}, targets.shard_size, targets.batch_size)
        missing = [s for s in shards if not _complete(directory / s[0], s[2])]
        tokens = _token_counts(shards, study)
        if missing:
            model = load_model(
                source,
                dtype=torch_dtype(study.runtime.dtype),
                device=study.runtime.device,
                revision=config.verifier.revision,
            )
            done = sum(tokens.values()) - sum(tokens[name] for name, _, _ in missing)
            progress = Progress("targets", "targets", sum(tokens.values()), "tokens", done=done)
            for name, mode, prompts in missing:
                _write_shard(directory / name, mode, prompts, model, tokenizer, study, progress, done)
                done += tokens[name]
                progress(done)
    return write_manifest(
        directory,
        key,
        stage="targets",
        config=targets.model_dump(mode="json"),
        inputs={"verifier": study.keys.verifier, "corpus": study.keys.training_corpus},
        rows=sum(len(prompts) for _, _, prompts in shards),
        tokens=sum(tokens.values()),
        too_short={mode: found.too_short for mode, found in sets.items()},
        seconds=time.perf_counter() - start,
        environment=environment(),
    )


Shard = tuple[str, str, list[Prompt]]


def _shards(prompts: dict[str, list[Prompt]], shard_size: int, batch_size: int) -> list[Shard]:
    """(file name, mode, prompts) of each shard. Generated rows are made in batches, so a shard is one batch."""
    out: list[Shard] = []
    for mode, rows in prompts.items():
        size = shard_size if mode == "forced" else batch_size
        for start in range(0, len(rows), size):
            out.append((f"part-{mode}-{start // size:05d}.parquet", mode, rows[start : start + size]))
    return out


def _token_counts(shards: list[Shard], study: Study) -> dict[str, int]:
    targets = study.config.targets
    each = {"forced": targets.length, "generated": targets.new_tokens}
    return {name: each[mode] * len(prompts) for name, mode, prompts in shards}


def _complete(path: Path, prompts: list[Prompt]) -> bool:
    """Whether a shard of an earlier run can stay. A damaged one is named and made again."""
    if not path.is_file():
        return False
    rows = read_rows(path, TARGETS)
    if rows is not None and [r["doc_id"] for r in rows] == [p.doc_id for p in prompts]:
        return True
    get_run_logger().warning("targets: %s is damaged or of another set; making it again", path)
    return False


def _write_shard(
    path: Path,
    mode: str,
    prompts: list[Prompt],
    model: Any,
    tokenizer: Any,
    study: Study,
    progress: Progress,
    done: int,
) -> None:
    targets = study.config.targets
    if mode == "forced":
        greedy = []
        for i, prompt in enumerate(prompts):
            greedy.append(forced(model, prompt.ids, top_k=targets.top_k))
            progress(done + (i + 1) * targets.length)
    else:
        greedy = generated(
            model,
            [p.ids for p in prompts],
            new_tokens=targets.new_tokens,
            top_k=targets.top_k,
            eos=eos_ids(model, tokenizer),
            on_step=lambda step: progress(done + step * len(prompts)),
        )
    rows = [row(prompt, g, mode) for prompt, g in zip(prompts, greedy, strict=True)]
    write_rows(path, rows, TARGETS, row_group_size=4)
