"""How often the verdicts are right: false alarms, power and coverage over synthetic documents of known truth.

What is drawn: `benchmarks.truths`; what is found there: `benchmarks.judgements`; where: `benchmarks.cases`.

    python benchmarks/verdicts.py --out docs/results/verdicts.csv     # under 10 minutes on one core
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bdcore.collapse.intervals import CONFIDENCE, LEVEL
from benchmarks.cases import Case, cases
from benchmarks.judgements import COVERS
from reports.files import csv_of, write_text

DOCUMENTS = (4, 8, 16, 32)
NOMINAL = {
    # One end of a 95 % interval.
    **dict.fromkeys(
        ("collapsed", "gives back", "slower for certain", "best gamma apart", "collapsed, with failures"),
        (1 - CONFIDENCE) / 2,
    ),
    **dict.fromkeys(("sensitive", "dip", "permutation p < 0.05"), LEVEL),
}


def measure(case: Case, documents: int, repeats: int) -> list[dict[str, Any]]:
    """One row per verdict or interval: how often, over `repeats` draws of that many documents."""
    found: dict[str, list[bool]] = defaultdict(list)
    for seed in range(repeats):
        drawn = case.draw(np.random.default_rng([documents, seed]), case.levels, documents, case.correlation)
        for name, value in case.judge(drawn, seed).items():
            found[name] += [] if value is None else [value]
    return [_row(case, documents, name, values, repeats) for name, values in found.items()]


def _row(case: Case, documents: int, name: str, values: Sequence[bool], repeats: int) -> dict[str, Any]:
    covers = name.startswith(COVERS)
    kind = "coverage" if covers else "power" if name in case.right else "false alarm"
    rate = sum(values) / len(values) if values else None
    return {
        "verdict": name.removeprefix(COVERS),
        "kind": kind,
        "truth": case.truth,
        "nominal": CONFIDENCE if covers else NOMINAL.get(name) if kind == "false alarm" else None,
        "documents": documents,
        "rate": rate,
        "error": None if rate is None else round((rate * (1 - rate) / len(values)) ** 0.5, 4),
        # Where an interval was claimed: the rate is of these.
        "judged": len(values),
        "repeats": repeats,
    }


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per verdict and truth, one column per number of documents, rates in %."""
    lines: dict[tuple[Any, ...], dict[int, float | None]] = defaultdict(dict)
    for row in rows:
        lines[row["kind"], row["verdict"], row["truth"], row["nominal"]][row["documents"]] = row["rate"]
    counts = sorted({n for rates in lines.values() for n in rates})
    text = ["| | verdict or interval | truth | promised | " + " | ".join(f"n = {n}" for n in counts) + " |"]
    text.append("|---|---|---|--:|" + "--:|" * len(counts))
    order = ("false alarm", "power", "coverage")
    for key in sorted(lines, key=lambda key: order.index(key[0])):
        kind, verdict, truth, nominal = key
        rates = " | ".join(_percent(lines[key].get(n)) for n in counts)
        text.append(f"| {kind} | {verdict} | {truth} | {_percent(nominal)} | {rates} |")
    return "\n".join(text)


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=250, help="draws per truth and number of documents")
    parser.add_argument("--documents", type=int, nargs="+", default=list(DOCUMENTS))
    parser.add_argument("--out", type=Path, default=Path("docs/results/verdicts.csv"))
    options = parser.parse_args(argv)
    start = time.process_time()
    rows: list[dict[str, Any]] = []
    for case in cases():
        for documents in options.documents:
            rows += measure(case, documents, options.repeats)
        print(f"{time.process_time() - start:5.0f} s of CPU time: {case.truth}", file=sys.stderr, flush=True)
    write_text(options.out, csv_of(rows))
    print(markdown(rows))
    return rows


if __name__ == "__main__":
    main()
