"""The texts of a grid: for each corpus the same documents at every context, long enough for the whole grid."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bdcore.config import GridConfig
from bdcore.documents import Document, Prompt, build_prompts
from bdcore.evaluation.grid import REPLAY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def documents_of(
    grid: GridConfig, corpora: Sequence[Sequence[Document]], tokenizer: "PreTrainedTokenizerBase", seed: int
) -> list[Prompt]:
    """`grid.prompts` documents of each corpus, `grid.longest` tokens of each; ConfigError where there are too few."""
    return _built(grid, [texts_of(grid, documents) for documents in corpora], tokenizer, seed, grid.longest)


def prompts_of(
    grid: GridConfig,
    corpora: Sequence[Sequence[Document]],
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    context: int,
) -> list[Prompt]:
    """The prompts of one context, from the documents of `documents_of`."""
    names = {prompt.doc_id for prompt in documents_of(grid, corpora, tokenizer, seed)}
    chosen = [[d for d in documents if d.doc_id in names] for documents in corpora]
    return _built(grid, chosen, tokenizer, seed, context)


def texts_of(grid: GridConfig, documents: Sequence[Document]) -> list[Document]:
    """The documents whose length decides: without their questions where a replay reads them."""
    return [replace(d, question=None) if REPLAY in grid.workloads else d for d in documents]


def _built(
    grid: GridConfig,
    corpora: Sequence[Sequence[Document]],
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    length: int,
) -> list[Prompt]:
    return [
        prompt
        for documents in corpora
        for prompt in build_prompts(documents, tokenizer, length=length, count=grid.prompts, seed=seed).prompts
    ]
