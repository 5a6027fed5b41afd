"""From a measured grid to a setting: which budget, gamma and policy to deploy, and where to leave speculation off.

A setting is judged by the lower end of its speedup's interval in its worst scene: what holds on most prompts of
whatever text comes, not what one lucky cell or a corpus that loops shows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import ByteSize

from bdcore.collapse.intervals import MIN_PROMPTS
from bdcore.collapse.options import Option, Scene, Setting


@dataclass(frozen=True)
class Recommendation:
    status: str
    """`on`: the whole interval is above 1; `unsure`: it reaches below; `off`: it is below; `unknown`: nothing fits."""
    context: int | None
    """The measured context it rests on: the smallest that is not below the one asked for, else the largest."""
    option: Option | None
    """The setting in the scene that decides: where its interval reaches lowest."""
    off_above: int | None
    """The largest measured context up to which the setting's whole interval stays above 1 in all scenes that it is
    judged by; None: nowhere."""
    kv_bytes: int | None
    """Of the drafter's caches at the context asked for, all sequences together."""
    sentences: list[str]
    others: list[Option] = field(default_factory=list)
    """The same setting at the same context in the scenes (and runs) that do not decide."""


def recommend(options: Sequence[Option], *, context: int, memory: int, batch: int = 1) -> Recommendation:
    """The setting for a context (tokens) whose drafter caches fit into `memory` bytes for `batch` sequences.

    Settings that were timed in fewer scenes than another one that fits are left out: an easy corpus must not win by
    being the only one.
    """
    judged = [o for o in options if o.speedup.low is not None and o.speedup.n >= MIN_PROMPTS]
    if not judged:
        return _unknown(f"no setting was timed on {MIN_PROMPTS} prompts or more; measure the workload `greedy` first")
    contexts = sorted({o.context for o in judged})
    at = next((c for c in contexts if c >= context), contexts[-1])
    settings = _by_setting(o for o in judged if o.context == at)
    needs = [batch * max(o.bytes_at(context) for o in measured) for measured in settings]
    fitting = [measured for measured, need in zip(settings, needs, strict=True) if need <= memory]
    if not fitting:
        return _unknown(
            f"no drafter cache fits into {size(memory)} at {context} tokens; the smallest takes {size(min(needs))} "
            f"for {_sequences(batch)}"
        )
    worst, *others = best = _safest(fitting)
    scenes = {o.scene for o in best}
    off_above, off_from = _reach(judged, worst.setting, scenes)
    status = "on" if _lower(worst) > 1 else "off" if (worst.speedup.high or 0.0) < 1 else "unsure"
    sentences = [
        _headline(worst, status),
        *_scenes(best, [o.scene for o in options if o.scene not in scenes]),
        _memory(best, context, batch),
        *_limits(worst, context, batch, off_above, off_from),
    ]
    need = batch * max(o.bytes_at(context) for o in best)
    return Recommendation(status, at, worst, off_above, need, sentences, others)


def _unknown(sentence: str) -> Recommendation:
    return Recommendation("unknown", None, None, None, None, [sentence])


def _by_setting(options: Iterable[Option]) -> list[list[Option]]:
    """Options of one setting, the worst first."""
    found: dict[Setting, list[Option]] = {}
    for option in options:
        found.setdefault(option.setting, []).append(option)
    return [sorted(measured, key=_lower) for measured in found.values()]


def _safest(settings: list[list[Option]]) -> list[Option]:
    """Of the settings timed in most scenes, the one whose worst interval reaches highest."""
    most = max(len({o.scene for o in measured}) for measured in settings)
    return max((m for m in settings if len({o.scene for o in m}) == most), key=lambda m: _lower(m[0]))


def _lower(option: Option) -> float:
    assert option.speedup.low is not None
    return option.speedup.low


def _reach(options: Sequence[Option], setting: Setting, scenes: set[Scene]) -> tuple[int | None, int | None]:
    """(the last context before the first at which the setting's interval reaches 1 or below in any of these scenes,
    that first one), over the contexts at which it was timed in all of them."""
    last = None
    for context in sorted({o.context for o in options}):
        here = [o for o in options if (o.setting, o.context) == (setting, context) and o.scene in scenes]
        if {o.scene for o in here} != scenes:
            continue
        if min(map(_lower, here)) <= 1:
            return last, context
        last = context
    return last, None


_VERDICT = {
    "on": "Speculate: the whole interval is above 1.",
    "unsure": "Leave speculation off unless more prompts decide it: the interval reaches below 1.",
    "off": "Leave speculation off: the whole interval is below 1, and no other setting that fits and was timed on as "
    "much does better.",
}


def _headline(worst: Option, status: str) -> str:
    return f"{_VERDICT[status]} Best at {worst.context} tokens: {worst.setting}: {_read(worst)} on {worst.scene}."


def _read(option: Option) -> str:
    speedup = option.speedup
    return f"{speedup.value:.2f}x decoding [{speedup.low:.2f}, {speedup.high:.2f}], n = {speedup.n}"


def _scenes(best: Sequence[Option], missing: Iterable[Scene]) -> list[str]:
    """Which of several measurements decided, and where the setting was not judged."""
    worst, *others = best
    said = list[str]()
    if others:
        runs = len({o.run for o in best}) > 1
        names = [f"{o.scene}{f' in run {o.run}' if runs else ''}" for o in best]
        rest = "; ".join(f"{name}: {_read(o)}" for name, o in zip(names[1:], others, strict=True))
        said.append(f"The worst of {len(best)} measurements decides: {names[0]}. {rest}. Name one to be judged by it.")
    if unseen := sorted({str(scene) for scene in missing}):
        where = f"at {worst.context} tokens on {MIN_PROMPTS} prompts or more"
        said.append(f"Not judged on {'; '.join(unseen)}: it was not timed there {where}.")
    return said


def _memory(best: Sequence[Option], asked: int, batch: int) -> str:
    largest = max(best, key=lambda o: o.bytes_at(asked))
    one = largest.bytes_at(asked)
    if not one:
        return "It keeps no cache of its own."
    told = f"The drafter's cache takes {size(batch * one)} for {_sequences(batch)}"
    grown = largest.grows and asked != largest.context
    if not grown and batch == 1:
        return f"{told}, as measured."
    why = [f"it has a key for every one of {asked} tokens"] if grown else []
    why += [f"{batch} sequences have {batch} caches"] if batch > 1 else []
    measured = f"{size(largest.kv_bytes)} measured for one sequence at {largest.context} tokens"
    return f"{told}: estimated from {measured}, since {' and '.join(why)}."


def _limits(worst: Option, asked: int, batch: int, off_above: int | None, off_from: int | None) -> list[str]:
    said = list[str]()
    if worst.context != asked:
        side = "the next longer one" if worst.context > asked else "the longest one; what lies beyond was not measured"
        said.append(f"{asked} tokens were not measured; this is {side}, {worst.context}.")
    if off_above is not None and off_from is not None:
        said.append(f"Switch speculation off above {off_above} tokens: at {off_from} its interval reaches 1 or below.")
    if batch > 1:
        said.append("Speedups were measured one sequence at a time; a full batch leaves less to gain.")
    return said


def _sequences(batch: int) -> str:
    return f"{batch} sequence{'s' if batch > 1 else ''}"


def size(value: float) -> str:
    """Bytes in binary units."""
    return ByteSize(round(value)).human_readable(separator=" ")
