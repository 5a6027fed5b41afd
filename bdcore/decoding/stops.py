"""Stop strings: text that ends a generation, wherever in a block it completes."""

from typing import Any


class StopStrings:
    """Which token completes a stop string. The text of the prompt does not count."""

    def __init__(self, tokenizer: Any, strings: list[str]) -> None:
        if not strings or not all(strings):
            raise ValueError(
                f"stop = {strings}: at least one string, and none empty: that would end every text at once"
            )
        self.tokenizer, self.strings = tokenizer, strings
        # A token has at least one byte; a few more, since the first characters of a cut text may decode differently.
        self._reach = max(len(s.encode()) for s in strings) + 8
        # Some decoders drop the space in front of the first token of a text: let that be another.
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]

    def hit(self, tokens: list[int]) -> bool:
        """Whether the generated tokens hold a stop string that ends within their last token, or just before."""
        text = self._decode([*self._anchor, *tokens[-self._reach :]])[len(self._decode(self._anchor)) :]
        return any(s in text for s in self.strings)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
