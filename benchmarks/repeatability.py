"""Do speedups repeat on a machine with one core kept busy? The same small greedy grid twice, and a loop beside it.

    python benchmarks/repeatability.py                   # the embedded pair, about two minutes a run on two cores
    python benchmarks/repeatability.py --pair tiny       # the tests' pair: for its tokens, not its seconds
    python benchmarks/repeatability.py --busy 0          # nothing beside it

Both runs take the same drafters, so that tokens, drafts and accepted drafts must be the same; a difference is an error.
Their results lie in two workspaces of their own, which are gone at the end. The embedded pair's drafter is made first,
in two steps of training: its speedups are low, but whether they repeat is what is asked. `--config` takes another
study, and its drafters from your workspace where they are made.

speedup     of decoding, sum over the cell's prompts: seconds of `ar` before and after each sample over the sample's own
apart       the second run's over the first's
alone       the same with the one timing of `ar` that every prompt begins with: what interleaving saves us from

The last line printed is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.workspaces import linked, run_stage

LIMIT = 0.05
COUNTS = ("output_ids", "finish_reason", "rounds", "drafted", "accepted", "accepted_at", "drafted_at")
GREEDY = ["grid.workloads=[greedy]"]
EMBEDDED = [
    *("targets.forced=4", "base.steps=2", "base.warmup=0", "training.steps=2", "training.warmup=0"),
    *("grid.contexts=[512]", "grid.prompts=3", "grid.new_tokens=16", "grid.gammas=[2, 4]"),
]
TINY = ["grid.gammas=[2, 4]", "grid.new_tokens=48", "grid.contexts=[64]"]

Row = Mapping[str, Any]
Cell = tuple[Any, ...]


@contextmanager
def busy(count: int) -> Generator[None]:
    """Processes that keep one core each busy while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def rows(workspace: Path) -> list[Row]:
    """Every sample of a workspace that was measured."""
    files = sorted((workspace / "results" / "samples").rglob("part-*.parquet"))
    found = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    failed = [row["error"] for row in found if row["status"] != "ok"]
    if failed:
        raise RuntimeError(f"{len(failed)} samples failed, the first with: {failed[0]}")
    return found


def cell(row: Row) -> Cell:
    """What a line of the table is of; the rest is the same in all cells of a study."""
    names = [row[name] for name in ("method", "drafter_name", "policy", "position_mode")]
    return (" ".join(name for name in names if name), row["context"], row["budget"], row["gamma"])


def differing(first: Sequence[Row], second: Sequence[Row]) -> list[str]:
    """Samples whose tokens or counts are not the same in both runs, or that only one of them has."""
    one, other = (
        {(*cell(row), row["doc_id"]): [row[name] for name in COUNTS] for row in rows} for rows in (first, second)
    )
    return [" ".join(map(str, key)) for key in one.keys() | other.keys() if one.get(key) != other.get(key)]


def speedups(found: Sequence[Row]) -> dict[Cell, float]:
    """Of every drafting cell, against the timings of `ar` around its samples."""
    return _ratios(found, lambda row: row["ar_decode_s"])


def speedups_alone(found: Sequence[Row]) -> dict[Cell, float]:
    """Of every drafting cell, against the one `ar` that its prompts began with."""
    alone = {(row["context"], row["doc_id"]): row["decode_s"] for row in found if row["method"] == "ar"}
    return _ratios(found, lambda row: alone[row["context"], row["doc_id"]])


def _ratios(found: Sequence[Row], alone: Callable[[Row], float]) -> dict[Cell, float]:
    seconds: dict[Cell, list[tuple[float, float]]] = defaultdict(list)
    for row in found:
        if row["method"] != "ar":
            seconds[cell(row)].append((alone(row), row["decode_s"]))
    return {key: sum(a for a, _ in pairs) / sum(s for _, s in pairs) for key, pairs in seconds.items()}


def compared(first: Sequence[Row], second: Sequence[Row]) -> dict[str, Any]:
    """Medians over cells of both runs, how far apart they are, and the samples that differ."""
    facts: dict[str, Any] = {"samples": len(first), "cells": len(speedups(first))}
    for name, of in (("speedup", speedups), ("speedup_alone", speedups_alone)):
        medians = [statistics.median(of(run).values()) for run in (first, second)]
        facts[name] = [round(median, 4) for median in medians]
        facts[f"{name}_apart"] = round(medians[1] / medians[0], 4)
    seconds = [sum(row["decode_s"] for row in run) for run in (first, second)]
    return facts | {"seconds_apart": round(seconds[1] / seconds[0], 4), "differing": differing(first, second)}


def table(first: Sequence[Row], second: Sequence[Row]) -> str:
    """One line per cell: both speedups and how far apart they are."""
    one, other = speedups(first), speedups(second)
    lines = [f"{'cell':44}{'context':>8}{'budget':>8}{'gamma':>6}{'first':>9}{'second':>9}{'apart':>8}"]
    for key in one:
        name, context, budget, gamma = key
        kept = "full" if budget < 0 else budget
        speeds = f"{one[key]:8.3f}x{other[key]:8.3f}x{other[key] / one[key]:8.3f}"
        lines.append(f"{name:44}{context:8}{kept:>8}{gamma:6}{speeds}")
    return "\n".join(lines)


def words(facts: Mapping[str, Any]) -> str:
    """Whether the medians repeat, and whether the tokens do."""
    found = facts["differing"]
    kept = "within" if abs(facts["speedup_apart"] - 1) <= LIMIT else "NOT within"
    same = f"{len(found)} samples DIFFER, such as {found[0]}" if found else "the same in both runs"
    return "\n".join(
        (
            f"Median speedup over {facts['cells']} cells: {_both(facts, 'speedup')}: {kept} {LIMIT:.0%}.",
            f"Against the first `ar` of each prompt alone: {_both(facts, 'speedup_alone')}.",
            f"All decoding seconds: ratio {facts['seconds_apart']:.3f}.",
            f"Tokens and counts ({', '.join(COUNTS)}) of {facts['samples']} samples: {same}.",
        )
    )


def _both(facts: Mapping[str, Any], name: str) -> str:
    one, other = facts[name]
    return f"{one:.3f}x, then {other:.3f}x, ratio {facts[f'{name}_apart']:.3f}"


def study(given: argparse.Namespace, folder: Path) -> tuple[str, list[str], Path]:
    """Configuration, settings, and the workspace whose models and drafters are taken."""
    from bdcore.workspace import default_root

    if given.config:
        return given.config, [*GREEDY, *given.set], default_root()
    if given.pair == "tiny":
        from tests.tiny import write_study  # sets variables of the tests

        return str(write_study(folder / "study")), [*GREEDY, *TINY, *given.set], folder / "made"
    # A drafter of a few steps is nothing to leave in a workspace; the converted verifier is.
    made = linked(folder / "made", default_root(), ["models"])
    return "configs/quick.yaml", [*GREEDY, *EMBEDDED, *given.set], made


def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make what is missing, then measure twice beside the busy loops."""
    os.environ["PREFECT_HOME"] = str(folder / "prefect")
    config, changes, root = study(given, folder)
    spaces = [linked(folder / name, root) for name in ("first", "second")]
    run_stage(spaces[0], config, "training", changes)
    with busy(given.busy):
        for workspace in spaces:
            run_stage(workspace, config, "evaluation", changes)
    first, second = (rows(workspace) for workspace in spaces)
    facts = compared(first, second)
    print(f"{table(first, second)}\n\n{words(facts)}")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=("embedded", "tiny"), default="embedded")
    parser.add_argument("--config", help="another study, instead of a pair; its greedy workload is measured")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in `budgetdraft run`")
    parser.add_argument("--busy", type=int, default=1, help="cores kept busy by a loop each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        facts = run(given, Path(folder))
    print(json.dumps(facts))
    sys.exit(1 if facts["differing"] else 0)


if __name__ == "__main__":
    main()
