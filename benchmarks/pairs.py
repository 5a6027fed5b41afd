"""Verifier and drafter of a benchmark, ours and as transformers runs them, and the prompts they read."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bdcore.config import CorpusConfig, ModelConfig
from bdcore.documents import build_prompts, load_documents
from bdcore.kv.attention import NAME as ATTENTION
from bdcore.models.drafter import Drafter, load_drafter, slice_verifier
from bdcore.models.linear import adapt
from bdcore.models.loading import load_model, load_tokenizer, materialise, quiet
from bdcore.workspace import Workspace, default_root

LAYERS = [0, 16, 17, 18, 29]
"""The embedded verifier's slice by rule: first, last, the best induction layers and a previous-token layer."""


@dataclass(frozen=True)
class PairShape:
    contexts: list[int]
    quick_contexts: list[int]
    verifier: dict[str, int] | None = None
    drafter: dict[str, int] | None = None


def _llama(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, positions: int
) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


PAIRS = {
    "embedded": PairShape([512, 1024, 2048, 4096, 8064], [1024, 4096, 8064]),
    # Random weights of the paper's shapes: costs and memory are real, the text is not.
    "paper": PairShape(
        [4096, 8192, 16384],
        [4096, 8192],
        _llama(32000, 4096, 11008, 32, 32, 32, 131072),
        _llama(32000, 768, 3072, 2, 12, 12, 2048),
    ),
    "tiny": PairShape([300, 600], [300, 600], _llama(512, 64, 128, 2, 4, 2, 2048), _llama(512, 32, 64, 1, 4, 2, 2048)),
}


@dataclass(frozen=True)
class Pair:
    verifier: Any
    drafter: Drafter
    plain: Any
    """The verifier as transformers runs it: sdpa over its own cache, the same weights."""
    plain_drafter: Any


def load(name: str, device: str, dtype: torch.dtype, drafter_folder: str | None) -> Pair:
    shape = PAIRS[name]
    if shape.verifier is None or shape.drafter is None:
        pair = _embedded(device, dtype, drafter_folder)
    else:
        verifier, drafter = (_random(s, device, dtype) for s in (shape.verifier, shape.drafter))
        pair = Pair(adapt(verifier), Drafter(adapt(drafter), None), _plain(verifier), _plain(drafter))
    for model in (pair.plain, pair.plain_drafter):  # every system writes all its tokens
        model.generation_config.eos_token_id = None
    return pair


def _embedded(device: str, dtype: torch.dtype, folder: str | None) -> Pair:
    with quiet():
        source = materialise(ModelConfig(source="embedded"), Workspace(default_root()).models)
        verifier = load_model(source, dtype=dtype, device=device)
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        if folder:
            drafter = load_drafter(folder, verifier_vocab=verifier.config.vocab_size, dtype=dtype, device=device)
            assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
            return Pair(verifier, drafter, plain, assistant.to(device).eval())
    sliced = slice_verifier(verifier, LAYERS, ids=None, rope_theta=None, max_positions=None)
    sliced.model.to(dtype)
    return Pair(verifier, Drafter(adapt(sliced.model), None), plain, _plain(sliced.model))


def _random(shape: dict[str, int], device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), attn_implementation=ATTENTION, dtype=dtype)
    return model.eval()


def _plain(model: Any) -> Any:
    """The same weights under transformers' own attention and linear layers; parameters are shared, not copied."""
    memo = {id(p): p for p in (*model.parameters(), *model.buffers())}
    plain = copy.deepcopy(model, memo)
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = torch.nn.Linear
    plain.set_attn_implementation("sdpa")
    return plain


def prompts(name: str, contexts: list[int], room: int) -> dict[int, list[int]]:
    """One prompt per context: the beginning of one long document, or random ids for random weights."""
    shape = PAIRS[name]
    longest = max(contexts)
    if shape.verifier is not None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, shape.verifier["vocab_size"], (longest,), generator=generator).tolist()
    else:
        source = materialise(ModelConfig(source="embedded"), Workspace(default_root()).models)
        documents = load_documents(CorpusConfig(source="stdlib", split="test"))
        ids = build_prompts(documents, load_tokenizer(source), length=longest, count=1, seed=0).prompts[0].ids
        assert longest + room <= 8192, f"context {longest} + {room} new tokens exceed the verifier's 8192 positions"
    return {context: ids[:context] for context in contexts}


def reading_dtype(device: str, dtypes: list[str]) -> torch.dtype:
    """Prompts are read once: in float32 on a CPU, where it is fastest, else in the first dtype measured."""
    return torch.float32 if device == "cpu" else getattr(torch, dtypes[0])
