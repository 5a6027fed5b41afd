"""The flags of serving engines for a recommended setting: only what an engine honours, and what it cannot do."""

import json
import shlex
from typing import Any

from bdcore.collapse.options import Setting
from bdcore.collapse.recommend import Recommendation

ENGINES = ("vllm", "sglang")

_DRAFT_MODEL = ("sd_full", "sd_sparse", "streaming", "budgetdraft", "hf_assisted")
"""Methods whose drafter is a model of its own, which engines load beside the verifier."""
_CANNOT = {
    "self_sparse": "let the verifier draft for itself over a sparse cache",
    "triforce": "draft on two levels, the upper of which is the verifier over a sparse cache",
}


def engines(found: Recommendation, model: str = "DRAFTER", verifier: str = "VERIFIER") -> dict[str, dict[str, Any]]:
    """Per engine: `flags` (None where it has no such method) and `notes` on what of the setting it cannot do."""
    if found.option is None or found.status != "on":
        return {}
    setting = found.option.setting
    if setting.method == "ngram":
        return {"vllm": _vllm_lookup(verifier, setting), "sglang": _none(_SGLANG_LOOKUP)}
    if setting.method not in _DRAFT_MODEL:
        what = _CANNOT.get(setting.method, f"run the method {setting.method}")
        return {engine: _none(f"it cannot {what}") for engine in ENGINES}
    return {"vllm": _vllm(verifier, model, setting), "sglang": _sglang(verifier, model, setting)}


_SGLANG_LOOKUP = (
    "its NGRAM is another method, which was not measured: it drafts a tree from a cache of all requests, not from the "
    "request's own text"
)


def _none(note: str) -> dict[str, Any]:
    return {"flags": None, "notes": [f"no flags: {note}"]}


def _missing(setting: Setting) -> list[str]:
    """What of a setting no engine does for an independent draft model."""
    missing = [] if setting.budget < 0 else [f"the budget of {setting.budget} keys chosen by {setting.policy}"]
    missing += [] if setting.position_mode == "absolute" else [f"{setting.position_mode} positions"]
    missing += [] if setting.gamma_mode == "fixed" else [f"a {setting.gamma_mode} draft length"]
    notes = [f"cannot do {what}" for what in missing]
    return [*notes, "measured in the loop of transformers"] if setting.method == "hf_assisted" else notes


def _vllm(verifier: str, model: str, setting: Setting) -> dict[str, Any]:
    notes = _missing(setting)
    if setting.budget > 0:
        notes.append(
            "a draft model's own `sliding_window` is honoured: the newest keys alone, without sinks and without "
            f"chosen chunks. Measure policy sink_recent before you set it to {setting.budget}"
        )
    return {"flags": _serve(verifier, {"method": "draft_model", "model": model}, setting), "notes": notes}


def _vllm_lookup(verifier: str, setting: Setting) -> dict[str, Any]:
    # Without a minimum vLLM takes the maximum for it, and looks for three tokens alone.
    lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    notes = [*_missing(setting), "of several places that match it continues the first, the measured lookup the newest"]
    return {"flags": _serve(verifier, lookup, setting), "notes": notes}


def _serve(verifier: str, method: dict[str, Any], setting: Setting) -> str:
    config = method | {"num_speculative_tokens": setting.gamma}
    return f"vllm serve {verifier} --speculative-config {shlex.quote(json.dumps(config))}"


def _sglang(verifier: str, model: str, setting: Setting) -> dict[str, Any]:
    flags = (
        f"python -m sglang.launch_server --model-path {verifier} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {model} --speculative-num-steps {setting.gamma} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {setting.gamma + 1}"
    )
    notes = _missing(setting)
    if setting.budget > 0:
        notes.append("`--speculative-draft-window-size` has no effect with STANDALONE: the draft cache stays full")
    return {"flags": flags, "notes": notes}
