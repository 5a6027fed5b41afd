"""The numbers that arXiv 2606.00144 prints.

`paper.csv` holds what the authors' release gives (EXPECTED_RESULTS.md): speedups as printed, acceptance as a fraction,
tokens per second of the verifier alone. "4K" there is a prompt of 3800 tokens.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PATH = Path(__file__).with_name("paper.csv")


@dataclass(frozen=True)
class Number:
    """One printed number. None: not stated, or a figure over all of them."""

    exhibit: str
    """`abstract`, `table_1` to `table_3`, `figure_3`."""
    method: str
    dataset: str | None
    """By our names: `pg19` ("GS"), `longbench` (QMSum), `lwm` (NarrativeQA)."""
    context: int | None
    budget: int | None
    gamma: int | None
    """None in Table 1, whose cells are the best of several."""
    metric: str
    value: float
    contradicts: str | None
    """Names of the contradictions it takes part in, as `contradictions` finds them."""


@cache
def numbers() -> tuple[Number, ...]:
    """Everything the paper prints, in its order."""
    with _PATH.open(encoding="utf-8", newline="") as file:
        return tuple(_number(row) for row in csv.DictReader(file))


def _number(row: dict[str, str]) -> Number:
    whole = {name: int(row[name]) if row[name] else None for name in ("context", "budget", "gamma")}
    return Number(
        row["exhibit"],
        row["method"],
        row["dataset"] or None,
        **whole,
        metric=row["metric"],
        value=float(row["value"]),
        contradicts=row["contradicts"] or None,
    )


def find(printed: Iterable[Number], **wanted: Any) -> list[Number]:
    """The numbers whose fields have these values."""
    return [n for n in printed if all(getattr(n, name) == value for name, value in wanted.items())]
