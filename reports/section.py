"""A section of the analysis: a plain table, the same for HTML, Markdown and CSV."""

import re
from dataclasses import dataclass
from typing import Any

from bdcore.collapse import Estimate


@dataclass(frozen=True)
class Shown:
    """An estimate as a table shows it: times `scale`, with `digits` decimals."""

    estimate: Estimate
    scale: float = 100.0
    digits: int = 1


@dataclass(frozen=True)
class Section:
    name: str
    """Of its CSV file, and the anchor in the page."""
    title: str
    intro: str
    columns: list[tuple[str, bool]]
    """(header, whether numeric)"""
    rows: list[list[Any]]
    """Text, numbers, None or `Shown`, one per column."""


def as_csv(section: Section) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows for CSV: an estimate becomes its value, the ends of its interval, and n."""
    shown = [any(isinstance(row[i], Shown) for row in section.rows) for i in range(len(section.columns))]
    columns = [
        name for (label, _), wide in zip(section.columns, shown, strict=True) for name in _names(_slug(label), wide)
    ]
    return columns, [[v for c, w in zip(row, shown, strict=True) for v in _values(c, w)] for row in section.rows]


def _slug(label: str) -> str:
    return re.sub(r"\W+", "_", label.lower()).strip("_")


def _names(name: str, wide: bool) -> list[str]:
    return [name, f"{name}_lo", f"{name}_hi", f"{name}_n"] if wide else [name]


def _values(value: Any, wide: bool) -> list[Any]:
    if isinstance(value, Shown):
        e = value.estimate
        return [e.value, e.low, e.high, e.n]
    return [value, None, None, None] if wide else [value]
