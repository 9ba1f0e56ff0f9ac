"""Read corpora: text that every Python installation contains, local files and hub data sets."""

from adapmixed.data.builtin import demo_base, held_out_documents, held_out_text, private_documents
from adapmixed.data.corpus import Corpus
from adapmixed.text import Document

__all__ = [
    "Corpus",
    "Document",
    "demo_base",
    "held_out_documents",
    "held_out_text",
    "private_documents",
]
