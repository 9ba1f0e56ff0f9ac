"""The built-in corpus, and the demonstration's assets."""

from __future__ import annotations

import json

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.data import Corpus, demo_base, held_out_documents, held_out_text
from adapmixed.data.builtin import is_held_out, topic_documents
from adapmixed.ensemble import read_manifest


def test_held_out_topics_are_in_no_shard() -> None:
    topics = topic_documents()
    held_out = {topic for topic in topics if is_held_out(topic)}
    assert 5 <= len(held_out) <= len(topics) // 2
    corpus, evaluation = Corpus("builtin"), held_out_documents()
    private = list(corpus.documents())
    assert (corpus.name, corpus.unit, corpus.positional) == ("builtin", "topic", False)
    assert {d.identifier for d in evaluation} == held_out
    assert {d.identifier for d in private} == set(topics) - held_out
    assert len(private) + len(evaluation) == sum(len(p) for p in topics.values())
    assert sum(len(d.text) for d in evaluation) > 20_000
    texts = [" ".join(d.text.split()) for d in private + evaluation]
    assert len(set(texts)) == len(texts)  # no paragraph occurs twice


@pytest.mark.usefixtures("demo_ensemble")
def test_the_demonstration_is_whole_and_names_no_place_and_no_held_out_text() -> None:
    base, ensemble = (
        [path for path in folder.rglob("*") if path.is_file()]
        for folder in (demo_base(), DEMO_ENSEMBLE)
    )
    assert sum(path.stat().st_size for path in base) < 3_000_000
    manifest, held_out = read_manifest(DEMO_ENSEMBLE), held_out_text()
    assert len(manifest.members) == len(manifest.shards) == 64
    assert manifest.adapted == {"lm_head": 8}
    config = json.loads((DEMO_ENSEMBLE / "member-000" / "adapter_config.json").read_text())
    assert "/" not in config["base_model_name_or_path"]
    for path in base + ensemble:
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8")
            assert "/root" not in text and "/home" not in text and "/work" not in text
            assert not any(paragraph in text for paragraph in held_out)
