"""Stop strings: text that ends a generation, wherever in a block it completes."""

from typing import Any


class StopStrings:
    """Which token completes a stop string. The text of the prompt does not count."""

    def __init__(self, tokenizer: Any, strings: list[str]) -> None:
        if not all(strings):
            raise ValueError(f"stop = {strings}: an empty string would end every text at once")
        self.tokenizer, self.strings = tokenizer, strings
        # A token has at least one byte; a few more, since the first characters of a cut text may decode differently.
        self._reach = max(len(s.encode()) for s in strings) + 8

    def hit(self, tokens: list[int]) -> bool:
        """Whether the generated tokens hold a stop string that ends within their last token, or just before."""
        text = self.tokenizer.decode(tokens[-self._reach :])
        return any(s in text for s in self.strings)
