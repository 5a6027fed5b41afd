"""The rows of a decoding benchmark as tables and as one figure."""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from reports import svg

Row = dict[str, Any]


def _medians(rows: list[Row], kind: str) -> dict[tuple[Any, ...], float]:
    groups: dict[tuple[Any, ...], list[float]] = {}
    for r in rows:
        if r["kind"] == kind:
            groups.setdefault((r["dtype"], r["system"], r["budget"], r["block"], r["context"]), []).append(r["seconds"])
    return {key: statistics.median(values) for key, values in groups.items()}


def _name(system: str, budget: int, block: int | None) -> str:
    return " ".join([system, *([f"B={budget}"] if budget >= 0 else []), *([f"x{block}"] if block else [])])


def print_tables(rows: list[Row]) -> None:
    """Milliseconds per new token and per step, by context; phases and memory of our runs."""
    console = Console(width=140)
    for kind, title in (("run", "ms per new token, median"), ("step", "ms per step, median")):
        found = _medians(rows, kind)
        contexts = sorted({key[4] for key in found})
        table = Table("dtype", "system", *map(str, contexts), title=title)
        for dtype, system, budget, block in dict.fromkeys(key[:4] for key in found):
            cells = [f"{found[dtype, system, budget, block, c] * 1e3:.1f}" for c in contexts]
            table.add_row(dtype, _name(system, budget, block), *cells)
        console.print(table)
    phases = Table(
        "dtype",
        "context",
        "system",
        "draft",
        "verify",
        "select",
        "other",
        "drafter KV",
        "verifier KV",
        "equal",
        title="share of a round; bytes of caches",
    )
    seen: dict[tuple[Any, ...], list[Row]] = {}
    for r in rows:
        if r["kind"] == "run" and r["rounds"]:
            seen.setdefault((r["dtype"], r["context"], r["system"], r["budget"]), []).append(r)
    for (dtype, context, system, budget), group in seen.items():
        total = sum(r[p] for r in group for p in ("draft_s", "verify_s", "select_s", "overhead_s"))
        shares = [sum(r[p] for r in group) / total for p in ("draft_s", "verify_s", "select_s", "overhead_s")]
        kv = [f"{group[0][name] / 2**20:.2f} MiB" for name in ("drafter_kv_bytes", "verifier_kv_bytes")]
        equal = f"{sum(bool(r['equal']) for r in group)}/{len(group)}"
        phases.add_row(dtype, str(context), _name(system, budget, None), *(f"{s:.1%}" for s in shares), *kv, equal)
    console.print(phases)


def draw(rows: list[Row], gamma: int, path: Path) -> None:
    """Left: tokens per second of each system against context. Right: verify steps and the bandwidth limit."""
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    with svg.style():
        sheet = Figure(figsize=(13, 3.6 * len(dtypes)), layout="constrained")
        axes = sheet.subplots(len(dtypes), 2, squeeze=False)
        for i, dtype in enumerate(dtypes):
            _lines(axes[i][0], rows, dtype, "run", lambda s: 1 / s, f"{dtype}: new tokens per second")
            _lines(axes[i][1], rows, dtype, "step", lambda s: 1e3 * s, f"{dtype}: ms per step (x tokens fed)")
            limits = sorted(
                {(r["context"], 1e3 * r["limit_s"]) for r in rows if r["dtype"] == dtype and r["system"] == "verify"}
            )
            axes[i][1].plot(*zip(*limits, strict=True), linestyle=":", color="#808080", label="bandwidth limit")
            for axis in axes[i]:
                axis.set_xlabel("context (tokens)")
                axis.set_ylim(bottom=0)
                axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
        drawing = svg.draw(
            sheet,
            name="decoding",
            title=f"Decoding speed, gamma {gamma}",
            alt="New tokens per second of each system against context, and milliseconds per step beside the limit.",
            caption="",
        )
    path.write_text(drawing.standalone)


def _lines(axis: Any, rows: list[Row], dtype: str, kind: str, scale: Any, title: str) -> None:
    found = _medians([r for r in rows if r["dtype"] == dtype], kind)
    for _, system, budget, block in dict.fromkeys(key[:4] for key in found):
        points = sorted((key[4], scale(v)) for key, v in found.items() if key[1:4] == (system, budget, block))
        theirs = system in ("generate", "assisted", "lookup", "verify_transformers")
        axis.plot(
            *zip(*points, strict=True),
            marker="o",
            linestyle="--" if theirs else "-",
            label=_name(system, budget, block),
        )
    axis.set_title(title)
