"""Which prompts a target set is made from: distinct ones, of documents that nothing is evaluated on."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bdcore.config import ConfigError
from bdcore.documents import Document, Prompt, build_prompts, origin_of, shared

Ids = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class DistinctPrompts:
    """Prompts of which no two have the same tokens, and how many documents were passed over, and why."""

    prompts: list[Prompt]
    too_short: int
    duplicates: int


def distinct(prompts: Iterable[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """(kept, dropped): the first prompt of every token sequence, and those that repeat it, both in their order.

    Greedy tokens follow from the prompt, so distinct prompts of one length are distinct rows.
    """
    seen: set[bytes] = set()
    kept: list[Prompt] = []
    dropped: list[Prompt] = []
    for prompt in prompts:
        content = hashlib.blake2b(array("i", prompt.ids).tobytes()).digest()  # long prompts are many: keep no copies
        (dropped if content in seen else kept).append(prompt)
        seen.add(content)
    return kept, dropped


def distinct_prompts(
    documents: Sequence[Document], tokenizer: Any, *, length: int, count: int, seed: int
) -> DistinctPrompts:
    """`build_prompts`, with the next document in place of each that repeats another's tokens.

    Raises ConfigError when fewer than `count` distinct ones can be found.
    """
    duplicates = 0
    while True:
        try:
            found = build_prompts(documents, tokenizer, length=length, count=count + duplicates, seed=seed)
        except ConfigError as error:
            if not duplicates:
                raise
            raise ConfigError(
                f"{count} distinct prompts of {length} tokens: too few of {len(documents)} documents will do, since at "
                f"least {duplicates} repeat the tokens of another; use fewer or shorter prompts, or another corpus"
            ) from error
        kept, dropped = distinct(found.prompts)
        if len(kept) == count:
            return DistinctPrompts(kept, found.too_short, len(dropped))
        duplicates = len(dropped)


def one_text(name: str, ids: Ids, other: str, other_ids: Ids) -> bool:
    """Whether two prompts, each a document's name and tokens, are of one text: by origin, or as one begins like the
    other, to the end of the shorter.
    """
    n = min(len(ids), len(other_ids))
    return origin_of(name) == origin_of(other) or np.array_equal(ids[:n], other_ids[:n])


def check_held_out(prompts: Iterable[Prompt], documents: Iterable[Document], evaluation: Iterable[Document]) -> None:
    """Raise ValueError if a prompt, each of one of `documents`, is of a text that the grid is to measure."""
    names = {prompt.doc_id for prompt in prompts}
    if both := shared((document for document in documents if document.doc_id in names), evaluation):
        raise ValueError(f"corpus: the documents {sorted(both)} are in grid.corpus too; no target may be made of them")
