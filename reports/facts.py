"""What is known of a run beside its rows (hardware, versions, settings), as lists for the templates."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

NOT_TABULATED = ("study", "training", "expected_samples", "planned", "paper", "answers", "texts")
"""Keys of `facts` that have a place of their own in the report."""


def fact_tables(facts: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """`facts` as titled lists of (dotted key, value): one per nested entry, plain entries first under `run`."""
    shown = {key: value for key, value in facts.items() if key not in NOT_TABULATED}
    plain = [(key, _text(value)) for key, value in shown.items() if not isinstance(value, Mapping)]
    nested = [(key, list(_flat(value))) for key, value in shown.items() if isinstance(value, Mapping) and value]
    return [("run", plain), *nested] if plain else nested


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(item)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(item, bool | int | float | str) for item in value):
        return ", ".join(map(str, value)) or "-"
    return json.dumps(value, default=str)
