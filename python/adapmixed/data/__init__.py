"""Read corpora: text that every Python installation contains, local files and hub data sets."""

from adapmixed.data.builtin import Document, held_out_documents, private_documents
from adapmixed.data.corpus import Corpus
from adapmixed.data.demo import demo_base, held_out_text

__all__ = [
    "Corpus",
    "Document",
    "demo_base",
    "held_out_documents",
    "held_out_text",
    "private_documents",
]
