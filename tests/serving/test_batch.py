"""The batch engine: sequences come and go, each answers as alone, and all tokens are charged."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered
from tiny_models import POSITIONS, VOCAB, around, tiny_model, tokenizer

from adapmixed import limits
from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.prompts import PromptEnsemble
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, PublicOnly, Unprotected
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom
from adapmixed.serving import batch
from adapmixed.serving.batch import BatchEngine
from adapmixed.serving.engine import Prompt

COLD = 1e-5  # the likeliest token is as good as certain


@pytest.fixture
def family() -> str:
    """Override the suite's fixture: one family, where a test does not name another."""
    return "llama"


@pytest.fixture
def ensemble(base: Any, make_adapters: Callable[..., list[Path]]) -> Ensemble:
    found = Ensemble.from_pretrained(base, make_adapters(1))
    found.tokenizer = "unused"
    return found


def prompts(count: int, seed: int = 0, **settings: Any) -> list[Prompt]:
    """Return prompts of all lengths, whose answers fit the window."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        length = draw.randint(1, POSITIONS - 2)
        tokens = tuple(draw.randrange(VOCAB) for _ in range(length))
        found.append(Prompt(tokens, draw.randint(1, POSITIONS - length), **settings))
    return found


def engine_of(ensemble: Ensemble, mechanism: Any = None, **settings: Any) -> BatchEngine:
    accountant = settings.pop("accountant", None) or Accountant(1e-5)
    mechanism = PublicOnly() if mechanism is None else mechanism
    return BatchEngine(ensemble, mechanism, accountant, rng=SeededRandom(0), **settings)


def unread(engine: BatchEngine) -> list[Any]:
    """Return the batches whose prompts are not read to the end."""
    return [group for group in engine._batches if group.tokens is None]


def run(engine: BatchEngine, waiting: list[Prompt], seed: int = 1) -> dict[Prompt, list[int]]:
    """Let prompts join at random times, and leave when their answer is complete."""
    draw, answers = random.Random(seed), {prompt: [] for prompt in waiting}  # type: ignore[var-annotated]
    waiting, running = list(waiting), 0
    while waiting or running:
        room = engine.room(waiting[: draw.randint(0, 3)])
        engine.admit(waiting[:room]) if room else None
        waiting, running = waiting[room:], running + room
        released = engine.step()
        assert len(released) == running - sum(len(group.prompts) for group in unread(engine))
        for prompt, token in released:
            answers[prompt].append(token)
        ended = [prompt for prompt, _ in released if len(answers[prompt]) == prompt.max_tokens]
        engine.leave(ended)
        running -= len(ended)
    assert engine.step() == []
    return answers


def check_alone(ensemble: Any, mechanism: Any, answers: dict[Prompt, list[int]]) -> None:
    """Assert that each answer is that of the prompt alone."""
    for prompt, tokens in answers.items():
        expected = answered(
            ensemble, mechanism, torch.tensor([prompt.tokens]),
            max_new_tokens=prompt.max_tokens, temperature=prompt.temperature, top_k=prompt.top_k,
        )  # fmt: skip
        assert tokens == expected[0].tolist()


@pytest.mark.parametrize(
    ("family", "mechanism", "part"),
    [("gpt2", Unprotected(), 3), ("llama", Unprotected(), 64), ("llama", PublicOnly(), 3)],
    ids=["positions, parts", "rotary, whole prompts", "public, parts"],
)
def test_each_sequence_answers_as_it_does_alone(
    ensemble: Ensemble, mechanism: Any, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_PART", part)
    monkeypatch.setattr(batch, "_PART_EACH", 1)
    monkeypatch.setattr(limits, "LEAST_TEMPERATURE", 1e-6)
    asked = prompts(12, temperature=COLD)
    asked[3:6] = [replace(prompt, temperature=COLD / 2) for prompt in asked[3:6]]
    asked[6:9] = [replace(prompt, top_k=5) for prompt in asked[6:9]]
    accountant = Accountant(1e-5)
    answers = run(engine_of(ensemble, mechanism, accountant=accountant), asked)
    check_alone(ensemble, mechanism, answers)
    assert accountant.queries == sum(prompt.max_tokens for prompt in asked)


def test_prompts_with_records_are_served_as_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_TEMPERATURE", 1e-6)
    words = around(tokenizer([59, *range(59), 60, 70], eos_token="w60"), 0)
    model = tiny_model("llama", max_position_embeddings=64)
    made = PromptEnsemble(model, "w20 w21", records=3, longest=5, plain=True, tokenizer=words)
    ensemble, mechanism = made.filled(["w5 w6", "w7", None]), ClippedLogPool(0.0, 4.0, queries=99)
    asked = [Prompt((*made.opening, *range(9, 9 + more)), 6, temperature=COLD) for more in range(3)]
    accountant = Accountant(1e-5)
    answers = run(engine_of(ensemble, mechanism, accountant=accountant), asked)
    check_alone(ensemble, mechanism, answers)
    assert accountant.queries == 18 and accountant.guarantee().kind == "fixed"


@pytest.mark.parametrize(
    ("mechanism", "charges"),
    [(ClippedLogPool(-0.5, 0.5, queries=100), 1), (ClippedMixing(0.5, 2.0, queries=100), 2)],
    ids=["a fixed cost: a step", "another: a temperature"],
)
def test_what_is_one_charge(
    ensemble: Ensemble, tmp_path: Path, mechanism: Any, charges: int
) -> None:
    with Accountant(1e-5, path=tmp_path / "ledger.db") as accountant:
        engine = BatchEngine(ensemble, mechanism, accountant)
        assert accountant.charges == 1  # the binding
        engine.admit([Prompt((1, 2), 5), Prompt((3,), 5)])
        engine.step()
        assert (accountant.charges, accountant.queries) == (2, 2)
        engine.admit([Prompt((1, 2), 5, temperature=0.5)])
        assert len(engine.step()) == 3
        assert (accountant.charges, accountant.queries) == (2 + charges, 5)
        engine.step()  # all are one batch now, of two shapes
        assert (accountant.charges, accountant.queries) == (2 + 2 * charges, 8)
        with pytest.raises(ValueError, match="'active_tokens'"):
            BatchEngine(ensemble, mechanism, accountant, active=9)


def test_the_public_model_alone(base: Any, make_adapters: Callable[..., list[Path]]) -> None:
    """Its tokens are those without members, beside private answers too, and nothing is charged."""
    asked = [*prompts(4), *prompts(4, seed=1, temperature=0.5), *prompts(4, seed=2, top_k=5)]
    public = [replace(prompt, public=True) for prompt in asked]
    answers = []
    for first in (0, 50):
        ensemble = Ensemble.from_pretrained(base, make_adapters(2, first=first))
        ensemble.tokenizer = "unused"
        accountant = Accountant(1e-5)
        engine = engine_of(ensemble, ClippedLogPool(-3, 3, 9, 500), accountant=accountant)
        answers.append(list(run(engine, public).values()))
        assert accountant.queries == 0
        engine.admit([Prompt((1, 2), 5), Prompt((3,), 5, public=True)])
        assert len(engine.step()) == 2 and accountant.queries == 1
        answers.append(list(run(engine_of(ensemble), asked).values()))
    assert all(tokens == answers[0] for tokens in answers)


def test_all_sequences_fit_the_memory(ensemble: Ensemble) -> None:
    prompt = Prompt((1,) * 10, 10)
    engine = engine_of(ensemble)
    needed = engine._bytes(19)
    engine = engine_of(ensemble, memory_bytes=3 * needed)
    waiting = [replace(prompt) for _ in range(5)]
    assert engine.room(waiting) == 3
    engine.admit(waiting[:2])
    assert engine.room(waiting[2:]) == 1
    wide = Prompt((1,) * 20, 10)  # the others are padded to its window
    assert engine.room([wide]) == 0 and engine.room([]) == 0
    engine.step()
    engine.leave(waiting[:1])
    assert engine.room([wide]) == int(2 * engine._bytes(29) <= 3 * needed)
    # A short one is padded to the longest, too.
    engine = engine_of(ensemble, memory_bytes=2 * engine._bytes(29) - 1)
    engine.admit([wide])
    assert engine.room([prompt]) == 0
    assert engine_of(ensemble, memory_bytes=needed).window == 19
    assert engine.window == POSITIONS
    with pytest.raises(ValueError, match="memory_bytes must be >= "):
        engine_of(ensemble, memory_bytes=engine._bytes(1) - 1)


def test_a_long_prompt_is_read_in_parts(
    ensemble: Ensemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get their tokens meanwhile, and what is charged is what is released."""
    monkeypatch.setattr(batch, "_PART", 5)
    first, long, late = Prompt((1, 2), 20), Prompt((1,) * 22, 2), Prompt((3,), 5)
    with Accountant(1e-5, path=tmp_path / "ledger.db") as accountant:
        engine = BatchEngine(ensemble, ClippedLogPool(-0.5, 0.5, queries=100), accountant)
        engine.admit([long])
        assert [prompt for prompt, _ in engine.step()] == [long]  # nobody waits: it is read at once
        engine.leave([long])
        engine.admit([first])
        engine.step()
        engine.admit([long])
        engine.admit([late])
        for left in (17, 12, 7, 2):
            assert [prompt for prompt, _ in engine.step()] == [first]
            assert unread(engine)[0].decoder.unread == left
        assert accountant.queries == 6
        assert [prompt for prompt, _ in engine.step()] == [first, long]
        assert [prompt for prompt, _ in engine.step()] == [first, long, late]
        assert accountant.queries == 11
        gone = replace(long)
        engine.admit([gone])
        engine.step()
        engine.leave([gone])
        assert not unread(engine) and len(engine.step()) == 3
        short = [Prompt((3,), 1), Prompt((4,), 1)]
        engine.admit([gone])
        engine.admit(short)
        engine.leave(short[:1])  # while it waits behind the long one
        found = [[prompt for prompt, _ in engine.step()][3:] for _ in range(3)]
        assert found == [[], [gone], [gone, short[1]]]


def test_a_batch_has_the_memory_that_others_leave(
    ensemble: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, decoder, memory = engine_of(ensemble), ensemble.decoder, list[int]()

    def kept(*given: Any, **settings: Any) -> Any:
        memory.append(settings["memory_bytes"])
        return decoder(*given, **settings)

    monkeypatch.setattr(ensemble, "decoder", kept)
    for prompt in prompts(2):
        engine.admit([prompt])
    assert memory[0] - memory[1] == engine._bytes(engine._batches[0].decoder.window) > 0
