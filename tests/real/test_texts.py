"""Text and ids of pretrained models' tokenizers: templates and bytes."""

from __future__ import annotations

import pytest
import torch

from adapmixed import Accountant, Ensemble, PrivateGenerator, PublicOnly

pytestmark = pytest.mark.real

QUESTION = {"role": "user", "content": "Where is Paris? 🗼"}
MESSAGES = [QUESTION, {"role": "assistant", "content": "In France 🇫🇷."}, QUESTION]
GEMMA = (  # the form of the template that Google's instruction-tuned models have
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEXT = "😀👩‍👩‍👧 你好，世界。𠮷野家 مرحبا بالعالم 𒀀𓂀 naïve é 🫨!"


@pytest.fixture
def generator(public: Ensemble) -> PrivateGenerator:
    return PrivateGenerator(public, PublicOnly(), Accountant(1e-5))


def test_a_conversation_is_read_as_the_template_writes_it(
    generator: PrivateGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = generator.ensemble.tokenizer
    if tokenizer.chat_template is None:
        monkeypatch.setattr(tokenizer, "chat_template", GEMMA)
    read: list[list[int]] = []
    monkeypatch.setattr(
        PrivateGenerator,
        "stream_tokens",
        lambda _, ids, **__: iter(read.extend(ids.tolist()) or ()),
    )
    assert not "".join(generator.chat(MESSAGES, max_new_tokens=1))
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    expected = tokenizer.apply_chat_template(MESSAGES, **settings)
    assert read == [expected]
    begin = generator.ensemble.beginning
    assert tuple(expected[: len(begin)]) == begin and expected[len(begin)] not in begin


def test_pieces_of_characters_are_joined(
    generator: PrivateGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, tokenizer = "He said:", generator.ensemble.tokenizer
    whole, begun = tokenizer(f"{prompt} {TEXT}").input_ids, len(tokenizer(prompt).input_ids)
    assert any("\ufffd" in tokenizer.decode(token) for token in whole[begun:])
    forced = iter(whole[begun:])
    monkeypatch.setattr(PrivateGenerator, "answer", lambda *_, **__: torch.tensor([next(forced)]))
    pieces = generator.stream(prompt, max_new_tokens=len(whole) - begun)
    said = [piece for (piece,) in pieces]
    assert "".join(said) == " " + TEXT and not any("\ufffd" in piece for piece in said)
