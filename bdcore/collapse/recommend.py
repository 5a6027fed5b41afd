"""From a measured grid to a setting: which budget, gamma and policy to deploy, and where to leave speculation off.

A setting is judged by the lower end of its speedup's interval: what holds on most prompts, not what one lucky cell
shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ByteSize

from bdcore.collapse.intervals import Estimate
from bdcore.collapse.verdicts import MIN_PROMPTS, budget_name


@dataclass(frozen=True)
class Setting:
    """What an engineer chooses."""

    method: str
    drafter: str | None
    budget: int
    """Keys per layer and head; -1: all."""
    policy: str
    position_mode: str
    gamma: int
    gamma_mode: str


@dataclass(frozen=True)
class Option:
    """A setting as it was measured at one context."""

    setting: Setting
    context: int
    kv_bytes: int
    """Of the drafter's cache at its peak, for one sequence."""
    speedup: Estimate
    """Decoding, against the verifier alone."""
    acceptance: Estimate


@dataclass(frozen=True)
class Recommendation:
    status: str
    """`on`: the whole interval is above 1; `unsure`: it reaches below; `off`: it is below; `unknown`: nothing fits."""
    context: int | None
    """The measured context it rests on: the smallest that is not below the one asked for, else the largest."""
    option: Option | None
    off_above: int | None
    """The largest measured context up to which the setting's whole interval stays above 1; None: nowhere."""
    sentences: list[str]


def recommend(options: Sequence[Option], *, context: int, memory: int, batch: int = 1) -> Recommendation:
    """The setting for a context (tokens) whose drafter caches fit into `memory` bytes for `batch` sequences."""
    judged = [o for o in options if o.speedup.low is not None and o.speedup.n >= MIN_PROMPTS]
    if not judged:
        return _unknown(f"no setting was timed on {MIN_PROMPTS} prompts or more; measure the workload `greedy` first")
    contexts = sorted({o.context for o in judged})
    at = next((c for c in contexts if c >= context), contexts[-1])
    here = [o for o in judged if o.context == at]
    fitting = [o for o in here if o.kv_bytes * batch <= memory]
    if not fitting:
        least = min(o.kv_bytes for o in here) * batch
        return _unknown(f"no drafter cache fits into {size(memory)}; the smallest takes {size(least)} for {batch}")
    best = max(fitting, key=_lower)
    off_above = _last_above(judged, best.setting)
    status = "on" if _lower(best) > 1 else "off" if (best.speedup.high or 0.0) < 1 else "unsure"
    return Recommendation(status, at, best, off_above, _sentences(best, status, context, batch, off_above, contexts))


def _unknown(sentence: str) -> Recommendation:
    return Recommendation("unknown", None, None, None, [sentence])


def _lower(option: Option) -> float:
    assert option.speedup.low is not None
    return option.speedup.low


def _last_above(options: Sequence[Option], setting: Setting) -> int | None:
    """The largest context before the first at which the setting's interval reaches 1 or below."""
    last = None
    for option in sorted((o for o in options if o.setting == setting), key=lambda o: o.context):
        if _lower(option) <= 1:
            break
        last = option.context
    return last


_VERDICT = {
    "on": "Speculate: the whole interval is above 1.",
    "unsure": "Leave speculation off unless more prompts decide it: the interval reaches below 1.",
    "off": "Leave speculation off: the whole interval is below 1, and no other setting that fits does better.",
}


def _sentences(
    best: Option, status: str, asked: int, batch: int, off_above: int | None, contexts: Sequence[int]
) -> list[str]:
    setting, speedup = best.setting, best.speedup
    said = [
        f"{_VERDICT[status]} Best at {best.context} tokens: {setting.method}"
        f"{f' with drafter {setting.drafter}' if setting.drafter else ''}, budget {budget_name(setting.budget)}, "
        f"policy {setting.policy}, {setting.position_mode} positions, gamma {setting.gamma} ({setting.gamma_mode}): "
        f"{speedup.value:.2f}x decoding [{speedup.low:.2f}, {speedup.high:.2f}], n = {speedup.n}.",
        f"The drafter's cache takes {size(best.kv_bytes * batch)} for {batch} sequence{'s' if batch > 1 else ''}.",
    ]
    if best.context != asked:
        side = "the next longer one" if best.context > asked else "the longest one; what lies beyond was not measured"
        said.append(f"{asked} tokens were not measured; this is {side}, {best.context}.")
    if off_above is not None and off_above < contexts[-1]:
        said.append(f"Switch speculation off above {off_above} tokens: from there its interval reaches 1 or below.")
    if batch > 1:
        said.append("Speedups were measured one sequence at a time; a full batch leaves less to gain.")
    return said


def size(value: float) -> str:
    """Bytes in binary units."""
    return ByteSize(round(value)).human_readable(separator=" ")
