"""Chat templates: what the tokenizer of an instruct model writes before and after a user's text.

The library fills the template in; the text is not encoded here.
"""

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from bdcore.config import Chat, ConfigError
from bdcore.documents.document import brief

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "the-text-of-the-document"  # nothing that a template would trim, or a tokenizer hold for a control token


def uses_template(tokenizer: "PreTrainedTokenizerBase", chat: Chat) -> bool:
    """Whether questions are put by the tokenizer's template. ConfigError if they must be, and it has none."""
    if chat == "never":
        return False
    if getattr(tokenizer, "chat_template", None):
        return True
    if chat == "always":
        raise ConfigError(
            "corpus.chat = always: the verifier's tokenizer has no chat template; use auto or never, or an instruct "
            "verifier"
        )
    return False


def user_turn(tokenizer: "PreTrainedTokenizerBase", lead: str) -> tuple[str, str]:
    """The template's text before and after a user's message; the answer, begun by `lead`, goes on where it ends.

    It holds the control tokens, BOS among them, so that nothing is to be added when it is encoded.
    """
    messages = [{"role": "user", "content": _PLACE}]
    if lead:
        messages.append({"role": "assistant", "content": lead})
    try:
        # The date, which Llama 3 writes into its system turn, would make other prompts tomorrow: its own default.
        rendered: Any = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not lead,
            continue_final_message=bool(lead),
            date_string="26 Jul 2024",
        )
    except (TemplateError, ValueError) as error:
        raise ConfigError(f"corpus.chat: the tokenizer's chat template fails ({brief(error)}); use never") from error
    before, *after = str(rendered).split(_PLACE)
    if len(after) != 1:
        raise ConfigError(
            f"corpus.chat: the tokenizer's chat template writes a user's text {len(after)} times; use never"
        )
    return before, after[0]
