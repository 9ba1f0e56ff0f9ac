"""The loop of charge and release, and generated text: pieces, padding, stop strings, templates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import MECHANISMS, answered, steps
from decoding_cases import PROMPT as TOKENS
from fake_ensemble import FakeEnsemble
from tiny_models import around

from adapmixed.ensemble import Ensemble
from adapmixed.errors import BudgetSpentError
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import (
    Answer,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Ticket,
    Unprotected,
    shaped,
)
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.events import Binding
from adapmixed.rng import SecureRandom, SeededRandom

POOL = ClippedLogPool(-0.1, 0.1)
PROMPT = "The statement executes the first clause"
# The likeliest public token instead of a draw, so that the text is known.
FIRST = PublicOnly()
LIKELIEST: dict[str, Any] = {"top_k": 1}


class Watch:
    """Log the phases of every ticket.

    Attributes:
        log: phases, with logits, the members that pay, or tokens.
        forced: tokens to release instead, step by step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any]] = []
        self.forced: tuple[tuple[int, ...], ...] = ()
        propose, charge, release = Mechanism.propose_rows, Ticket.charge, Ticket.release

        def proposed(mechanism: Mechanism, rows: Any, **settings: Any) -> Ticket:
            self.log.append(("propose", (rows.private.clone(), rows.public.clone())))
            return propose(mechanism, rows, **settings)

        def charged(ticket: Ticket, pay: Any) -> None:
            def paid(*costs: Any) -> Any:
                at = len(self.log)
                self.log.append(("events", None))
                active = pay(*costs)
                self.log[at] = "events", active
                return active

            charge(ticket, paid)

        def released(ticket: Ticket) -> Answer:
            answer, step = release(ticket), self.phases.count("release")
            if step < len(self.forced):
                forced = torch.tensor(self.forced[step])
                assert answer.tokens is not None and forced.shape == answer.tokens.shape
                answer = Answer(forced, None, answer.public)
            self.log.append(("release", answer.tokens))
            return answer

        monkeypatch.setattr(Mechanism, "propose_rows", proposed)
        monkeypatch.setattr(Ticket, "charge", charged)
        monkeypatch.setattr(Ticket, "release", released)

    @property
    def phases(self) -> list[str]:
        return [phase for phase, _ in self.log]

    @property
    def proposals(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The (private, public) logits of every step."""
        return [logits for phase, logits in self.log if phase == "propose"]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


class LoggedAccountant(Accountant):
    """An accountant that logs charges once they are on the device."""

    def __init__(self, log: list[tuple[str, Any]], **settings: Any) -> None:
        super().__init__(1e-5, **settings)
        self.log = log

    def _commit(self, events: Any, account: Any) -> None:
        super()._commit(events, account)
        if not isinstance(events[0], Binding):
            self.log.append(("charge", None))


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_every_step_is_charged_before_its_token_is_drawn_and_yielded(
    name: str, path: Path, spy: Watch
) -> None:
    with LoggedAccountant(spy.log, path=path) as accountant:
        settings: dict[str, Any] = {"accountant": accountant, "rng": SecureRandom()}
        stepwise = steps(FakeEnsemble(), MECHANISMS[name], max_new_tokens=3, **settings)
        assert read_ledger(path).charges == 1  # the binding
        for step in range(1, 4):
            tokens = next(stepwise)
            assert spy.phases == ["propose", "events", "charge", "release"]
            assert torch.equal(tokens, spy.log[-1][1])
            assert accountant.queries == 3 * step and read_ledger(path).charges == step + 1
            spy.log.clear()
        assert next(stepwise, None) is None
        assert spy.log == []
        assert read_ledger(path).guarantee == accountant.guarantee()


@pytest.mark.parametrize("mechanism", [ClippedLogPool(-0.5, 0.5), ClippedMixing(0.5, 2.0, order=8)])
def test_budgets_are_decided_and_charged_before_a_token_is_drawn(
    mechanism: Mechanism, spy: Watch
) -> None:
    """A member whose shard has spent its budget answers q, and the stream goes on."""
    accountant = LoggedAccountant(spy.log, epsilon=2.0)
    before = None
    for tokens in steps(FakeEnsemble(), mechanism, max_new_tokens=40, accountant=accountant):
        assert spy.phases == ["propose", "events", "charge", "release"]
        active = spy.log[1][1]
        assert active.shape == (3, len(TOKENS)) and bool((tokens >= 0).all())
        spent = accountant.spent
        assert bool((spent <= accountant.limit).all())
        if before is not None:  # only those that paid have spent more
            assert np.array_equal(spent > before, active.any(1))
        before = spent
        spy.log.clear()
    assert not active.all() and spent.min() > 0.8 * accountant.limit


def test_ended_sequences_are_neither_charged_nor_sampled_nor_computed(
    ensemble: Ensemble, spy: Watch
) -> None:
    """The remaining rows continue from their own caches, padding included."""
    prompt, mask = torch.tensor([[0, 9], [5, 6], [0, 7]]), torch.tensor([[0, 1], [1, 1], [0, 1]])
    # Row 1 ends at step 1, row 0 at step 2.
    spy.forced, accountant = ((1, 2, 3), (4, 60, 5), (60, 6), (7,), (8,)), Accountant(1e-5)
    settings: dict[str, Any] = {"max_new_tokens": 5, "ends": [60], "accountant": accountant}
    tokens = answered(ensemble, MECHANISMS["adapmixed"], prompt, attention_mask=mask, **settings)
    assert tokens.tolist() == [[1, 4, 60, -1, -1], [2, 60, -1, -1, -1], [3, 5, 6, 7, 8]]
    # The end tokens are charged, but nothing after them.
    assert accountant.queries == 3 + 3 + 2 + 1 + 1
    for step, rows in enumerate(([0, 1, 2], [0, 1, 2], [0, 2], [2], [2])):
        ids = torch.cat([prompt, tokens], dim=1)[rows, : 2 + step]
        seen = torch.cat([mask[rows], torch.ones(len(rows), step, dtype=torch.int64)], dim=1)
        private, public, _ = ensemble.forward(ids, seen, None)
        torch.testing.assert_close(spy.proposals[step][1], public[:, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(spy.proposals[step][0], private[:, :, -1], rtol=1e-4, atol=1e-4)


def test_window() -> None:
    """The last token is never read back: a window of 8 holds a prompt of 3 and 6 new tokens."""
    ensemble = FakeEnsemble(max_positions=8)
    accountant = Accountant(1e-5)
    yielded = []
    for tokens in steps(ensemble, PublicOnly(), max_new_tokens=6, accountant=accountant):
        yielded.append(tokens.clone())
        tokens.fill_(-1)  # a yielded tensor is the caller's own
    read = torch.cat([TOKENS, torch.stack(yielded, dim=1)], dim=1)
    assert read.shape == (3, 9) and torch.equal(ensemble.decoders[0].ids, read[:, :8])
    with pytest.raises(
        ValueError,
        match=r"max_new_tokens must be <= 6 after a prompt of 3 tokens .*window is 8.*got 7",
    ):
        answered(ensemble, PublicOnly(), max_new_tokens=7, accountant=accountant)
    assert accountant.queries == 18  # refused before anything is charged
    endless = FakeEnsemble(max_positions=None)
    assert answered(endless, PublicOnly(), max_new_tokens=7).shape == (3, 7)


@pytest.mark.parametrize(
    "mechanism",
    [
        PMixED(8.0, 1e-5, 7, 6.0),
        ClippedLogPool(-0.25, 0.5, queries=7),
        ClippedMixing(0.5, 2.0, queries=7),
    ],
)
def test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call(
    path: Path, mechanism: Mechanism
) -> None:
    """The error comes before anything is read or charged, with and without a ledger."""
    words = (
        "within the 7 that .* was planned for, 6 of which are spent, got up to 2 more with 1 left: "
        r"ask for fewer \(evaluate: --queries, else --max-new-tokens"
    )
    for place in (None, path):
        ensemble = FakeEnsemble()
        settings: dict[str, Any] = {"rng": SecureRandom(), "temperature": 0.5, "top_k": 4}
        with Accountant(1e-5, path=place) as accountant:
            settings["accountant"] = accountant
            answered(ensemble, mechanism, max_new_tokens=2, **settings)
        if place is not None:
            accountant = settings["accountant"] = Accountant(1e-5, path=place)
        read, charges = len(ensemble.decoders), accountant.charges
        for count, most in ((1, 2), (2, 1)):
            with pytest.raises(BudgetSpentError, match=words):
                steps(ensemble, mechanism, TOKENS[:count], max_new_tokens=most, **settings)
        assert (accountant.charges, accountant.queries) == (charges, 6)
        assert len(ensemble.decoders) == read
        answered(ensemble, mechanism, TOKENS[:1], max_new_tokens=1, **settings)
        assert accountant.queries == 7
        accountant.close()


# Text.


def tokens_of(ensemble: Ensemble, text: str) -> torch.Tensor:
    return torch.tensor([ensemble.tokenizer(text)["input_ids"]])


def generator(
    ensemble: Ensemble, mechanism: Any = FIRST, accountant: Any = None, **options: Any
) -> PrivateGenerator:
    accountant = Accountant(1e-5) if accountant is None else accountant
    options = {"rng": SeededRandom(7)} | options
    return PrivateGenerator(ensemble, mechanism, accountant, **options)


def continued(ensemble: Ensemble, prompts: Any, **settings: Any) -> list[str]:
    """Continue a text by the likeliest public tokens."""
    return generator(ensemble).generate(prompts, **(LIKELIEST | settings))


def test_a_ledger_is_bound_to_its_generator_before_any_charge(demo: Ensemble, path: Path) -> None:
    accountant, pool = Accountant(1e-5, path=path), ClippedLogPool(-0.1, 0.1, queries=50)
    with pytest.raises(ValueError, match=r"rng must be SecureRandom\(\) if charges go to a led"):
        generator(demo, pool, accountant)  # whose source is seeded
    assert accountant.charges == 0
    for _ in range(2):
        here = generator(demo, pool, accountant, active=300, rng=SecureRandom())
        assert accountant.charges == read_ledger(path).charges == 1
    here.generate("The", max_new_tokens=2)
    for active in (299, None):
        with pytest.raises(ValueError, match="'active_tokens': 300"):
            generator(demo, pool, accountant, active=active, rng=SecureRandom())


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 40}], ids=str)
def test_too_little_memory_names_what_is_needed(demo: Ensemble, settings: dict[str, Any]) -> None:
    """All tokens of the answer count, and what is copied of their rows.

    The error comes before the first charge. Fewer active tokens need less.
    """
    ids, needed, generators = tokens_of(demo, PROMPT), [], []

    def read(memory: int, active: int | None, count: int) -> Any:
        generators.append(generator(demo, POOL, memory_bytes=memory, active=active))
        return generators[-1].stream_tokens(ids, max_new_tokens=count, **settings)

    for active, count in ((299, 2), (300, 2), (None, 2), (None, 100)):
        with pytest.raises(ValueError, match="memory_bytes must be >= ") as short:
            read(1, active, count)
        needed.append(int(str(short.value).partition(">= ")[2].partition(" ")[0]))
        assert len([*read(needed[-1], active, count)]) == count
        with pytest.raises(ValueError, match=f"memory_bytes must be >= {needed[-1]} "):
            read(needed[-1] - 1, active, count)
    assert needed == sorted(set(needed))
    assert [g.guarantee.queries for g in generators] == [0, 2, 0] * 3 + [0, 100, 0]


def test_pieces_are_the_released_tokens(demo: Ensemble) -> None:
    ids = tokens_of(demo, PROMPT)
    tokens = answered(
        demo, Unprotected(), ids, max_new_tokens=40, temperature=1.3, rng=SeededRandom(7),
        ends=demo.end_tokens,
    )  # fmt: skip
    expected = demo.tokenizer.decode(tokens[0][tokens[0] >= 0], skip_special_tokens=True)
    here = generator(demo, Unprotected())
    pieces = list(here.stream(PROMPT, max_new_tokens=40, temperature=1.3))
    assert "".join(piece for (piece,) in pieces) == expected
    assert len(pieces) == tokens.shape[1] + 1  # the last one was held back
    assert here.guarantee.queries == int((tokens >= 0).sum())
    again = generator(demo, Unprotected())
    assert again.generate(PROMPT, max_new_tokens=40, temperature=1.3) == [expected]


def test_temperature_and_top_k_are_of_each_call(demo: Ensemble, spy: Watch) -> None:
    """They shape rows before projection, and the accountant's binding does not include them."""
    here = generator(demo, POOL, Accountant(1e-5, epsilon=2.0))
    limit = here.accountant.limit  # type: ignore[union-attr]
    private, public = demo.logits(tokens_of(demo, PROMPT))
    calls: list[dict[str, Any]] = [
        {}, {"temperature": 0.7}, {"top_k": 5}, {"temperature": 1.4, "top_k": 30}, LIKELIEST,
    ]  # fmt: skip
    for number, shape in enumerate(calls, start=1):
        (text,) = here.generate(PROMPT, max_new_tokens=1, **shape)
        rows = shaped(private[:, :, -1], public[:, -1], **shape)
        torch.testing.assert_close(spy.proposals[-1][0], rows.private, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(spy.proposals[-1][1], rows.public, rtol=1e-4, atol=1e-4)
        assert here.guarantee.queries == number
    assert here.accountant.limit == limit  # type: ignore[union-attr]
    assert text == continued(demo, PROMPT, max_new_tokens=1)[0]  # one token is left: q's


def test_batches_answer_as_one_and_are_checked_at_once(demo: Ensemble) -> None:
    prompts = ["If", "The value of the expression is", PROMPT, "The", "For"]
    here = generator(demo)
    assert here.batches(prompts, 3) == [prompts]
    pairs = here.batches(prompts, 3, 2)
    assert list(map(len, pairs)) == [2, 2, 1]
    answers = [text for p in pairs for text in continued(demo, p, max_new_tokens=12)]
    assert answers == continued(demo, prompts, max_new_tokens=12) and len(set(answers)) == 5
    assert answers == [continued(demo, p, max_new_tokens=12)[0] for p in prompts]
    # As many as fit: one more than a batch holds raises.
    length = len(tokens_of(demo, PROMPT)[0])
    most = generator(demo, FIRST).answer_bytes(1.0, None)
    need = demo.sequence_bytes(length, new_tokens=2, answer_bytes=most)
    tight = generator(demo, memory_bytes=2 * need)
    assert all(len(batch) in (1, 2) for batch in tight.batches([PROMPT] * 5, 3))
    tight.generate([PROMPT] * 2, max_new_tokens=3)
    with pytest.raises(ValueError, match=f"memory_bytes must be >= {3 * need} "):
        tight.generate([PROMPT] * 3, max_new_tokens=3)
    assert [len(batch) for batch in generator(demo, memory_bytes=1).batches(prompts, 3)] == [1] * 5
    planned = generator(demo, PMixED(8.0, 1e-5, 8, 3.0))
    for arguments, message in (
        ((["a", 3], 3), r"prompts\[1\]"),
        ((["x " * 3000], 3), "prompt must have at most 256 tokens, the window, got 3001"),
        ((prompts, 2), "got up to 10 more"),
        ((prompts, 0), "max_new_tokens must be an integer >= 1, got 0"),
        ((prompts, 1, 0), "size must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            planned.batches(*arguments)  # type: ignore[arg-type]


def test_each_text_ends_with_the_token_that_completes_a_stop_string(
    demo: Ensemble, endless: None, monkeypatch: pytest.MonkeyPatch, spy: Watch
) -> None:
    """A character of two tokens, a string that ends inside a token's text, and one of a prompt."""
    c, a, f, *accent = tokens_of(demo, "café")[0].tolist()
    (name,) = tokens_of(demo, " name")[0].tolist()
    assert len(accent) == 2
    ends = ((part, name) for part in accent)
    spy.forced = ((c, a, name), (a, name, name), (f, name), *ends, (name,))
    here = generator(demo)
    # Looking at every token of the vocabulary would take seconds for each call.
    monkeypatch.delattr(type(demo.tokenizer), "get_vocab")
    strings = {"stop_strings": ["é", "a na", "aé"], "max_new_tokens": 6}
    answers = here.generate(["The", "a na", "If"], **strings)
    assert answers == ["café", "a name", " name" * 6]
    assert here.guarantee.queries == 5 + 2 + 6


def test_a_special_token_ends_a_text_as_a_stop_string(
    demo: Ensemble, endless: None, spy: Watch
) -> None:
    end = "<|endoftext|>"
    first, last = tokens_of(demo, " value of")[0].tolist()
    spy.forced, accountant = ((first, 0), (last,), (0,)), Accountant(1e-5)
    here = generator(demo, FIRST, accountant)
    answers = here.generate(["The", "If"], max_new_tokens=9, stop_strings=["\n", end])
    assert answers == [" value of", ""]
    assert accountant.queries == 4  # both ends are charged, and nothing after them
    why = r"stop_strings must have the special token '<\|endoftext\|>' as a string of its own"
    for stop in (f"{end}\n", f".{end}", end * 2):
        with pytest.raises(ValueError, match=why):
            here.stream("The", max_new_tokens=9, stop_strings=[stop])
    assert accountant.queries == 4


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
    pieces = generator(demo).chat(messages, max_new_tokens=8, **LIKELIEST)
    plain = continued(demo, "user: What is a clause?\nassistant:", max_new_tokens=8)
    assert "".join(pieces) == plain[0]


def test_a_chat_begins_as_a_text_does_once(demo: Ensemble, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may put a token before every text, and so may the template."""
    tokenizer = around(copy.deepcopy(demo.tokenizer), 0)
    monkeypatch.setattr(demo, "tokenizer", tokenizer)
    read: list[list[int]] = []
    monkeypatch.setattr(
        PrivateGenerator,
        "stream_tokens",
        lambda _, ids, **__: iter(read.extend(ids.tolist()) or ()),
    )
    here = generator(demo)
    for before in ("", tokenizer.bos_token):
        tokenizer.chat_template = before + "{{ messages[0]['content'] }}"
        list(here.chat([{"role": "user", "content": PROMPT}], max_new_tokens=2))
    list(here.stream(PROMPT, max_new_tokens=2))
    assert read[0] == read[1] == read[2] and read[0][0] == 0 != read[0][1]


def test_what_a_chat_template_refuses_is_said(
    demo: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a"}]
    for template, why in (
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0]['content'].nothing() }}", "has no attribute 'nothing'"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% if %}", "Expected an expression"),
    ):
        monkeypatch.setattr(demo.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match=f"chat template, which rejects them: .*{why}"):
            generator(demo).chat(messages, max_new_tokens=4)


def test_a_tokenizer_is_needed(
    demo: Ensemble, base: Any, make_adapters: Callable[..., Any]
) -> None:
    accountant = Accountant(1e-5)
    with pytest.raises(ValueError, match="must have a tokenizer"):
        generator(Ensemble.from_pretrained(base, make_adapters(1)), accountant=accountant)
    generator(demo, accountant=accountant)  # it was not bound before


USER = {"role": "user", "content": "a"}
WRONG: list[tuple[str, str, list[Any]]] = [
    ("stream", "prompts", [3, None, b"a", ["a", 3], "a\udcffb", []]),
    ("stream", "max_new_tokens", ["3", None, True, 0]),
    ("stream", "stop_strings", [3, "stop", [""], [3]]),
    ("stream", "temperature", ["cold", 0.0, float("nan")]),
    ("stream", "top_k", [2.5, 0]),
    (
        "chat",
        "messages",
        ["hello", [], ["a"], [USER | {"content": 3}], [USER | {"role": "\ud800"}]],
    ),
    ("new", "ensemble", ["my-ensemble", None]),
    ("new", "mechanism", ["pmixed", PMixED]),
    ("new", "accountant", [1e-5, None]),
    ("new", "rng", [3]),
    ("new", "memory_bytes", ["1G", 0]),
    ("stream_tokens", "input_ids", [[[1, 2]]]),
    (
        "stream_tokens",
        "attention_mask",
        [[[1, 1], [1, 1]], *torch.tensor([[[0, 2], [1, 1]], [[1, 1], [0, 0]]])],
    ),
    ("stream_tokens", "ends", [5, "ab", [True], [1, 0.5]]),
    ("stream_tokens", "stop", ["END"]),
]


@pytest.mark.parametrize("method,name,values", WRONG)
def test_arguments_of_another_kind_raise(
    demo: Ensemble, method: str, name: str, values: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    accountant = Accountant(1e-5)
    parts: dict[str, Any] = {"ensemble": demo, "mechanism": FIRST, "accountant": accountant}
    here = PrivateGenerator(**parts)
    call, arguments = {
        "new": (PrivateGenerator, parts),
        "stream": (here.stream, {"prompts": "a", "max_new_tokens": 3}),
        "chat": (here.chat, {"messages": [USER], "max_new_tokens": 3}),
        "stream_tokens": (
            here.stream_tokens,
            {"input_ids": torch.ones(2, 2, dtype=torch.int64), "max_new_tokens": 3},
        ),
    }[method]
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}(\[0\]|\[1\])?.* must (be|hold|have) "):
            call(**arguments | {name: value})  # type: ignore[operator]
    assert accountant.queries == 0
