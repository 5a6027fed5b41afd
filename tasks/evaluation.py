"""Stage 3: the grid, one task per context, one pair of Parquet files per prompt."""

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from bdcore.documents import build_prompts
from bdcore.documents.prompts import Prompt
from bdcore.evaluation.cell import Bench, measure_prompt
from bdcore.evaluation.grid import Cell, cells
from bdcore.identity import exclusive, write_manifest
from bdcore.models.drafter import Drafter, load_drafter
from bdcore.models.loading import eos_ids, load_model, load_tokenizer, quiet
from bdcore.runtime import environment, seed_for, torch_dtype
from bdcore.schema import ROUNDS, SAMPLES, read_rows, write_rows
from bdcore.study import Study
from bdcore.targets.rows import document_ids
from tasks.progress import ArtifactRef, Progress


@dataclass(frozen=True)
class GridInputs:
    """The artifacts a grid measures."""

    verifier: ArtifactRef
    targets: ArtifactRef
    base: ArtifactRef
    trained: ArtifactRef


@dataclass(frozen=True)
class GridSlice:
    """What one context's task left behind."""

    context: int
    samples: int
    failed: int
    measured: int
    """Samples that this run measured; the others an earlier run had finished."""


@task(cache_policy=NO_CACHE, task_run_name="measure-context-{context}")
def measure_context(study: Study, found: GridInputs, context: int) -> GridSlice:
    """Every cell of one context on every prompt. Finished prompts are kept, failed cells are rows."""
    every = [cell for cell in cells(study.config.grid) if cell.context == context]
    with exclusive(study.workspace.samples(study.keys.run)), quiet():
        prompts = _prompts(study, found, context)
        files = [_files(study, context, i) for i in range(len(prompts))]
        done = [_finished(samples, prompt, every) for (samples, _), prompt in zip(files, prompts, strict=True)]
        progress = Progress(
            f"grid-{context}",
            f"grid, context {context}",
            len(every) * len(prompts),
            "samples",
            done=len(every) * sum(done),
        )
        measured = len(every) * sum(done)
        for (samples_path, rounds_path), prompt, finished in zip(files, prompts, done, strict=True):
            if finished:
                continue
            bench = _bench(study, found)

            def told(cell: Cell, base: int = measured) -> None:
                progress(base + every.index(cell) + 1, f"{cell.method} on {prompt.doc_id}")  # noqa: B023

            samples, rounds = measure_prompt(bench, prompt, every, on_cell=told)
            # The samples file is written last: its presence means that the prompt is done.
            write_rows(rounds_path, rounds, ROUNDS)
            write_rows(samples_path, samples, SAMPLES)
            measured += len(every)
        failed = _failures([path for path, _ in files])
    total = len(every) * len(prompts)
    return GridSlice(context, total, failed, total - len(every) * sum(done))


@task(cache_policy=NO_CACHE)
def finish_grid(study: Study, slices: list[GridSlice]) -> ArtifactRef:
    """Release the models; write the manifest when no cell failed, so that a rerun measures only what is missing."""
    _load.cache_clear()
    directory = study.workspace.samples(study.keys.run)
    samples, failed = sum(s.samples for s in slices), sum(s.failed for s in slices)
    logger = get_run_logger()
    if failed:
        logger.error("grid: %d of %d samples failed; the report names them", failed, samples)
    else:
        facts = {"stage": "evaluation", "config": study.config.grid.model_dump(mode="json"), "rows": samples}
        write_manifest(directory, study.keys.run, inputs=study.keys.facts(), environment=environment(), **facts)
    return ArtifactRef(str(directory), study.keys.run, samples, reused=not any(s.measured for s in slices))


def _prompts(study: Study, found: GridInputs, context: int) -> list[Prompt]:
    """The same documents at every context: those long enough for the longest."""
    config, grid = study.config, study.config.grid
    tokenizer = load_tokenizer(found.verifier.path, config.verifier.revision)
    seed, documents = seed_for(config.seed, "grid"), study.inputs.evaluation
    longest = build_prompts(documents, tokenizer, length=max(grid.contexts), count=grid.prompts, seed=seed)
    names = {prompt.doc_id for prompt in longest.prompts}
    trained_on = names & document_ids(Path(found.targets.path))
    if trained_on:
        raise ValueError(f"grid.corpus: {sorted(trained_on)} are in the training targets {found.targets.path}")
    chosen = [d for d in documents if d.doc_id in names]
    return build_prompts(chosen, tokenizer, length=context, count=grid.prompts, seed=seed).prompts


def _files(study: Study, context: int, index: int) -> tuple[Path, Path]:
    name = f"part-{context:06d}-{index:04d}.parquet"
    return study.workspace.samples(study.keys.run) / name, study.workspace.rounds(study.keys.run) / name


def _finished(path: Path, prompt: Prompt, every: list[Cell]) -> bool:
    """Whether an earlier run measured this prompt whole. Failed cells and damaged files are measured again."""
    if not path.is_file():
        return False
    rows = read_rows(path, SAMPLES)
    if rows is None:
        get_run_logger().warning("grid: %s is damaged; measuring its prompt again", path)
        return False
    complete = {row["cell_key"] for row in rows} == {cell.key for cell in every}
    return complete and all(row["status"] == "ok" and row["doc_id"] == prompt.doc_id for row in rows)


def _failures(paths: list[Path]) -> int:
    statuses = [s for path in paths for s in pq.ParquetFile(path).read(["status"]).column(0).to_pylist()]
    return sum(status != "ok" for status in statuses)


@lru_cache(maxsize=1)
def _load(
    source: str, revision: str | None, base: str, trained: str, dtype: str, device: str
) -> tuple[Any, Any, dict[str, Drafter]]:
    start = time.perf_counter()
    model = load_model(source, dtype=torch_dtype(dtype), device=device, revision=revision)
    vocab = model.config.vocab_size
    drafters = {
        role: load_drafter(path, verifier_vocab=vocab, dtype=torch_dtype(dtype), device=device)
        for role, path in (("base", base), ("trained", trained))
    }
    get_run_logger().info(
        "grid: verifier and drafters loaded in %.0f s (%s, %s)", time.perf_counter() - start, dtype, device
    )
    return model, load_tokenizer(source, revision), drafters


def _bench(study: Study, found: GridInputs) -> Bench:
    """One model load serves the whole grid; models never travel between tasks."""
    runtime = study.runtime
    model, tokenizer, drafters = _load(
        found.verifier.path,
        study.config.verifier.revision,
        found.base.path,
        found.trained.path,
        runtime.grid_dtype,
        runtime.device,
    )
    return Bench(
        run_key=study.keys.run,
        config=study.config,
        verifier=model,
        tokenizer=tokenizer,
        drafters=drafters,
        drafter_keys={"base": study.keys.base, "trained": study.keys.trained},
        eos=eos_ids(model, tokenizer),
        device=runtime.device,
        dtype=runtime.grid_dtype,
    )
