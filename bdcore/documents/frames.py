"""What a prompt says around a document's text: its instruction, its question, and how the answer begins."""

from dataclasses import dataclass

from bdcore.documents.document import Document

# The benchmark's own prompts: LongBench (MIT), config/dataset2prompt.json, tasks qmsum and narrativeqa.
_BENCHMARK = {
    "longbench": (
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {question}\nAnswer:",
    ),
    "lwm": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: ",
        "\n\nNow, answer the question based on the story as concisely as you can, using a single phrase if possible. "
        "Do not provide any explanation.\n\nQuestion: {question}\n\nAnswer:",
    ),
}
# The prompts of the paper's authors (their src/data_loader.py). LWM's asks for a summary, whatever the question.
_PAPER = {
    "longbench": ("", "\n{question}"),
    "lwm": (
        "You are a helpful assistant. USER: Please read a part of the book below, and then give me the summary.\n"
        "[start of the book]\n",
        "\n[end of the book]\n\nNow you have read it. Please summarize it for me.\n\nASSISTANT: ",
    ),
}
_FRAMES = {"benchmark": _BENCHMARK, "paper": _PAPER}
_QUESTION = "\n\nQuestion: {question}\nAnswer:"
_NEEDLE = (
    "Secret numbers are hidden in the text below. Read it, then answer the question that follows.\n\n",
    _QUESTION,
)
_OTHER = ("Below is a document. Read it, then answer the question about it that follows.\n\n", _QUESTION)


@dataclass(frozen=True)
class Frame:
    """The text goes between `opening` and `closing` and alone may be cut; `lead` begins the answer."""

    opening: str = ""
    closing: str = ""
    lead: str = ""


def frame_of(document: Document) -> Frame:
    """Empty for a document without a question. A needle's answer is led up to the point where its number is due."""
    if document.question is None:
        return Frame()
    opening, closing = _NEEDLE if document.needles else _FRAMES[document.frame].get(document.source, _OTHER)
    lead = document.evidence.lead if document.evidence else ""
    return Frame(opening, closing.format(question=document.question.strip()), lead)
