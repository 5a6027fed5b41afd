"""The assisted generation of transformers, as an outside reference: its loop, its caches, attention and linear layers,
over the weights that our own methods use. Greedy, a constant number of drafts.

The loop is the library's own. Its generator of candidates is asked through a subclass that counts, keeps time, and
differs in one thing: the first iteration offers no candidates. So the first token comes from the prompt alone and
rounds begin after it, as in every method here; left to itself the library would draft and check a first block inside
the forwards that read the prompt, and no prompt could be told from it.

Seconds. `draft_prefill_s`: the drafter reads the prompt, all but its last token. `prefill_s`: from the call to the
first token without that, the verifier's reading of the prompt. `decode_s`: from the first token to the last, the sum of
the rounds: `draft_s` inside the generator, `verify_s` from there to the end of the check, `overhead_s` between rounds.

Counts are those of `sd_full` but for two things. The library ends a draft at EOS, where our drafters go on: a round in
which EOS is drafted and rejected counts fewer drafts. And a drafter of fewer ids than the verifier reads the others
too, as the mean of its embedding, where ours lets the verifier go on alone.

Legend: T tokens.
"""

import time
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from bdcore.decoding.records import Decoded, Round
from bdcore.models.drafter import Drafter
from bdcore.models.plain import plain_drafter, plain_model


def decode_assisted(
    verifier: Any, drafter: Drafter, prompt: Sequence[int], *, gamma: int, new_tokens: int, eos: Collection[int]
) -> Decoded:
    """The greedy text of `verifier` after `prompt`, at most `new_tokens` tokens or up to EOS, by the library's
    `generate(assistant_model=...)` with `gamma` drafts a round, the drafter's cache full and its positions absolute,
    extrapolated beyond its own.
    """
    model, assistant = plain_model(verifier), plain_drafter(drafter, verifier.config.vocab_size)
    ends = {"eos_token_id": sorted(eos) or None, "pad_token_id": 0}
    model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, **ends
    )
    assistant.generation_config = GenerationConfig(
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0, **ends
    )
    made: list[_Counted] = []

    def generator(*, target_tokenizer: Any, assistant_tokenizer: Any, **parts: Any) -> _Counted:
        made.append(_Counted(gamma, **parts))
        return made[0]

    model._get_candidate_generator = generator
    ids_1T = torch.tensor([list(prompt)], device=model.device)
    begun = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), assistant_model=assistant)
    tokens = out.sequences[0, len(prompt) :].tolist()
    return made[0].result(tokens, begun, "eos" if tokens[-1] in eos else "length")


class _Counted(AssistedCandidateGenerator):
    """The library's generator, with a record of every round. One object serves one generation."""

    def __init__(self, gamma: int, **parts: Any) -> None:
        super().__init__(**parts)
        self._verifier_cache = parts["model_kwargs"]["cache"]
        self._draft: list[int] | None = None  # None: the prompt is being read
        self._length = 0
        self._rounds: list[Round] = []
        self._accepted_at, self._drafted_at = [0] * gamma, [0] * gamma
        self._peak = 0
        self._draft_prefill_s = self._first = self._ended = self._begun = self._drafted = 0.0

    def get_candidates(self, input_ids: Any, **kwargs: Any) -> Any:
        self._begun, first = time.perf_counter(), self._length == 0
        self._length = input_ids.shape[1]
        if first:
            self._read(input_ids)
            return input_ids, None
        candidates, logits = super().get_candidates(input_ids, **kwargs)
        self._draft = candidates[0, self._length :].tolist()
        self._peak = max(self._peak, self.assistant_kwargs["cache"].get_seq_length())
        self._drafted = time.perf_counter()
        return candidates, logits

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Told by the loop at the end of every iteration; `input_ids` then hold what it emitted."""
        super().update_candidate_strategy(input_ids, scores, num_matches)
        emitted, now = input_ids[0, self._length :].tolist(), time.perf_counter()
        if self._draft is None:
            self._first = now
        else:
            self._note(self._draft, emitted, now)
        self._ended = now

    def result(self, tokens: list[int], begun: float, reason: str) -> Decoded:
        cache = self.assistant_kwargs["cache"]
        return Decoded(
            tokens,
            reason,
            self._rounds,
            self._first - begun - self._draft_prefill_s,
            self._draft_prefill_s,
            sum(r.draft_s + r.verify_s + r.overhead_s for r in self._rounds),
            drafter_cached_peak=self._peak,
            drafter_kv_bytes=_bytes(cache),
            verifier_kv_bytes=_bytes(self._verifier_cache),
            accepted_at=self._accepted_at,
            drafted_at=self._drafted_at,
        )

    def _read(self, prompt_1T: Tensor) -> None:
        """The drafter reads all but the last token of the prompt: the library feeds the newest two in every round."""
        cache = DynamicCache(config=self.assistant_model.config)
        cache.activate_past_recording()  # as `generate` does for an assistant: layers with a window must roll back
        if prompt_1T.shape[1] > 1:
            self.assistant_model(prompt_1T[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        self.assistant_kwargs["cache"] = cache
        self._peak = cache.get_seq_length()
        self._draft_prefill_s = time.perf_counter() - self._begun

    def _note(self, draft: list[int], emitted: list[int], now: float) -> None:
        # Not the loop's number of matches: it takes an EOS that was drafted for the verifier's own token.
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, emitted, strict=False)))
        drafted = accepted if len(emitted) <= accepted else len(draft)
        for i in range(drafted):
            self._drafted_at[i] += 1
            self._accepted_at[i] += i < accepted
        cache = self.assistant_kwargs["cache"]
        self._rounds.append(
            Round(
                drafted=drafted,
                accepted=accepted,
                emitted=len(emitted),
                draft_s=self._drafted - self._begun,
                select_s=0.0,
                verify_s=now - self._drafted,
                overhead_s=self._begun - self._ended,
                drafter_cached=cache.get_seq_length(),
                drafter_kv_bytes=_bytes(cache),
                verifier_kv_bytes=_bytes(self._verifier_cache),
            )
        )


def _bytes(cache: Any) -> int:
    """Bytes of a library's cache, as it holds them now."""
    held = [t for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in held)
