"""The systems under test: transformers' own generation and ours, started from one and the same read prompt.

The prompt is read once; every system gets a copy of the keys and values, so that only decoding is timed and all see the
same numbers. transformers is timed by a streamer, ours by the same kind of stamps.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.streamers import BaseStreamer

from bdcore.decoding.decoder import Prefilled, decode
from bdcore.decoding.records import Decoded
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan, Stepper


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Stamps(BaseStreamer):
    """When tokens came: one entry per emitted block."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if not self.prompt_seen:  # transformers streams the prompt first
            self.prompt_seen = True
            return
        self.stamp(value.numel())

    def stamp(self, count: int) -> None:
        synchronize()
        self.times.append(time.perf_counter())
        self.counts.append(count)

    def end(self) -> None:
        pass

    @property
    def seconds_per_token(self) -> float:
        """After the first block, which may carry one-time work: the drafter reading the prompt."""
        return (self.times[-1] - self.times[0]) / max(1, sum(self.counts[1:]))


@dataclass(frozen=True)
class Run:
    """One generation of one system."""

    tokens: list[int]
    seconds_per_token: float
    decoded: Decoded | None = None


def read_prompt(model: Any, prompt: list[int], *, block: int, chunk: int) -> Stepper:
    """A stepper that has read all but the last token."""
    stepper = Stepper(model, CachePlan(len(prompt) + block, block=block, prefill_chunk=chunk, extrapolate=True))
    stepper.prefill(prompt[:-1])
    return stepper


@torch.inference_mode()
def ours_from(source: Stepper, model: Any, prompt: list[int], *, new_tokens: int, block: int) -> Prefilled:
    """A `Prefilled` of `model` over a copy of what `source` read, in the model's dtype. `source` may have read on."""
    stepper = Stepper(model, CachePlan(len(prompt) + new_tokens + block, block=block, extrapolate=True))
    for mine, read in zip(stepper.cache.layers, source.cache.layers, strict=True):
        mine.update(*(t[:, :, : len(prompt) - 1].to(model.dtype) for t in read.view()))
    stepper.cache.advance(len(prompt) - 1)
    logits_V = stepper.feed([prompt[-1]])[0, -1]
    return Prefilled(stepper, prompt, logits_V, 0.0, [None] * len(stepper.cache.layers))


@torch.inference_mode()
def dynamic_from(source: Stepper, model: Any, keep: int) -> DynamicCache:
    """transformers' own cache with the first `keep` tokens of what `source` read."""
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(source.cache.layers):
        keys, values = (t[:, :, :keep].to(model.dtype).clone() for t in layer.view())
        cache.update(keys, values, i)
    return cache


def ours(
    start: Prefilled,
    drafter: Drafter | None,
    plan: CachePlan | None,
    *,
    gamma: int,
    new_tokens: int,
    begin: Callable[[], object],
) -> Run:
    """Our decoder; `begin` is called when the rounds begin, after the drafter has read the prompt."""
    stamps = Stamps()

    def on_tokens(tokens: list[int]) -> None:
        if not stamps.times:
            begin()
        stamps.stamp(len(tokens))

    decoded = decode(start, drafter, plan, gamma=gamma, new_tokens=new_tokens, eos=frozenset(), on_tokens=on_tokens)
    return Run(decoded.tokens, stamps.seconds_per_token, decoded)


def generate(model: Any, source: Stepper, prompt: list[int], *, new_tokens: int, **how: Any) -> Run:
    """transformers' `generate` from a copy of the cache; `how` may name an assistant or prompt lookup."""
    stamps, ids = Stamps(), torch.tensor([prompt], device=model.device)
    with torch.inference_mode(), _from_cache(model):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=dynamic_from(source, model, len(prompt) - 1),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=stamps,
            **how,
        )
    return Run(out[0, len(prompt) :].tolist(), stamps.seconds_per_token)


def assisted(
    model: Any,
    assistant: Any,
    source: Stepper,
    draft_source: Stepper,
    prompt: list[int],
    *,
    gamma: int,
    new_tokens: int,
) -> Run:
    """Assisted generation with a fixed draft length: confidence threshold 0, constant schedule."""
    config = copy.deepcopy(assistant.generation_config)
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = gamma, "constant"
    config.assistant_confidence_threshold = 0.0
    assistant.generation_config = config
    with _read_already(lambda: dynamic_from(draft_source, assistant, len(prompt) - 2)):
        return generate(model, source, prompt, new_tokens=new_tokens, assistant_model=assistant)


@contextmanager
def _from_cache(model: Any) -> Iterator[None]:
    """Assisted generation would feed the whole prompt again on top of a cache it is given: feed what is new."""
    plain = model.prepare_inputs_for_generation

    def prepare(input_ids: Any, next_sequence_length: int | None = None, cache: Any = None, **kwargs: Any) -> Any:
        if cache is not None and cache.get_seq_length():
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return plain(input_ids, next_sequence_length=next_sequence_length, cache=cache, **kwargs)

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation


@contextmanager
def _read_already(make_cache: Callable[[], DynamicCache]) -> Iterator[None]:
    """The assistant starts with the prompt in its cache, as ours does: its prefill is not what is compared."""
    plain = AssistedCandidateGenerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.assistant_kwargs["cache"] = make_cache()

    AssistedCandidateGenerator.__init__ = init
    try:
        yield
    finally:
        AssistedCandidateGenerator.__init__ = plain
