"""Documents of a grid that are too short for it: counted once per run, in a file beside its rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from bdcore.documents import build_prompts
from bdcore.evaluation.texts import texts_of
from bdcore.identity import write_json
from bdcore.study import Study


def count_short(study: Study, tokenizer: Any, seed: int) -> None:
    """How many documents of each corpus were passed over before there were enough that the whole grid can use."""
    if text_facts(study):
        return
    grid, short = study.config.grid, Counter[str]()
    for corpus, documents in zip(grid.corpus, study.inputs.corpora, strict=True):
        texts = texts_of(grid, documents)
        found = build_prompts(texts, tokenizer, length=grid.longest, count=grid.prompts, seed=seed)
        short[corpus.label] += found.too_short
    passed = ", ".join(f"{count} of {source}" for source, count in short.items())
    get_run_logger().info("grid: documents passed over, too short for %d tokens: %s", grid.longest, passed)
    write_json(_path(study), {"tokens": grid.longest, "too_short": dict(short)})


def text_facts(study: Study) -> dict[str, Any]:
    """`tokens` that each document must have, and `too_short`: corpus -> how many had fewer. Empty: not counted."""
    try:
        return json.loads(_path(study).read_text())
    except (OSError, ValueError):  # absent or damaged: counted again
        return {}


def _path(study: Study) -> Path:
    return study.workspace.samples(study.keys.run) / "texts.json"
