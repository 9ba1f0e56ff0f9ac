"""Read corpora: text that every Python installation contains, local files and hub data sets."""

from adapmixed.data.builtin import (
    Document,
    docstring_documents,
    held_out_documents,
    is_held_out,
    private_documents,
    topic_documents,
)
from adapmixed.data.corpus import Corpus
from adapmixed.data.demo import demo_base, held_out_text, held_out_tokens
from adapmixed.data.text import read_text

__all__ = [
    "Corpus",
    "Document",
    "demo_base",
    "docstring_documents",
    "held_out_documents",
    "held_out_text",
    "held_out_tokens",
    "is_held_out",
    "private_documents",
    "read_text",
    "topic_documents",
]
