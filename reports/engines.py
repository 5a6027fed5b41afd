"""The flags of serving engines for a recommended setting: only what an engine honours, and what it cannot do."""

import json
import shlex
from typing import Any

from bdcore.collapse.options import Setting
from bdcore.collapse.recommend import Recommendation


def engines(found: Recommendation, model: str = "DRAFTER", verifier: str = "VERIFIER") -> dict[str, dict[str, Any]]:
    """Per engine: the flags of an independent draft model that it honours, and what of the setting it cannot do."""
    if found.option is None or found.status != "on":
        return {}
    setting = found.option.setting
    if setting.method == "ngram":
        return {"vllm": _vllm_lookup(verifier, setting)}
    missing = [] if setting.budget < 0 else [f"the budget of {setting.budget} keys chosen by {setting.policy}"]
    missing += [] if setting.position_mode == "absolute" else [f"{setting.position_mode} positions"]
    missing += [] if setting.gamma_mode == "fixed" else [f"a {setting.gamma_mode} draft length"]
    return {"vllm": _vllm(verifier, model, setting, missing), "sglang": _sglang(verifier, model, setting, missing)}


def _vllm(verifier: str, model: str, setting: Setting, missing: list[str]) -> dict[str, Any]:
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": setting.gamma}
    notes = [f"cannot do {what}" for what in missing]
    if setting.budget > 0:
        notes.append(
            "a draft model's own `sliding_window` is honoured: the newest keys alone, without sinks and without "
            f"chosen chunks. Measure policy sink_recent before you set it to {setting.budget}"
        )
    return {"flags": f"vllm serve {verifier} --speculative-config {shlex.quote(json.dumps(config))}", "notes": notes}


def _vllm_lookup(verifier: str, setting: Setting) -> dict[str, Any]:
    config = {"method": "ngram", "num_speculative_tokens": setting.gamma, "prompt_lookup_max": 3}
    return {"flags": f"vllm serve {verifier} --speculative-config {shlex.quote(json.dumps(config))}", "notes": []}


def _sglang(verifier: str, model: str, setting: Setting, missing: list[str]) -> dict[str, Any]:
    flags = (
        f"python -m sglang.launch_server --model-path {verifier} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {model} --speculative-num-steps {setting.gamma} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {setting.gamma + 1}"
    )
    notes = [f"cannot do {what}" for what in missing]
    if setting.budget > 0:
        notes.append("`--speculative-draft-window-size` has no effect with STANDALONE: the draft cache stays full")
    return {"flags": flags, "notes": notes}
