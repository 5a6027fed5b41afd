"""Attribution: what of the acceptance lost at the longest context each change of the setting gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bdcore.collapse import Attribution, attribute_loss
from bdcore.collapse.pairing import Sums
from bdcore.schema import FULL_BUDGET
from reports.series import SCENE, Series, aligned, grouped, plain, scene_of

_PLAIN = ("attention_mass", "absolute")
"""The paper's setting, which the others are swapped for."""
_POLICIES = {
    "no_sinks": "sinks removed",
    "no_recent": "newest keys removed",
    "random": "random chunks",
    "oracle": "chunks by the verifier's attention",
    "last_key": "chunks by the last key",
    "sink_recent": "sinks and newest keys alone",
    "attention_mass": "chunks by attention",
    "attention_ahead": "chunks by attention and those after them",
    "retrieval": "chunks by attention, every round from all keys",
    "retrieval_ahead": "the same and those after them",
}


@dataclass(frozen=True)
class Swaps:
    """One attribution and what it is about."""

    title: str
    drafter: str
    budget: int
    found: Attribution


def attributions(series: Sequence[Series]) -> list[Swaps]:
    """One per scene, drafter and budget that was measured in three settings or more, at the smallest gamma."""
    names = (*SCENE, "drafter_name", "gamma_mode")
    return [swaps for _, group in grouped(plain(series), names) for swaps in _of_drafter(group)]


def _of_drafter(group: Sequence[Series]) -> list[Swaps]:
    gamma, contexts = min(s["gamma"] for s in group), sorted({s["context"] for s in group})
    group = [s for s in group if s["gamma"] == gamma and not s["refresh"]]
    short, long = ([s for s in group if s["context"] == c] for c in (contexts[0], contexts[-1]))
    full = {s["context"]: s for s in group if s["budget"] == FULL_BUDGET}
    out: list[Swaps] = []
    for budget in sorted({s["budget"] for s in long} - {FULL_BUDGET}):
        settings = {(s["policy"], s["position_mode"]): s for s in long if s["budget"] == budget}
        base = settings.pop(_PLAIN, None)
        before = full.get(contexts[0]) or _at(short, budget)
        if len(contexts) < 2 or base is None or before is None or len(settings) < 2:
            continue
        changed = {_words(*key): s.acceptance for key, s in settings.items()}
        if contexts[-1] in full:
            changed["full cache"] = full[contexts[-1]].acceptance
        title = (
            f"{scene_of(base)}: {base['drafter_name']}, gamma {gamma}, from {contexts[0]} tokens "
            f"({'full cache' if before['budget'] == FULL_BUDGET else f'budget {budget}'}) to {contexts[-1]} tokens at "
            f"budget {budget}, chunks by attention, absolute positions"
        )
        out.append(Swaps(title, base["drafter_name"], budget, _attributed(before.acceptance, base.acceptance, changed)))
    return out


def _at(series: Sequence[Series], budget: int) -> Series | None:
    plain = [s for s in series if s["budget"] == budget and (s["policy"], s["position_mode"]) == _PLAIN]
    return plain[0] if plain else None


def _attributed(
    before: Mapping[str, Sums], base: Mapping[str, Sums], changed: Mapping[str, Mapping[str, Sums]]
) -> Attribution:
    first, second, *others = aligned(before, base, *changed.values())
    return attribute_loss(first, second, dict(zip(changed, others, strict=True)))


def _words(policy: str, mode: str) -> str:
    positions = "in-cache positions" if mode == "in_cache" else ""
    chosen = "" if policy == _PLAIN[0] else _POLICIES.get(policy, policy)
    return ", ".join(part for part in (chosen, positions) if part)
