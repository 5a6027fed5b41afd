"""How a document becomes a prompt of an exact token length, and what is counted when it cannot.

It never joins or pads documents, adds no special tokens and uses no chat template.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bdcore.config import ConfigError
from bdcore.documents.sources import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Cutting text changes the tokens at the cut: the last word is split, a run of blanks ends early. Merges stay within
# words, and where a script writes none between blanks they settle within a few tokens; 128 tokens is far more.
SAFETY_TOKENS = 128
_CHARS_PER_TOKEN = 5  # of English prose, generously; a wrong guess costs another, longer encoding

_INSTRUCTIONS = {
    "longbench": "Below is the transcript of a meeting. Read it, then answer the question about it that follows.\n\n",
    "lwm": "Below is a story. Read it, then answer the question about it that follows as briefly as you can.\n\n",
}
_INSTRUCTION = "Below is a document. Read it, then answer the question about it that follows.\n\n"


@dataclass(frozen=True)
class Prompt:
    """`ids` start at token `offset` of the document (or of its question frame); `truncated`: the document goes on."""

    doc_id: str
    source: str
    offset: int
    ids: list[int]
    truncated: bool


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one length, and how many documents were passed over because they are shorter."""

    prompts: list[Prompt]
    too_short: int


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """All ids of `text` as plain text: no BOS, no cut at `model_max_length`, and `</s>` in the text is not an EOS."""
    encoding: Any = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=True,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        verbose=False,
    )
    return list(encoding["input_ids"])


def encode_prefix(tokenizer: "PreTrainedTokenizerBase", text: str, length: int) -> list[int]:
    """The first `length` ids of `encode(text)`, or all if fewer, reading little more of the text than they need."""
    wanted = length + SAFETY_TOKENS
    chars = wanted * _CHARS_PER_TOKEN
    while chars < len(text):
        ids = encode(tokenizer, text[:chars])
        if len(ids) >= wanted:
            return ids[:length]
        chars *= 2
    return encode(tokenizer, text)[:length]


def build_prompts(
    documents: Sequence[Document], tokenizer: "PreTrainedTokenizerBase", *, length: int, count: int, seed: int
) -> PromptSet:
    """The first `count` documents, in an order drawn by `seed`, that fill `length` tokens; the end of each is cut.

    A document with a question becomes instruction + cut document + question, `length` tokens in all.
    """
    prompts: list[Prompt] = []
    short: list[Document] = []
    for document in random.Random(seed).sample(documents, len(documents)):
        if len(prompts) == count:
            break
        prompt = _prompt(document, tokenizer, length)
        if prompt is None:
            short.append(document)
        else:
            prompts.append(prompt)
    if len(prompts) < count:
        longest = f" (the longest of these has {_longest(short, tokenizer)} tokens)" if short else ""
        raise ConfigError(
            f"{count} prompts of {length} tokens: only {len(prompts)} of {len(documents)} documents will do, "
            f"{len(short)} are too short{longest}; use a smaller context, fewer prompts or another corpus"
        )
    return PromptSet(prompts, len(short))


def _prompt(document: Document, tokenizer: "PreTrainedTokenizerBase", length: int) -> Prompt | None:
    body, ending = _frame(document)
    ending_ids = encode(tokenizer, ending) if ending else []
    room = length - len(ending_ids)
    if document.question is not None:
        _check_room(document, tokenizer, length, room)
    if _most_tokens(body) < room:
        return None
    ids = encode_prefix(tokenizer, body, room + 1)  # one more tells whether anything is cut
    if len(ids) < room:
        return None
    return Prompt(document.doc_id, document.source, 0, ids[:room] + ending_ids, truncated=len(ids) > room)


def _frame(document: Document) -> tuple[str, str]:
    """What may be cut at its end, and what follows it whole."""
    if document.question is None:
        return document.text, ""
    instruction = _INSTRUCTIONS.get(document.source, _INSTRUCTION)
    return instruction + document.text, f"\n\nQuestion: {document.question.strip()}\nAnswer:"


def _check_room(document: Document, tokenizer: "PreTrainedTokenizerBase", length: int, room: int) -> None:
    instruction = len(encode(tokenizer, _frame(document)[0].removesuffix(document.text)))
    if room <= instruction:
        raise ConfigError(
            f"context = {length}: the instruction and question of {document.doc_id} alone take "
            f"{instruction + length - room} tokens; use a larger context"
        )


def _most_tokens(text: str) -> int:
    # A token stands for at least one byte; SentencePiece may put one blank before the text.
    return len(text.encode()) + 1


def _longest(documents: list[Document], tokenizer: "PreTrainedTokenizerBase") -> int:
    """Tokens of the longest prompt these documents can fill; documents that cannot be longer are not tokenised."""
    longest = 0
    for body, ending in sorted(map(_frame, documents), key=lambda frame: -_most_tokens("".join(frame))):
        if _most_tokens(body) + _most_tokens(ending) <= longest:
            break
        longest = max(longest, len(encode(tokenizer, body)) + (len(encode(tokenizer, ending)) if ending else 0))
    return longest
