"""Where long text comes from, and how it becomes prompts of an exact token length."""

from bdcore.documents.document import Document, Needle, origin_of
from bdcore.documents.encoding import encode, encode_prefix
from bdcore.documents.overlap import shared
from bdcore.documents.prompts import Prompt, PromptSet, build_prompts
from bdcore.documents.sources import check_corpus, corpus_key, documents_key, load_documents

__all__ = [
    "Document",
    "Needle",
    "Prompt",
    "PromptSet",
    "build_prompts",
    "check_corpus",
    "corpus_key",
    "documents_key",
    "encode",
    "encode_prefix",
    "load_documents",
    "origin_of",
    "shared",
]
