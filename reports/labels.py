"""What is called what: the settings of a cell in words, as far as they vary in a run."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reports.series import SCENE

Row = Mapping[str, Any]

# What may differ between two cells besides `SCENE`, method, context, budget and gamma. Shown only where it does differ.
VARIANT = ("drafter_name", "policy", "position_mode", "gamma_mode", "refresh")
# Their values need no name.
_TELLING = ("method", "corpus", "workload", "policy", "position_mode")
# A full cache drops no keys: these say nothing of it.
_SPARSE_ONLY = ("policy", "position_mode", "refresh")

_TOLD = {"method": "drafter_name", "gamma_mode": "method", "refresh": "method", "temperature": "workload"}
"""What a drafter's name is followed by where it varies -> among the cells that are equal in what."""


def varying(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The settings of which a run has several values.

    Drafter, policy and the like are compared within a method: the verifier alone is no variant of `budgetdraft`.
    """
    return [n for n in names if any(map(_several, _values(n, None if n in SCENE else "method", rows).values()))]


def _values(name: str, within: str | None, rows: Iterable[Row]) -> dict[Any, set[Any]]:
    """Value of `within` -> the values of a setting that such rows have."""
    values: dict[Any, set[Any]] = defaultdict(set)
    for row in rows:
        if _tells(row, name):
            values[within and row[within]].add(row[name])
    return values


def _several(values: set[Any]) -> bool:
    return len(values) > 1


def _tells(row: Row, name: str) -> bool:
    """Whether a setting says something of a cell."""
    return name in SCENE or (row["gamma"] > 0 and (row["budget"] > 0 or name not in _SPARSE_ONLY))


def label(row: Row, names: Sequence[str]) -> str:
    shown = [name for name in names if row[name] is not None and _tells(row, name)]
    return ", ".join(_part(name, row[name]) for name in shown)


def _part(name: str, value: Any) -> str:
    if name == "temperature":
        return f"temperature {value:g}"
    return str(value) if name in _TELLING else f"{name.removesuffix('_name').replace('_', ' ')} {value}"


def drafters(rows: Sequence[Row]) -> list[str]:
    """Name of each row's drafter, else its method; with the method, temperature and so on, as far as it has several.

    For tables with columns of their own for corpus, workload, context, budget, policy, positions and gamma: with them
    the names tell all cells apart.
    """
    found = {name: _values(name, within, rows) for name, within in _TOLD.items()}

    def name_of(row: Row) -> str:
        shown = [name for name, within in _TOLD.items() if _several(found[name][row[within]])]
        return ", ".join(part for part in (row["drafter_name"] or row["method"], label(row, shown)) if part)

    return [name_of(row) for row in rows]


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
