"""Text in, text out: pieces, padding, stop strings, templates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from generation_cases import FIRST, PROMPT, tokens_of
from tokenizers.processors import TemplateProcessing

from adapmixed.decoding import generate
from adapmixed.generation import PrivateGenerator, left_padded, stop_rule
from adapmixed.mechanisms import PMixED, Shaped, Unprotected
from adapmixed.models import Ensemble
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom


def generator(ensemble: Ensemble, mechanism: Any = FIRST, **options: Any) -> PrivateGenerator:
    rng = options.pop("rng", SeededRandom(7))
    return PrivateGenerator(ensemble, mechanism, accountant=Accountant(1e-5), rng=rng, **options)


def test_pieces_are_the_released_tokens(demo: Ensemble) -> None:
    mechanism = Shaped(Unprotected(), temperature=1.3)
    ids = tokens_of(demo, PROMPT)
    tokens = generate(
        demo, mechanism, ids, max_new_tokens=40, rng=SeededRandom(7), accountant=Accountant(1e-5),
        stop_token=demo.end_tokens,
    )  # fmt: skip
    expected = demo.tokenizer.decode(tokens[0][tokens[0] >= 0], skip_special_tokens=True)
    here = generator(demo, mechanism)
    pieces = list(here.stream(PROMPT, max_new_tokens=40))
    assert "".join(piece for (piece,) in pieces) == expected
    assert len(pieces) == tokens.shape[1] + 1  # the last one is what was held back
    assert here.guarantee.queries == int((tokens >= 0).sum())
    assert generator(demo, mechanism).generate(PROMPT, max_new_tokens=40) == [expected]


def test_a_character_is_shown_once_it_is_whole(demo: Ensemble) -> None:
    from adapmixed.generation.text import Continuation

    text = Continuation(demo.tokenizer, tokens_of(demo, "caf")[0].tolist())
    parts = tokens_of(demo, "\u00e9\u4e2d!")[0].tolist()
    assert len(parts) > 3
    pieces = [text.add(token) for token in parts]
    assert "".join(pieces) == "\u00e9\u4e2d!" and not any("\ufffd" in p for p in pieces)
    assert pieces.count("") == len(parts) - 3
    broken = Continuation(demo.tokenizer, tokens_of(demo, "caf")[0].tolist())
    assert broken.add(parts[0]) == "" and broken.rest() == "\ufffd"


def test_padded_prompts_answer_as_they_do_alone(demo: Ensemble) -> None:
    prompts = ["If", "The value of the expression is", PROMPT]
    together = generator(demo).generate(prompts, max_new_tokens=12)
    assert together == [generator(demo).generate(p, max_new_tokens=12)[0] for p in prompts]
    assert len(set(together)) == 3
    ids, mask = left_padded([[5], [6, 7]])
    assert ids.tolist() == [[0, 5], [6, 7]]
    assert mask is not None and mask.tolist() == [[0, 1], [1, 1]]
    assert left_padded([[5, 6]])[1] is None


def test_batches_answer_as_one_and_are_checked_at_once(demo: Ensemble) -> None:
    prompts = ["If", "The value of the expression is", PROMPT, "The", "For"]
    here = generator(demo)
    assert here.batches(prompts, 3) == [prompts]
    pairs = here.batches(prompts, 3, 2)
    assert list(map(len, pairs)) == [2, 2, 1]
    answers = [text for pair in pairs for text in here.generate(pair, max_new_tokens=3)]
    assert answers == generator(demo).generate(prompts, max_new_tokens=3)
    # As many as fit: one more than a batch holds is refused.
    most = FIRST.held_bytes
    need = demo.sequence_bytes(len(tokens_of(demo, PROMPT)[0]), new_tokens=2, beside=most)
    tight = generator(demo, memory_bytes=2 * need)
    assert all(len(batch) in (1, 2) for batch in tight.batches([PROMPT] * 5, 3))
    tight.generate([PROMPT] * 2, max_new_tokens=3)
    with pytest.raises(ValueError, match=f"memory_bytes must be >= {3 * need} "):
        tight.generate([PROMPT] * 3, max_new_tokens=3)
    assert [len(one) for one in generator(demo, memory_bytes=1).batches(prompts, 3)] == [1] * 5
    planned = generator(demo, PMixED(8.0, 1e-5, 8, 3.0))
    for given, message in (
        ((["a", ""], 3), r"prompts\[1\]"),
        ((["a", "x " * 3000], 3), "the model's window is"),
        ((prompts, 2), "got up to 10 more"),
        ((prompts, 0), "max_new_tokens must be an integer >= 1, got 0"),
        ((prompts, 1, 0), "size must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            planned.batches(*given)  # type: ignore[arg-type]


def test_a_stop_string_ends_its_own_text_and_is_charged(demo: Ensemble) -> None:
    whole = generator(demo).generate(PROMPT, max_new_tokens=30)[0]
    stop = whole[20:23]
    here = generator(demo)
    answers = here.generate([PROMPT, "If"], max_new_tokens=30, stop_strings=[stop])
    # Nothing after the token in which it ends; the prompt's own text does not count.
    assert stop in answers[0] and whole.startswith(answers[0]) and len(answers[0]) < len(whole)
    assert whole.index(stop) + len(stop) <= len(answers[0])
    assert stop not in answers[0][: whole.index(stop) + len(stop) - 1]
    ids = demo.tokenizer(answers[0])["input_ids"]
    other = demo.tokenizer(answers[1])["input_ids"]
    assert abs(here.guarantee.queries - len(ids) - len(other)) <= 2
    assert here.guarantee.queries < 60
    again = generator(demo).generate(PROMPT, max_new_tokens=5, stop_strings=["The statement"])
    assert whole.startswith(again[0]) and len(again[0]) > 0
    assert stop_rule(demo.tokenizer, []) is None


def test_a_chat_template_is_needed_and_used(
    demo: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "What is a clause?"}]
    with pytest.raises(ValueError, match="must have a chat template"):
        generator(demo).chat(messages, max_new_tokens=4)
    monkeypatch.setattr(
        demo.tokenizer,
        "chat_template",
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    )
    pieces = generator(demo).chat(messages, max_new_tokens=8)
    plain = generator(demo).generate("user: What is a clause?\nassistant:", max_new_tokens=8)
    assert "".join(pieces) == plain[0]


def test_a_chat_adds_no_special_tokens_to_its_template(
    demo: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that puts a token before every text: the template has written its own."""
    tokenizer = copy.deepcopy(demo.tokenizer)
    first = tokenizer.convert_ids_to_tokens(0)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, 0)]
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    monkeypatch.setattr(demo, "tokenizer", tokenizer)
    read: list[list[int]] = []
    monkeypatch.setattr(
        "adapmixed.generation.generator.stream",
        lambda *given, **_: iter(read.extend(given[2].tolist()) or ()),
    )
    here = generator(demo)
    list(here.chat([{"role": "user", "content": PROMPT}], max_new_tokens=2))
    list(here.stream(PROMPT, max_new_tokens=2))
    assert read[1] == [0, *read[0]] and read[0][0] != 0


def test_what_a_chat_template_refuses_is_said_in_words(
    demo: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a"}]
    for template, why in (
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0]['content'].nothing() }}", "has no attribute 'nothing'"),
        ("{% if %}", "Expected an expression"),
    ):
        monkeypatch.setattr(demo.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match=f"chat template takes, it refuses: .*{why}"):
            generator(demo).chat(messages, max_new_tokens=4)


def test_what_is_refused(demo: Ensemble, base: Any, make_adapters: Callable[..., Any]) -> None:
    for prompts in ([], [""], ["a", ""]):
        with pytest.raises(ValueError, match="prompts"):
            generator(demo).stream(prompts, max_new_tokens=3)
    for strings in ("stop", [""], [3]):
        with pytest.raises(ValueError, match="stop_strings"):
            generator(demo).stream("a", max_new_tokens=3, stop_strings=strings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have a tokenizer"):
        generator(Ensemble.load(base, make_adapters(1)))


@pytest.mark.parametrize(
    "method,given,message",
    [
        ("generate", {"prompts": 3}, "prompts must be a string or a list of strings, got 3"),
        ("generate", {"prompts": None}, "prompts must be a string or a list of strings, got None"),
        ("generate", {"prompts": b"a"}, "prompts must be a string or a list of strings, got b'a'"),
        ("stream", {"prompts": ["a", 3]}, r"prompts\[1\] must be a string, got 3"),
        ("stream", {"max_new_tokens": "3"}, "max_new_tokens must be an integer >= 1, got '3'"),
        ("stream", {"max_new_tokens": None}, "max_new_tokens must be an integer >= 1, got None"),
        ("stream", {"max_new_tokens": True}, "max_new_tokens must be an integer >= 1, got True"),
        ("stream", {"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ("stream", {"stop_strings": 3}, "stop_strings must be a list of strings"),
        ("stream", {"temperature": 0.5}, "temperature must not be given, got 0.5: .*Shaped"),
        ("generate", {"top_p": 0.5}, "top_p must not be given, got 0.5: .*another law"),
        ("chat", {"messages": "hello"}, "messages must be a list of .* got 'hello'"),
        ("chat", {"messages": []}, "messages must hold at least one message"),
        ("chat", {"messages": ["a"]}, r"messages\[0\] must be {'role': ..., 'content': ...}, got"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, "must be a string, got 3"),
        ("chat", {"do_sample": False}, "do_sample must not be given"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_words(
    demo: Ensemble,
    method: str,
    given: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    first = {"chat": {"messages": [{"role": "user", "content": "a"}]}}.get(method, {"prompts": "a"})
    here = generator(demo)
    with pytest.raises(ValueError, match=message):
        getattr(here, method)(**({"max_new_tokens": 3} | first | given))
    assert here.guarantee.queries == 0


@pytest.mark.parametrize(
    "given,message",
    [
        ({"ensemble": "my-ensemble"}, "ensemble must be an Ensemble .*, got 'my-ensemble'"),
        ({"ensemble": None}, "ensemble must be an Ensemble .*, got None"),
        ({"mechanism": "pmixed"}, "mechanism must be a Mechanism .*, got 'pmixed'"),
        ({"mechanism": PMixED}, "mechanism must be a Mechanism .*, got <class"),
        ({"accountant": 1e-5}, "accountant must be an Accountant, got 1e-05"),
        ({"rng": 3}, r"rng must be SecureRandom\(\) or SeededRandom\(seed\), got 3"),
        ({"ledger": "ledger.db"}, "ledger must be a Ledger .*, got 'ledger.db'"),
        ({"model_filter": 3}, "model_filter must be a PerModelFilter, got 3"),
        ({"overflow": 1}, "overflow must be 'refuse' or 'slide', got 1"),
        ({"memory_bytes": "1G"}, "memory_bytes must be an integer >= 1, got '1G'"),
        ({"memory_bytes": 0}, "memory_bytes must be an integer >= 1, got 0"),
        ({"temperature": 0.5}, "temperature must not be given, got 0.5"),
    ],
)
def test_a_generator_of_other_parts_is_refused_in_words(
    demo: Ensemble, given: dict[str, Any], message: str
) -> None:
    parts: dict[str, Any] = {"ensemble": demo, "mechanism": FIRST, "accountant": Accountant(1e-5)}
    with pytest.raises(ValueError, match=message):
        PrivateGenerator(**(parts | given))
    ids = tokens_of(demo, "a")
    with pytest.raises(ValueError, match=message):
        generate(**({"rng": SeededRandom(0)} | parts | given), input_ids=ids, max_new_tokens=2)


@pytest.mark.parametrize(
    "given,message",
    [
        ({"input_ids": [[1, 2]]}, r"input_ids must be a tensor \(b, t\), got \[\[1, 2\]\]"),
        ({"attention_mask": [[1, 1]]}, "attention_mask must be a tensor"),
        ({"stop_token": "</s>"}, "stop_token must be an integer, several or None, got '</s>'"),
        ({"stop_token": [1, 0.5]}, "stop_token must be an integer, several or None"),
        ({"stop": "END"}, "stop must be a function of released tokens or None, got 'END'"),
    ],
)
def test_a_query_of_another_kind_is_refused_in_words(
    demo: Ensemble, given: dict[str, Any], message: str
) -> None:
    ids = tokens_of(demo, "a")
    with pytest.raises(ValueError, match=message):
        generate(
            demo, FIRST, max_new_tokens=2, rng=SeededRandom(0), accountant=Accountant(1e-5),
            **({"input_ids": ids} | given),
        )  # fmt: skip
