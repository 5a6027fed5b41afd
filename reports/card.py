"""The model card of an exported drafter: how it was made, how it is used, and what was measured with it.

Facts come from the study and its artifacts; every figure of the grid comes from the Parquet rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from bdcore.collapse import Estimate
from reports.files import templates
from reports.measured import Measured, measure
from reports.tables import read

TAGS = ("speculative-decoding", "draft-model", "sparse-kv-cache", "budgetdraft")


def measured_cells(workspace: Path, run_key: str, role: str) -> list[Measured]:
    """The cells of one run that a drafter (`base` or `trained`) drafted in; empty when nothing was measured."""
    try:
        cells = read(workspace, lambda connection: measure(connection, run_key), run_key=run_key)
    except FileNotFoundError:
        return []
    return [c for c in cells if c.row["drafter_name"] == role and c.acceptance.value is not None]


def render_card(facts: Mapping[str, Any], cells: Sequence[Measured]) -> str:
    """The card as Markdown with YAML front matter. `facts`: see `flows.exporting.card_facts`."""
    environment = templates(autoescape=False)
    environment.filters |= {"weights": weights, "acceptance": acceptance, "budget": budget, "md": _plain}
    return environment.get_template("card.md.j2").render(
        **facts, front_matter=front_matter(facts["verifier"]), grid=grid_sections(cells)
    )


def front_matter(verifier: Mapping[str, Any]) -> str:
    """What the hub reads. License and base model only where they are known."""
    known = {"license": verifier["license"], "base_model": verifier["hub"]}
    fixed = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": list(TAGS)}
    return yaml.safe_dump({k: v for k, v in known.items() if v} | fixed, sort_keys=False).strip()


def grid_sections(cells: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    """(title, cells) per workload, corpus, policy and position mode, each by context, budget (full last), gamma."""
    ordered = sorted(cells, key=lambda c: (*_scene(c.row), *_place(c.row)))
    return [(_title(scene), list(group)) for scene, group in groupby(ordered, key=lambda c: _scene(c.row))]


def _scene(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("workload", "corpus", "policy", "position_mode", "gamma_mode", "refresh", "temperature")
    return tuple(row[name] for name in names)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["context"], row["budget"] < 0, row["budget"], row["gamma"]


def _title(scene: Sequence[Any]) -> str:
    workload, corpus, policy, mode, gamma_mode, refresh, temperature = scene
    cache = "full cache" if policy == "full" else f"policy {policy}, {mode} positions"
    special = [
        f"{gamma_mode} draft length" if gamma_mode != "fixed" else "",
        f"refreshed every {refresh} rounds" if refresh else "",
        f"temperature {temperature:g}" if temperature else "",
    ]
    return ", ".join(part for part in (f"{workload} on {corpus}", cache, *special) if part)


def acceptance(estimate: Estimate) -> str:
    """`61.2 [55.0, 67.3]` in percent; says so where there is no interval."""
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{100 * estimate.value:.1f} [no interval]"
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def budget(value: int) -> str:
    """`full` for -1."""
    return "full" if value < 0 else str(value)


def weights(value: Mapping[Any, float] | Iterable[Any] | str) -> str:
    """`64 (0.4), 128 (0.6)`; a single entry without its weight, entries of weight 0 not at all."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        return ", ".join(map(str, value))
    given = {k: w for k, w in value.items() if w}
    return ", ".join(str(k) if len(given) == 1 else f"{k} ({w:g})" for k, w in given.items())


def _plain(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
