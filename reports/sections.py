"""What each analysis of a run found, as a section."""

from collections.abc import Sequence
from typing import Any

from bdcore.collapse import SpeedupCollapse
from bdcore.collapse.words import budget_name
from reports.breakeven import Worth
from reports.budget_tests import BudgetTest, drafter_tests
from reports.ceilings import ceilings
from reports.deaths import Deaths
from reports.needles import Needles
from reports.section import Section, Shown
from reports.series import Series
from reports.swaps import Swaps
from reports.upper import Upper


def of_speedups(found: Sequence[SpeedupCollapse]) -> Section:
    return Section(
        "speedup-boundaries",
        "Where speculation stops paying",
        "The smallest context at which the decode speedup is below 1: by its whole interval, and by its point alone.",
        [
            *(("Method", False), ("Budget", True), ("Gamma", True), ("Verdict", False), ("Slower from", True)),
            *(("Point below 1 from", True), ("Lowest (x)", True), ("In words", False)),
        ],
        [
            [
                *(", ".join(p for p in (s.method, s.setting) if p), budget_name(s.budget), s.gamma, s.status),
                *(s.certain_from, s.below_from, None if s.lowest is None else round(s.lowest, 2), s.sentence),
            ]
            for s in found
        ],
    )


def of_attribution(swaps: Sequence[Swaps]) -> Section:
    rows: list[list[Any]] = []
    for one in swaps:
        rows.append([one.title, "lost", Shown(one.found.lost), None, one.found.sentence])
        rows += [[one.title, s.name, Shown(s.gained), Shown(s.share), s.sentence] for s in one.found.swaps]
    return Section(
        "attribution",
        "Attribution: what lost acceptance is due to",
        "One thing of the collapsed setting is changed at a time, on the same documents. A change that gives nothing "
        "back clears its suspect. Shares need not add up: causes overlap.",
        [
            ("Collapsed setting", False),
            ("Change", False),
            ("Points", True),
            ("Share of the loss (%)", True),
            ("In words", False),
        ],
        rows,
    )


def of_ceilings(series: Sequence[Series]) -> Section:
    return Section(
        "ceiling",
        "The ceiling: the verifier under the same view",
        "How often the verifier agrees with its own full-context token when it sees no more than the drafter. A "
        "practical ceiling, not a proof: a drafter may guess what the cut verifier gets wrong.",
        [
            *(("Setting", False), ("Drafter", False), ("Context", True), ("Budget", True), ("Policy", False)),
            *(("Positions", False), ("Gamma", True), ("Acceptance (%)", True), ("Ceiling (%)", True)),
            ("Reached (%)", True),
        ],
        [
            [
                *(c.scene, c.drafter, c.context, budget_name(c.budget), c.policy, c.position_mode, c.gamma),
                *(Shown(c.acceptance), Shown(c.ceiling), Shown(c.reached)),
            ]
            for c in ceilings(series)
        ],
    )


def of_budgets(tests: Sequence[BudgetTest]) -> Section:
    return Section(
        "budget-tests",
        "Tests over the budget",
        "Sensitive: equal acceptance at every budget is refuted. Dip: acceptance falls with the budget beyond what "
        "the best curve that never falls allows. Bootstrap over documents, drawn with all their budgets.",
        [
            *(("Setting", False), ("Range / mean (%)", True), ("Sensitivity", False), ("p, no effect", True)),
            *(("Monotonicity", False), ("p, never falls", True), ("Largest fall", False), ("Points", True)),
        ],
        [
            [
                *(t.name, Shown(t.sensitivity.spread), t.sensitivity.status, _p(t.sensitivity.p_value)),
                *(t.monotonicity.status, _p(t.monotonicity.p_value), _pair(t)),
                Shown(t.monotonicity.fall) if t.monotonicity.fall else None,
            ]
            for t in tests
        ],
    )


def of_upper(found: Sequence[Upper]) -> Section:
    return Section(
        "upper-envelope",
        "The upper envelope: against the best without the drafter",
        "Every cell of a trained drafter beside the best of all other drafters there, at its budget in any setting or "
        "with the full cache. The gap is paired over documents; above and below: its whole interval. The best of "
        "several is the luckiest of them too, which makes below a little too likely.",
        [
            *(("Setting", False), ("Drafter", False), ("Context", True), ("Budget", True), ("View", False)),
            *(("Gamma", True), ("Acceptance (%)", True), ("Best without", False), ("Its acceptance (%)", True)),
            *(("Gap (points)", True), ("Verdict", False)),
        ],
        [
            [
                *(u.scene, u.drafter, u.context, budget_name(u.budget), u.setting, u.gamma, Shown(u.acceptance)),
                *(u.best, Shown(u.best_acceptance), Shown(u.gap), u.verdict),
            ]
            for u in found
        ],
    )


def _pair(test: BudgetTest) -> str | None:
    found = test.monotonicity
    if found.lower is None or found.upper is None:
        return None
    return f"{budget_name(found.lower)} to {budget_name(found.upper)}"


def _p(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def of_drafters(series: Sequence[Series]) -> Section:
    return Section(
        "drafter-tests",
        "Drafters compared",
        "Paired permutation test: on each document the two drafters' counts trade places. With few documents no small "
        "p-value is possible; the smallest one is given.",
        [
            *(("Cell", False), ("Verdict", False), ("Difference (points)", True), ("p", True)),
            *(("Smallest p", True), ("n", True), ("In words", False)),
        ],
        [
            [
                *(where, t.status, None if t.difference is None else round(100 * t.difference, 1), _p(t.p_value)),
                *(_p(t.smallest), t.n, t.sentence),
            ]
            for where, t in drafter_tests(series)
        ],
    )


def of_deaths(found: Sequence[Deaths]) -> Section:
    return Section(
        "deaths",
        "Where drafts die",
        "At the longest context. By position: acceptance of the drafts that were put to the test there, all before "
        "them accepted, at the largest gamma. By token: acceptance of the first draft at replay positions, by the "
        "class of the verifier's token and by how far back the text shows that token after the same two tokens.",
        [
            *(("By", False), ("Drafter", False), ("Corpus", False), ("Context", True), ("Budget", True)),
            *(("Policy", False), ("Positions", False), ("Label", False), ("Acceptance (%)", True)),
            ("Of all rejections (%)", True),
        ],
        [
            [
                *(d.by, d.name, d.corpus, d.context, budget_name(d.budget), d.policy, d.position_mode),
                *(str(g.label), Shown(g.acceptance)),
                None if g.rejected_share is None else round(100 * g.rejected_share, 1),
            ]
            for d in found
            for g in d.groups
        ],
    )


def of_needles(found: Sequence[Needles]) -> Section:
    return Section(
        "needles",
        "Needles: by how far back the evidence stands",
        "Prompts that ask for a number hidden in their text, by its distance from the prompt's end. Acceptance: over "
        "the whole text that follows, which begins with the answer. Answers found: texts that contain the number; "
        "greedy text that is that of `ar` finds those that `ar` finds.",
        [
            *(("Drafter", False), ("Corpus", False), ("Workload", False), ("Context", True), ("Budget", True)),
            *(("Policy", False), ("Positions", False), ("Gamma", True), ("Distance (% of the prompt)", False)),
            *(("Nearest (tokens)", True), ("Farthest (tokens)", True), ("Acceptance (%)", True)),
            ("Answers found (%)", True),
        ],
        [
            [
                *(n.name, n.corpus, n.workload, n.context, budget_name(n.budget), n.policy, n.position_mode, n.gamma),
                *(r.label, r.nearest, r.farthest, Shown(r.acceptance), Shown(r.found)),
            ]
            for n in found
            for r in n.reaches
        ],
    )


def of_break_even(found: Sequence[Worth]) -> Section:
    return Section(
        "break-even",
        "Is speculation worth it?",
        "Expected from acceptance by position and measured costs, and checked against the measured best draft length. "
        "Needed: accepted / drafted at the shortest measured draft length to be as fast as the verifier alone.",
        [
            *(("Setting", False), ("Method", False), ("Context", True), ("Budget", True), ("Draft / ar step", True)),
            *(("Verify / ar step", False), ("Expected (x)", False), ("Best gamma", True), ("Needed (%)", True)),
            *(("What pair would do", False), ("Check", False)),
        ],
        [
            [
                *(w.scene, w.method, w.context, budget_name(w.budget), round(w.draft_ratio, 3)),
                *(_by_gamma(w.verify_ratios), _by_gamma(w.predicted), w.best, _needed(w)),
                *(w.pair.sentence, w.check.sentence),
            ]
            for w in found
        ],
    )


def _by_gamma(values: Any) -> str:
    return ", ".join(f"{gamma}: {value:.2f}" for gamma, value in values.items() if gamma)


def _needed(found: Worth) -> float | None:
    return None if found.needed.acceptance is None else round(100 * found.needed.acceptance, 1)
