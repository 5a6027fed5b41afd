"""Stage 3: the grid, one task per context and one for the replay, Parquet files of sample rows per document."""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from bdcore.documents import Prompt
from bdcore.evaluation.cell import Measured, measure_prompt, warm_up
from bdcore.evaluation.grid import REPLAY, WRITTEN, Cell, cells
from bdcore.evaluation.replay import all_positions, replay
from bdcore.evaluation.rows import Bench, Row
from bdcore.evaluation.texts import documents_of, prompts_of
from bdcore.evaluation.truth import Known
from bdcore.identity import code_fingerprint, digest, exclusive, write_json, write_manifest
from bdcore.keys import drafter_keys
from bdcore.models.drafter import Drafter, load_drafter
from bdcore.models.loading import eos_ids, load_model, load_tokenizer, quiet
from bdcore.runtime import environment, seed_for, torch_dtype
from bdcore.schema import ROUNDS, SAMPLES, SELF, read_rows, write_rows
from bdcore.study import Study
from bdcore.targets.rows import document_ids
from tasks.progress import ArtifactRef, Progress
from tasks.texts import count_short, text_facts


@dataclass(frozen=True)
class GridInputs:
    """The artifacts a grid measures."""

    verifier: ArtifactRef
    targets: ArtifactRef
    base: ArtifactRef
    trained: ArtifactRef


@dataclass(frozen=True)
class GridSlice:
    """What one task left behind."""

    what: str
    samples: int
    failed: int
    measured: int
    """Samples that this run measured; the others an earlier run had finished."""


@task(cache_policy=NO_CACHE, task_run_name="measure-context-{context}")
def measure_context(study: Study, found: GridInputs, context: int) -> GridSlice:
    """Every cell of one context that writes text, on every prompt. Finished cells are kept, failed ones are rows."""
    every = [cell for cell in cells(study.config.grid) if cell.workload in WRITTEN and cell.context == context]

    def prompts(tokenizer: Any, seed: int) -> list[Prompt]:
        return prompts_of(study.config.grid, study.inputs.corpora, tokenizer, seed, context)

    warm: list[str] = []

    def measure(prompt: Prompt, path: Path, samples: list[Row], step: Step) -> int:
        shared = study.workspace.rounds(study.keys.run) / path.name
        rounds = read_rows(shared, ROUNDS) if samples else []
        if rounds is None:  # a sample is kept with its rounds or not at all
            samples, rounds = [], []
        kept = {row["cell_key"] for row in samples}
        rounds = [row for row in rounds if row["cell_key"] in kept]

        def told(cell: Cell) -> None:
            step(f"{cell.method} on {prompt.doc_id}")

        def write(new: Measured) -> None:
            samples.extend(new[0])
            rounds.extend(new[1])
            # The samples file is written last: a cell that is in it is done.
            write_rows(shared, rounds, ROUNDS)
            write_rows(path, samples, SAMPLES)

        bench = _bench(study, found)
        if not warm:
            warm_up(bench, prompt, every)
            warm.append(prompt.doc_id)
        return len(measure_prompt(bench, prompt, every, kept=kept, on_cell=told, on_rows=write)[0])

    return _measure(study, found, f"context-{context:06d}", prompts, every, measure, steps=(len(every), "samples"))


@task(cache_policy=NO_CACHE)
def measure_replay(study: Study, found: GridInputs) -> GridSlice:
    """Every replay cell, all contexts of a document in one walk. Finished documents are kept, failed cells are rows."""
    grid = study.config.grid
    every = [cell for cell in cells(grid) if cell.workload == REPLAY]

    def documents(tokenizer: Any, seed: int) -> list[Prompt]:
        return documents_of(grid, study.inputs.corpora, tokenizer, seed)

    def measure(document: Prompt, path: Path, _: list[Row], step: Step) -> int:
        shared = _known_path(study, document)
        known = _read_known(shared)
        samples, rounds = replay(
            _bench(study, found), document, every, known=known, on_position=lambda: step(document.doc_id)
        )
        write_json(shared, known)
        write_rows(study.workspace.rounds(study.keys.run) / path.name, rounds, ROUNDS)
        write_rows(path, samples, SAMPLES)  # last: its presence means that the document is done
        return len(samples)

    return _measure(
        study, found, "replay", documents, every, measure, steps=(len(all_positions(grid)), "positions of documents")
    )


def _known_path(study: Study, document: Prompt) -> Path:
    """Where studies share what a verifier says along a document."""
    runtime = study.runtime
    how = [study.keys.verifier, study.config.grid.far_window, study.config.grid.prefill_chunk]
    key = digest(how, runtime.grid_dtype, runtime.device, document.ids, code_fingerprint("evaluation"))
    return study.workspace.root / "truth" / f"{key}.json"


def _read_known(path: Path) -> Known:
    try:
        found = json.loads(path.read_text())
        return {int(position): (int(choice), bool(far)) for position, (choice, far) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent or damaged: found again
        return {}


Step = Callable[[str], None]
"""Told of each step, and what it was."""


def _measure(
    study: Study,
    found: GridInputs,
    name: str,
    texts: Callable[[Any, int], list[Prompt]],
    every: list[Cell],
    measure: Callable[[Prompt, Path, list[Row], Step], int],
    *,
    steps: tuple[int, str],
) -> GridSlice:
    """One file of sample rows per text, those of an earlier run kept. `steps`: how many of each, and of what.

    `measure` is told the samples that are kept of a text, writes its file, and returns how many it measured.
    """
    with exclusive(study.workspace.samples(study.keys.run)), quiet():
        prompts = _disjoint(study, found, texts)
        paths = [_file(study, name, i) for i in range(len(prompts))]
        todo = [
            (prompt, path, kept)
            for prompt, path in zip(prompts, paths, strict=True)
            if not _finished(kept := _kept(path, prompt), every)
        ]
        each, unit = steps
        done = each * (len(prompts) - len(todo))
        progress = Progress(f"grid-{name}", f"grid, {name}", each * len(prompts), unit, done=done)
        count = itertools.count(done + 1)

        def step(note: str) -> None:
            progress(next(count), note)

        measured = sum(measure(prompt, path, kept, step) for prompt, path, kept in todo)
        return GridSlice(name, len(every) * len(prompts), _failures(paths), measured)


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
        config = study.config
        facts = {"stage": "evaluation", "study": config.name, "seed": config.seed, "rows": samples}
        facts |= {"config": config.grid.model_dump(mode="json"), "beyond_positions": config.drafter.beyond_positions}
        facts |= {"texts": text_facts(study)}
        write_manifest(directory, study.keys.run, inputs=study.keys.facts(), environment=environment(), **facts)
    return ArtifactRef(str(directory), study.keys.run, samples, reused=not any(s.measured for s in slices))


def _disjoint(study: Study, found: GridInputs, texts: Callable[[Any, int], list[Prompt]]) -> list[Prompt]:
    """The texts of a task, none of which may be trained on."""
    config = study.config
    tokenizer = load_tokenizer(found.verifier.path, config.verifier.revision)
    seed = seed_for(config.seed, "grid")
    prompts = texts(tokenizer, seed)
    trained_on = {prompt.doc_id for prompt in prompts} & document_ids(Path(found.targets.path))
    if trained_on:
        raise ValueError(f"grid.corpus: {sorted(trained_on)} are in the training targets {found.targets.path}")
    count_short(study, tokenizer, seed)
    return prompts


def _file(study: Study, name: str, index: int) -> Path:
    corpus, document = divmod(index, study.config.grid.prompts)
    return study.workspace.samples(study.keys.run) / f"part-{name}-{corpus:02d}-{document:04d}.parquet"


def _finished(kept: list[Row], every: list[Cell]) -> bool:
    """Whether an earlier run measured a text under every cell. Failed cells are measured again."""
    return {row["cell_key"] for row in kept} == {cell.key for cell in every}


def _kept(path: Path, prompt: Prompt) -> list[Row]:
    """The samples of this text that an earlier run finished; none where its file is damaged."""
    rows = read_rows(path, SAMPLES) if path.is_file() else []
    if rows is None:
        get_run_logger().warning("grid: %s is damaged; measuring its prompt again", path)
        return []
    return [row for row in rows if row["status"] == "ok" and row["doc_id"] == prompt.doc_id]


def _failures(paths: list[Path]) -> int:
    statuses = [s for path in paths for s in pq.ParquetFile(path).read(["status"]).column(0).to_pylist()]
    return sum(status != "ok" for status in statuses)


@lru_cache(maxsize=1)
def _load(
    source: str, revision: str | None, drafters: tuple[tuple[str, str], ...], dtype: str, device: str
) -> tuple[Any, Any, dict[str, Drafter]]:
    start = time.perf_counter()
    model = load_model(source, dtype=torch_dtype(dtype), device=device, revision=revision)
    vocab = model.config.vocab_size
    loaded = {
        name: load_drafter(path, verifier_vocab=vocab, dtype=torch_dtype(dtype), device=device)
        for name, path in drafters
    }
    loaded[SELF] = Drafter(model, None)
    get_run_logger().info(
        "grid: verifier and drafters loaded in %.0f s (%s, %s)", time.perf_counter() - start, dtype, device
    )
    return model, load_tokenizer(source, revision), loaded


def _bench(study: Study, found: GridInputs) -> Bench:
    """One model load serves the whole grid; models never travel between tasks."""
    runtime = study.runtime
    own = {"base": found.base.path, "trained": found.trained.path}
    model, tokenizer, drafters = _load(
        found.verifier.path,
        study.config.verifier.revision,
        tuple((own | study.config.grid.drafters).items()),
        runtime.grid_dtype,
        runtime.device,
    )
    return Bench(
        run_key=study.keys.run,
        config=study.config,
        verifier=model,
        tokenizer=tokenizer,
        drafters=drafters,
        drafter_keys={**drafter_keys(study.config), **_own_keys(study)},
        eos=eos_ids(model, tokenizer),
        device=runtime.device,
        dtype=runtime.grid_dtype,
    )


def _own_keys(study: Study) -> dict[str, str]:
    keys = study.keys
    return {"base": keys.base, "trained": keys.trained, SELF: keys.verifier}
