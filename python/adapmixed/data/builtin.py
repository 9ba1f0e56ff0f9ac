"""Read a "private" corpus from the Python installation, without a network.

It holds the paragraphs of `pydoc_data.topics`, the language reference behind `help("if")` (about 80
topics, 1 600 paragraphs, 0.36 million characters). They are read from the running Python and vary a
little between Python versions, and so do numbers computed from them. The corpus stands for private
text in the demonstration, although it is public.

Some topics are held out for evaluation. A keyed hash of a topic's name alone decides which ones, so
a topic keeps its side even if another Python version has other topics.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

from adapmixed.text import Document

HELD_OUT_KEY = b"adapmixed built-in held-out topics"
HELD_OUT_FRACTION = 0.2

_MIN_PARAGRAPH = 40


def is_held_out(topic: str) -> bool:
    """Return whether a topic is held out for evaluation, by a keyed hash of its name alone."""
    digest = hashlib.blake2b(topic.encode(), digest_size=8, key=HELD_OUT_KEY).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_FRACTION * 2.0**64


def topic_documents() -> dict[str, list[Document]]:
    """Return the paragraphs of the language reference by topic.

    Topics quote one another, but a repeated paragraph is kept once. A paragraph of a training topic
    is never part of a held-out topic, so evaluation text is new to every shard.

    Returns:
        for each topic its paragraphs in order. Their identifier is the topic's name, so that a
        topic is never divided between shards. Topics without a paragraph of their own are left out.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    result: dict[str, list[Document]] = {}
    for topic in sorted(topics, key=lambda name: (is_held_out(name), name)):
        kept: list[Document] = []
        for raw in re.split(r"\n\s*\n", topics[topic]):
            text = raw.strip()
            key = re.sub(r"\s+", " ", text)
            if len(text) < _MIN_PARAGRAPH or set(text) <= set("*=-~ \n") or key in seen:
                continue
            seen.add(key)
            kept.append(Document(topic, text))
        if kept:
            result[topic] = kept
    return result


def private_documents() -> list[Document]:
    """Return the paragraphs of all topics but the held-out ones, for training."""
    return _documents(held_out=False)


def held_out_documents() -> list[Document]:
    """Return the paragraphs of the held-out topics, for evaluation."""
    return _documents(held_out=True)


def _documents(*, held_out: bool) -> list[Document]:
    topics = topic_documents().items()
    return [doc for topic, docs in topics if is_held_out(topic) == held_out for doc in docs]


def demo_base() -> Path:
    """Return the folder of the demonstration's public model and tokenizer."""
    return Path(str(files("adapmixed").joinpath("assets", "demo", "base")))


def held_out_text() -> list[str]:
    """Return the held-out text for evaluation, one string per paragraph."""
    return [document.text for document in held_out_documents()]
