"""Text to token ids: whole, or no more of it than is wanted. No special token is added."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Cutting text changes the tokens at the cut: the last word is split, a run of blanks ends early. Merges stay within
# words, and where a script writes none between blanks they settle within a few tokens; 128 tokens is far more.
SAFETY_TOKENS = 128
_CHARS_PER_TOKEN = 5  # of English prose, generously; a wrong guess costs another, longer encoding


def encode(tokenizer: "PreTrainedTokenizerBase", text: str, *, after: bool = False, control: bool = False) -> list[int]:
    """All ids of `text`: no BOS, no cut at `model_max_length`.

    `after`: as it is inside a text, where SentencePiece puts no blank before it. `control`: a chat template wrote it,
    and `</s>` in it is an EOS; otherwise that is plain text.
    """
    if after and text:
        # Encoded after something that it does not merge with, which is taken away again.
        before = "0" if text[0].isspace() else "\n"
        known, ids = (_ids(tokenizer, piece, control) for piece in (before, before + text))
        if ids[: len(known)] == known:
            return ids[len(known) :]
    return _ids(tokenizer, text, control)


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str, control: bool) -> list[int]:
    encoding: Any = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=not control,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        verbose=False,
    )
    return list(encoding["input_ids"])


def encode_prefix(tokenizer: "PreTrainedTokenizerBase", text: str, length: int, *, after: bool = False) -> list[int]:
    """The first `length` ids of `encode(text)`, or all if fewer, reading little more of the text than they need."""
    wanted = length + SAFETY_TOKENS
    chars = wanted * _CHARS_PER_TOKEN
    while chars < len(text):
        ids = encode(tokenizer, text[:chars], after=after)
        if len(ids) >= wanted:
            return ids[:length]
        chars *= 2
    return encode(tokenizer, text, after=after)[:length]
