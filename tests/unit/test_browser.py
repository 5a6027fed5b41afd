"""The report in a real browser: no complaint, tables that sort when clicked, figures that can be seen."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reports.build import build_report
from tests.unit.test_reports import FACTS, RUN, failure, grid, rounds, store, store_rounds

# The page's own policy lets inline scripts run and nothing else: this one reads what a person would see.
PROBE = """<script>
const cells = (table, i) => [...table.tBodies[0].rows].map(row => row.cells[i].dataset.v ?? row.cells[i].innerText);
const sorted = {};
for (const table of document.querySelectorAll("table")) {
  const columns = [];
  for (const [i, button] of [...table.querySelectorAll("thead button")].entries()) {
    const header = button.innerText, clicked = [];
    for (const _ of ["up", "down"]) {
      button.click();
      clicked.push({sort: button.parentElement.ariaSort, values: cells(table, i)});
    }
    columns.push({header, numeric: button.parentElement.classList.contains("n"), up: clicked[0], down: clicked[1]});
  }
  sorted[table.caption.id] = columns;
}
const figures = {};
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect(), drawn = svg.getBBox();
  figures[figure.id] = {seen: svg.checkVisibility({opacityProperty: true, visibilityProperty: true}),
    sizes: [box.width, box.height, drawn.width, drawn.height]};
}
const found = document.createElement("pre");
found.id = "found";
found.textContent = JSON.stringify({sorted, figures});
document.body.append(found);
</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    workspace = tmp_path_factory.mktemp("study")
    store(workspace, [*grid(), failure("CUDA out of memory", doc=0, context=8192)])
    store_rounds(workspace, rounds([(4, 1), (4, 4)], "budgetdraft-4096-64-4"))
    return build_report(workspace, RUN, tmp_path_factory.mktemp("out"), facts=FACTS)["report.html"]


def shown(page: Path, profile: Path) -> tuple[str, str]:
    """The page as Chromium has it after its scripts, and what Chromium says of it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium here: the report was not opened, no table was sorted, no figure was looked at")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--log-level=0",
        f"--user-data-dir={profile}", "--dump-dom", page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def probed(report, tmp_path_factory) -> dict[str, Any]:
    """What `PROBE` finds at the end of a copy of the report."""
    folder = tmp_path_factory.mktemp("probed")
    page = folder / "report.html"
    text = report.read_text()
    assert text.count("</body>") == 1
    page.write_text(text.replace("</body>", f"{PROBE}</body>"))
    dom, complaints = shown(page, folder / "profile")
    assert "CONSOLE" not in complaints
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.S)
    return json.loads(html.unescape(found))


def test_chromium_shows_the_report_without_a_complaint(report, tmp_path):
    dom, complaints = shown(report, tmp_path / "profile")
    assert "CONSOLE" not in complaints
    assert '<th scope="col"><button type="button">Method</button></th>' in dom


def rank(value: str) -> float:
    """Of a number as a table has it: what is not known comes first, a full cache last."""
    return {"-": float("-inf"), "full": float("inf")}.get(value) or float(value)


def test_a_click_sorts_a_table_by_its_column_and_another_turns_it(probed):
    columns = {(table, c["header"]): c for table, found in probed["sorted"].items() for c in found}
    assert all(c["up"]["sort"] == "ascending" and c["down"]["sort"] == "descending" for c in columns.values())
    numeric = {key: c for key, c in columns.items() if c["numeric"] and key[1] != "Exact"}  # k/n
    assert len(numeric) > 30
    for key, column in numeric.items():
        up, down = ([rank(value) for value in column[way]["values"]] for way in ("up", "down"))
        assert up == sorted(up) and down == sorted(up, reverse=True), key
    methods = columns["t-summary", "Method"]
    assert methods["up"]["values"] == sorted(methods["up"]["values"]) == methods["down"]["values"][::-1]
    assert len(set(methods["up"]["values"])) == 4
    # A column of several values really moves: the table was not in this order before.
    acceptance = columns["t-summary", "Acceptance (%)"]
    assert acceptance["up"]["values"] != acceptance["down"]["values"]


def test_no_click_loses_a_row(probed):
    for table, columns in probed["sorted"].items():
        assert len({len(c[way]["values"]) for c in columns for way in ("up", "down")}) <= 1, table


def test_every_figure_can_be_seen(probed):
    wanted = ("acceptance", "acceptance-heat", "decode-speedup", "phases", "positions", "training-loss")
    assert {f"fig-{name}" for name in wanted} <= set(probed["figures"])
    for name, figure in probed["figures"].items():
        assert figure["seen"] and min(figure["sizes"]) > 100, (name, figure)
