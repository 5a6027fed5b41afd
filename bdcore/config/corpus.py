"""Which documents, and how a prompt is made of one."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from bdcore.config.section import Section, listed

TextSource = Literal["stdlib", "pg19", "longbench", "lwm", "folder", "file"]
Chat = Literal["never", "auto", "always"]
FrameName = Literal["benchmark", "paper"]
Depth = Annotated[float, Field(ge=0, le=1)]


class CorpusConfig(Section):
    source: TextSource | Literal["needle"] = "pg19"
    """`stdlib`: this Python's own modules. `pg19`, `longbench` (QMSum), `lwm` (NarrativeQA): hub or local Parquet.
    `folder`: every text file below `path`. `file`: one Parquet or JSONL file with a `text` column. `needle`: made
    here, secret numbers hidden in the text of another corpus, one of which is asked for at the end."""
    path: str | None = None
    """Local file or folder; without it the named hub data set is read. Relative to the configuration file."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]{0,39}$")
    """What rows and reports call it (default: its source). A grid with two corpora of one source needs it."""
    split: Literal["train", "test"] = "train"
    """Which documents. Sources without splits of their own are divided by a hash of the document's name."""
    filler: TextSource = "stdlib"
    """`needle`: the corpus whose text hides the numbers; `path` and `split` are its own."""
    depths: Annotated[list[Depth], BeforeValidator(listed), Field(min_length=1, max_length=16)] = [0.1, 0.5, 0.9]
    """`needle`: where the numbers are hidden, one at each: 0 begins the text, 1 ends it, at every context length.
    Documents ask for each depth in turn."""
    seed: NonNegativeInt = 0
    """`needle`: another draw of names and numbers."""
    chat: Chat = "never"
    """Whether a prompt that asks a question is put as a user's turn, by the chat template of the verifier's tokenizer.
    `auto`: where it has one. `always`: it must have one. Documents without a question are plain text in any case."""
    frame: FrameName = "benchmark"
    """`longbench`, `lwm`: what the prompt says around the document. `benchmark`: LongBench's instruction and question.
    `paper`: as the authors' code has it, the bare query after a transcript, and a request to summarize a book."""

    @model_validator(mode="after")
    def _legal(self) -> "CorpusConfig":
        for name in _NEEDLE_FIELDS:
            if self.source != "needle" and name in self.model_fields_set:
                raise ValueError(f"{name} = {getattr(self, name)}: source `{self.source}` has none; only `needle` has")
        if len(set(self.depths)) < len(self.depths):
            raise ValueError(f"depths = {self.depths}: give each once")
        if self.chat == "always" and self.source not in ASKING:
            raise ValueError(
                f"chat = always: source `{self.source}` asks no questions; use never, or one of {', '.join(ASKING)}"
            )
        if self.frame == "paper" and (self.source not in FRAMED or self.chat != "never"):
            raise ValueError(f"frame = paper: needs chat = never and one of the sources {', '.join(FRAMED)}")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Keys hash this: a setting that a corpus does not have must not change the key of what it has made.
        left_out = () if self.source == "needle" else _NEEDLE_FIELDS
        for name, usual in (("name", None), ("chat", "never"), ("frame", "benchmark")):
            left_out = (*left_out, name) if getattr(self, name) == usual else left_out
        return {name: value for name, value in dump(self).items() if name not in left_out}

    @property
    def label(self) -> str:
        """What tells its rows from those of other corpora."""
        return self.name or self.source

    @property
    def texts(self) -> "CorpusConfig":
        """The corpus whose files are read: this one, or a needle's filler."""
        return CorpusConfig(source=self.filler, path=self.path, split=self.split) if self.source == "needle" else self

    @property
    def offline(self) -> bool:
        """Whether it can be read without a network."""
        return self.path is not None or self.texts.source == "stdlib"


_NEEDLE_FIELDS = ("filler", "depths", "seed")
ASKING = ("longbench", "lwm", "needle")
"""Sources whose prompts ask a question."""
FRAMED = ("longbench", "lwm")
"""Sources for which the authors' code has prompts of its own."""

Corpora = Annotated[list[CorpusConfig], BeforeValidator(listed), Field(min_length=1)]
