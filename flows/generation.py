"""`budgetdraft generate`: one prompt through a drafter and the verifier, with acceptance, speed and equality."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from bdcore.config import ConfigError
from bdcore.decoding.decoder import decode, first_mismatch, mismatch_kind, prefill
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.records import Decoded
from bdcore.decoding.sampling import Sampling
from bdcore.decoding.stops import StopStrings
from bdcore.documents import encode
from bdcore.evaluation.cell import cache_plan
from bdcore.kv.budget import FULL, parse_budget
from bdcore.models.drafter import Drafter, load_drafter
from bdcore.models.loading import eos_ids, load_model, load_tokenizer, materialise, quiet
from bdcore.preflight import with_budgets
from bdcore.runtime import torch_dtype
from bdcore.study import Study, open_study


def generate_text(
    text: str,
    config: str,
    overrides: list[str],
    console: Console,
    *,
    drafter: str,
    budget: str,
    rule: tuple[str | None, int],
    new_tokens: int,
    sampling: Sampling,
    stop: list[str],
    seed: int,
    compare: bool,
) -> None:
    """Stream a continuation of `text`, then print what speculation did. `rule`: draft length mode and most tokens."""
    study = open_study(config, overrides)
    runtime, grid = study.runtime, study.config.grid
    length = DraftRule(rule[0] or grid.gamma_mode, rule[1], grid.confidence)
    cached = _budget(study, budget, length.gamma)
    folder = _folder(study, drafter)
    with quiet():
        source = materialise(study.config.verifier, study.workspace.models)
        tokenizer = load_tokenizer(source, study.config.verifier.revision)
        ids = encode(tokenizer, text)
        if not ids:
            raise ConfigError("the prompt is empty; give at least one token of text")
        most = study.inputs.verifier.positions - new_tokens
        if len(ids) > most:
            raise ConfigError(f"the prompt has {len(ids)} tokens; with --new-tokens {new_tokens} at most {most} fit")
        dtype = torch_dtype(runtime.grid_dtype)
        verifier = load_model(source, dtype=dtype, device=runtime.device, revision=study.config.verifier.revision)
        proposer = _load(folder, study, dtype) if folder else None
    policy = grid.policy[0]  # a study may list several
    plan = cache_plan(study.config, budget=cached, policy=policy, position_mode=grid.position_mode[0])
    observe = grid.window if proposer and policy == "oracle" else 0
    start = prefill(verifier, ids, new_tokens=new_tokens, gamma=length.gamma, chunk=grid.prefill_chunk, observe=observe)
    how: dict[str, Any] = {
        "new_tokens": new_tokens,
        "eos": eos_ids(verifier, tokenizer),
        "sampling": sampling,
        "seed": seed,
        "stop": StopStrings(tokenizer, stop) if stop else None,
    }
    stream = _Stream(tokenizer, console)
    decoded = decode(start, proposer, plan, gamma=length if proposer else 0, on_tokens=stream, **how)
    stream.close()
    alone = decode(start, None, **how) if compare and proposer else None
    for line in _figures(decoded, alone, len(ids), cached, greedy=sampling.greedy):
        console.print(line, highlight=False, soft_wrap=True)


def _budget(study: Study, text: str, gamma: int) -> int:
    """Keys, from a number, `full`, or memory such as 2MiB."""
    grid = study.config.grid
    if text[-1:] in ("B", "b"):
        try:
            size = TypeAdapter(ByteSize).validate_python(text)
        except ValidationError:
            raise ConfigError(f"--budget {text}: give a number of keys, memory such as 2MiB, or `full`") from None
        grid = grid.model_copy(update={"budgets": [FULL], "budget_bytes": [size], "gammas": [gamma]})
        return with_budgets(study.config.model_copy(update={"grid": grid}), study.runtime).grid.budgets[-1]
    cached = parse_budget(text)
    grid.check(grid.policy, [cached])
    return cached


def _folder(study: Study, drafter: str) -> str | None:
    if drafter == "none":
        return None
    role = {"trained": study.keys.trained, "base": study.keys.base}.get(drafter)
    folder = study.workspace.drafter(role) if role else Path(drafter).expanduser().resolve()
    if not (folder / "config.json").is_file():
        remedy = f"`budgetdraft run` this study first ({folder})" if role else "give a drafter's folder"
        raise ConfigError(f"--drafter {drafter}: no drafter at {folder}; {remedy}")
    return str(folder)


def _load(folder: str, study: Study, dtype: torch.dtype) -> Drafter:
    return load_drafter(folder, verifier_vocab=study.inputs.verifier.vocab, dtype=dtype, device=study.runtime.device)


class _Stream:
    """Prints text as it comes, whole characters only: a token may end inside one."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self.tokenizer, self.console = tokenizer, console
        self.tokens: list[int] = []
        self.shown = ""

    def __call__(self, tokens: list[int]) -> None:
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("�"):
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.file.write(text[len(self.shown) :])
        self.console.file.flush()
        self.shown = text

    def close(self) -> None:
        self._print(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        self.console.file.write("\n\n")


def _figures(decoded: Decoded, alone: Decoded | None, prompt_len: int, budget: int, *, greedy: bool) -> list[str]:
    new, rate = len(decoded.tokens), len(decoded.tokens) / max(decoded.decode_s, 1e-9)
    lines = [
        f"prompt {prompt_len} tokens, {new} new ({decoded.finish_reason}); prefill {decoded.prefill_s:.2f} s, "
        f"{rate:.1f} tokens/s after it"
    ]
    drafted, accepted = (sum(getattr(r, name) for r in decoded.rounds) for name in ("drafted", "accepted"))
    if drafted:
        lines.append(
            f"acceptance {accepted / drafted:.1%} ({accepted} of {drafted} drafted), "
            f"{(new - 1) / len(decoded.rounds):.2f} tokens per round with the verifier's own"
        )
        name = "full" if budget == FULL else str(budget)
        lines.append(
            f"drafter's cache: budget {name}, at most {decoded.drafter_cached_peak} keys per layer and head with the "
            f"block in flight, {decoded.drafter_kv_bytes / 2**20:.2f} MiB"
        )
    if alone is not None:
        pace = [max(d.decode_s, 1e-9) / max(1, len(d.tokens) - 1) for d in (alone, decoded)]
        lines.append(f"{_equality(decoded, alone) if greedy else _SAMPLED}; decode speedup {pace[0] / pace[1]:.2f}x")
    return lines


_SAMPLED = "sampled from the verifier's own distribution (tokens need not be those of the verifier alone)"


def _equality(decoded: Decoded, alone: Decoded) -> str:
    mismatch = first_mismatch(decoded.tokens, alone.tokens)
    if mismatch is None:
        return "equal to the verifier alone"
    steps = alone.gap_steps[mismatch] if mismatch < len(alone.gap_steps) else None
    kind = "a near-tie of rounding" if mismatch_kind(steps) == "tie" else "NOT a near-tie"
    return f"DIFFERS from the verifier alone at {mismatch}, {kind}"
