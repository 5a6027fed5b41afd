"""A whole study in seconds: a tiny random verifier with a byte tokenizer, a folder of texts, a configuration."""

import random
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.conftest import tiny_llama

TEXTS = 24


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte after three special ones: every text encodes, ids are the same everywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def write_verifier(folder: Path) -> Path:
    """A 4-layer random verifier of 512 positions as a plain checkpoint folder."""
    tiny_llama(vocab=260, layers=4).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_corpus(folder: Path, count: int = TEXTS, words: int = 120, seed: int = 0) -> Path:
    rng = random.Random(seed)
    vocabulary = ["budget", "draft", "verify", "accept", "context", "token", "cache", "key", "value", "round"]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        text = " ".join(rng.choice(vocabulary) for _ in range(words))
        (folder / f"text-{i:02d}.txt").write_text(f"Text {i}. {text}\n")
    return folder


def tiny_config(verifier: Path, corpus: Path) -> dict:
    views = {"budgets": {32: 0.5, 48: 0.5}, "policy": "attention_mass"}
    stage = {
        "steps": 4,
        "prefix_lengths": {64: 0.5, 96: 0.5},
        "continuation": 16,
        "supervise": "all",
        "views": views,
        "mixture": {"forced": 0.8, "repeated": 0.2},
        "loss_a": {"ce": 0.5, "kl": 0.5},
        "loss_c": {"ce": 0.5, "kl": 0.5},
        "learning_rate": 1e-3,
        "warmup": 1,
        "validation": {"sequences": 1, "every": 2},
        "checkpoint_every": 2,
    }
    source = {"source": "folder", "path": str(corpus)}
    return {
        "name": "tiny",
        "seed": 1,
        "runtime": {"device": "cpu", "dtype": "float32", "threads": 1},
        "verifier": {"source": str(verifier)},
        "drafter": {"kind": "sliced", "num_layers": 3, "vocab_size": 128, "max_positions": 128},
        "corpus": source,
        "targets": {
            "forced": 4,
            "length": 160,
            "generated": 2,
            "prompt_tokens": 96,
            "new_tokens": 32,
            "batch_size": 2,
            "shard_size": 2,
        },
        "base": {**stage, "lam": 0},
        "training": {**stage, "lam": 0.5},
        "grid": {
            "corpus": {**source, "split": "test"},
            "contexts": [64, 128],
            "budgets": [32, 48, "full"],
            "gammas": [3],
            "prompts": 2,
            "new_tokens": 12,
        },
    }


def write_study(folder: Path, **changes) -> Path:
    """Everything a study needs below `folder`; returns the path of its configuration."""
    config = tiny_config(write_verifier(folder / "verifier"), write_corpus(folder / "texts"))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**config, **changes}))
    return path
