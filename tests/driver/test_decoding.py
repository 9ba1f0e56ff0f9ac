"""The decoding loop: charge, then release; who is charged; what the models are fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import MECHANISMS, PROMPT, Spy
from fake_ensemble import FakeEnsemble
from tiny_models import POSITIONS, TARGETS, VOCAB, tiny_model, write_adapter
from torch import Tensor

from adapmixed.decoding import generate, stream
from adapmixed.mechanisms import Mechanism, PublicOnly
from adapmixed.models import Ensemble
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom


class LoggedAccountant(Accountant):
    """Logs charges, and refuses those after the first ``limit`` of them."""

    def __init__(self, log: list[tuple[str, Any]], limit: int = 10**9) -> None:
        super().__init__(1e-5)
        self.log, self.limit, self.charges = log, limit, 0

    def add(self, events: Any) -> Accountant:
        if self.charges == self.limit:
            raise RuntimeError("the budget is spent")
        self.charges += 1
        self.log.append(("charge", None))
        return super().add(events)


def run(ensemble: Any, mechanism: Mechanism, prompt: Tensor = PROMPT, **settings: Any) -> Tensor:
    arguments: dict[str, Any] = dict(max_new_tokens=4, accountant=Accountant(1e-5))
    arguments |= dict(rng=SeededRandom(0)) | settings
    return generate(ensemble, mechanism, prompt, **arguments)


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    base = tiny_model("gpt2")
    folder: Path = tmp_path_factory.mktemp("adapters")
    adapters = [
        write_adapter(base, folder / str(i), seed=i, target_modules=TARGETS["gpt2"])
        for i in range(3)
    ]
    return Ensemble.load(base, adapters)


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_every_step_is_charged_before_its_token_is_drawn_and_yielded(name: str) -> None:
    spy = Spy(MECHANISMS[name])
    accountant = LoggedAccountant(spy.log)
    steps = stream(
        FakeEnsemble(),  # type: ignore[arg-type]
        spy,
        PROMPT,
        max_new_tokens=3,
        rng=SeededRandom(0),
        accountant=accountant,
    )
    for step in range(3):
        tokens = next(steps)
        assert [phase for phase, _ in spy.log] == ["propose", "events", "charge", "release"]
        assert torch.equal(tokens, spy.log[-1][1])
        assert accountant.queries == 3 * (step + 1)
        spy.log.clear()
    assert next(steps, None) is None
    assert spy.log == []


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_a_refused_charge_stops_the_token(name: str) -> None:
    spy = Spy(MECHANISMS[name])
    accountant = LoggedAccountant(spy.log, limit=2)
    steps = stream(
        FakeEnsemble(),  # type: ignore[arg-type]
        spy,
        PROMPT,
        max_new_tokens=5,
        rng=SeededRandom(0),
        accountant=accountant,
    )
    assert len([next(steps), next(steps)]) == 2
    with pytest.raises(RuntimeError, match="the budget is spent"):
        next(steps)
    assert [phase for phase, _ in spy.log].count("release") == 2
    assert accountant.queries == 6
    assert next(steps, None) is None


def test_ended_sequences_are_neither_charged_nor_sampled() -> None:
    ensemble = FakeEnsemble()
    # Row 1 ends at step 0, row 0 at step 2; row 2 goes on. Token 6 stops.
    spy = Spy(MECHANISMS["adapmixed"], forced=((1, 6, 2), (3, 4), (6, 5), (0,)))
    accountant = Accountant(1e-5)
    tokens = run(ensemble, spy, max_new_tokens=5, stop_token=6, accountant=accountant)
    assert tokens[:, :4].tolist() == [[1, 3, 6, -1], [6, -1, -1, -1], [2, 4, 5, 0]]
    assert tokens[:2, 4].tolist() == [-1, -1] and tokens[2, 4] >= 0
    asked = [logits for phase, logits in spy.log if phase == "propose"]
    assert [public.shape[0] for _, public in asked] == [3, 2, 2, 1, 1]
    # The stop tokens are charged, what follows them is not.
    assert accountant.queries == 3 + 2 + 2 + 1 + 1
    # The rows that remain are those that go on, each with its own past.
    sequences = torch.cat([PROMPT, tokens.clamp_min(0)], dim=1)
    for step, rows in enumerate(([0, 1, 2], [0, 2], [0, 2], [2], [2])):
        private, public = ensemble.logits(sequences[rows, : 3 + step])
        assert torch.equal(asked[step][1], public[:, -1])
        assert torch.equal(asked[step][0], private[:, :, -1])


def test_ended_sequences_leave_the_forward_pass(ensemble: Ensemble) -> None:
    """The rows that remain read on from caches of their own, padding included."""
    prompt, mask = torch.tensor([[0, 9], [5, 6], [0, 7]]), torch.tensor([[0, 1], [1, 1], [0, 1]])
    # Row 1 ends at step 1, row 0 at step 2.
    spy = Spy(PublicOnly(), forced=((1, 2, 3), (4, 60, 5), (60, 6), (7,), (8,)))
    tokens = run(ensemble, spy, prompt, attention_mask=mask, max_new_tokens=5, stop_token=60)
    assert tokens.tolist() == [[1, 4, 60, -1, -1], [2, 60, -1, -1, -1], [3, 5, 6, 7, 8]]
    asked = [logits for phase, logits in spy.log if phase == "propose"]
    for step, rows in enumerate(([0, 1, 2], [0, 1, 2], [0, 2], [2], [2])):
        ids = torch.cat([prompt, tokens], dim=1)[rows, : 2 + step]
        seen = torch.cat([mask[rows], torch.ones(len(rows), step, dtype=torch.int64)], dim=1)
        private, public = ensemble.logits(ids, seen)
        torch.testing.assert_close(asked[step][1], public[:, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(asked[step][0], private[:, :, -1], rtol=1e-4, atol=1e-4)


def test_decoding_stops_when_all_sequences_have_ended() -> None:
    spy = Spy(PublicOnly(), forced=((6, 1, 6), (6,)))
    accountant = Accountant(1e-5)
    tokens = run(FakeEnsemble(), spy, max_new_tokens=9, stop_token=6, accountant=accountant)
    assert tokens.tolist() == [[6, -1], [1, 6], [6, -1]]
    assert accountant.queries == 4


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    tokens = run(FakeEnsemble(), Spy(PublicOnly(), forced=((1, 1, 1),) * 4), stop_token=3)
    assert tokens.tolist() == [[1] * 4] * 3


@pytest.mark.parametrize("value", [0, -3, True])
def test_max_new_tokens_must_be_positive(value: Any) -> None:
    accountant = Accountant(1e-5)
    with pytest.raises(ValueError, match=f"max_new_tokens must be an integer >= 1, got {value}"):
        run(FakeEnsemble(), PublicOnly(), max_new_tokens=value, accountant=accountant)
    assert accountant.queries == 0


def test_window() -> None:
    """The last token is never read back: a window of 8 holds a prompt of 3 and 6 new tokens."""
    ensemble = FakeEnsemble(max_positions=8)
    accountant = Accountant(1e-5)
    assert run(ensemble, PublicOnly(), max_new_tokens=6, accountant=accountant).shape == (3, 6)
    assert ensemble.decoders[0].ids.shape == (3, 8)
    with pytest.raises(
        ValueError,
        match=r"max_new_tokens must be <= 6 after a prompt of 3 tokens .*window is 8.*got 7",
    ):
        run(ensemble, PublicOnly(), max_new_tokens=7, accountant=accountant)
    assert accountant.queries == 18  # refused before anything is charged
    endless = FakeEnsemble(max_positions=None)
    assert run(endless, PublicOnly(), max_new_tokens=7).shape == (3, 7)


def test_window_of_a_real_model(ensemble: Ensemble) -> None:
    prompt = torch.arange(POSITIONS - 3)[None]
    assert run(ensemble, PublicOnly(), prompt, max_new_tokens=4).shape == (1, 4)
    with pytest.raises(ValueError, match="max_new_tokens must be <= 4"):
        run(ensemble, PublicOnly(), prompt, max_new_tokens=5)


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_seeded_decoding_repeats_bit_by_bit(name: str, ensemble: Ensemble) -> None:
    prompt = PROMPT + 7
    runs = [run(ensemble, MECHANISMS[name], prompt, rng=SeededRandom(s)) for s in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert bool(((runs[0] >= 0) & (runs[0] < VOCAB)).all())


def test_a_row_of_a_batch_draws_as_it_does_alone() -> None:
    """From the same seed the first row of a batch is a batch of one."""
    ensemble = FakeEnsemble()
    together = run(ensemble, PublicOnly(), max_new_tokens=6)
    assert torch.equal(together[:1], run(ensemble, PublicOnly(), PROMPT[:1], max_new_tokens=6))


def test_models_read_what_was_released(ensemble: Ensemble) -> None:
    """Every step asks for the logits after the prompt and the released tokens of its own row."""
    prompt = PROMPT + 7
    spy = Spy(PublicOnly())
    tokens = run(ensemble, spy, prompt, max_new_tokens=6)
    private, public = ensemble.logits(torch.cat([prompt, tokens], dim=1))
    asked = [logits for phase, logits in spy.log if phase == "propose"]
    for step, (private_seen, public_seen) in enumerate(asked):
        torch.testing.assert_close(public_seen, public[:, 2 + step], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(private_seen, private[:, :, 2 + step], rtol=1e-4, atol=1e-4)


def test_left_padding_changes_nothing(ensemble: Ensemble) -> None:
    short, padded = torch.tensor([[9, 11]]), torch.tensor([[0, 0, 9, 11], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    spy = Spy(PublicOnly(), forced=((3, 1), (4, 1), (5, 1), (9, 2)))
    alone = Spy(PublicOnly(), forced=((3,), (4,), (5,), (9,)))
    run(ensemble, spy, padded, attention_mask=mask)
    run(ensemble, alone, short)
    seen = [x for phase, x in spy.log if phase == "propose"]
    expected = [x for phase, x in alone.log if phase == "propose"]
    for (private, public), (private_alone, public_alone) in zip(seen, expected, strict=True):
        torch.testing.assert_close(public[:1], public_alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(private[:, :1], private_alone, rtol=1e-4, atol=1e-4)


def test_first_tokens_of_many_copies_follow_the_public_law() -> None:
    ensemble, copies = FakeEnsemble(), 4000
    prompt = PROMPT[:1].repeat(copies, 1)
    tokens = run(ensemble, PublicOnly(), prompt, max_new_tokens=1)[:, 0]
    law = torch.softmax(ensemble.logits(PROMPT[:1])[1][0, -1].double(), -1)
    counts = torch.bincount(tokens, minlength=7).double()
    statistic = float(((counts - copies * law) ** 2 / (copies * law)).sum())
    assert statistic < 6 + 4 * (12**0.5)  # 6 degrees of freedom


def test_total_of_a_stream_is_the_sum_of_its_steps() -> None:
    """Screening for every query, and the realised losses of every model over all steps."""
    ensemble, spy = FakeEnsemble(), Spy(MECHANISMS["adapmixed"])
    accountant = Accountant(1e-5)
    run(ensemble, spy, max_new_tokens=20, accountant=accountant)
    assert accountant.queries == 60
    again = Accountant(1e-5)
    rng = SeededRandom(0)
    for phase, logits in spy.log:
        if phase == "propose":
            proposal = spy.inner.propose(*logits, rng=rng)
            again.add(proposal.events())
            proposal.release()
    assert again.epsilon() == accountant.epsilon()
    expected = 60 * 3.0 * (0.5 / (3 * 0.05)) ** 2
    assert accountant.breakdown()["screening"] == pytest.approx(expected)


def test_stream_and_generate_agree() -> None:
    ensemble = FakeEnsemble()
    whole = run(ensemble, MECHANISMS["adapmixed"], max_new_tokens=5)
    steps = stream(
        ensemble,  # type: ignore[arg-type]
        MECHANISMS["adapmixed"],
        PROMPT,
        max_new_tokens=5,
        rng=SeededRandom(0),
        accountant=Accountant(1e-5),
    )
    assert torch.equal(torch.stack(list(steps), dim=1), whole)
    assert whole.dtype == torch.int64


def test_a_yielded_tensor_is_the_callers_own() -> None:
    """Writing into it must not change what the models read next."""
    ensemble = FakeEnsemble()
    plain = run(ensemble, PublicOnly(), max_new_tokens=5)
    steps = []
    for tokens in stream(
        ensemble,  # type: ignore[arg-type]
        PublicOnly(),
        PROMPT,
        max_new_tokens=5,
        rng=SeededRandom(0),
        accountant=Accountant(1e-5),
    ):
        steps.append(tokens.clone())
        tokens.fill_(0)
    assert torch.equal(torch.stack(steps, dim=1), plain)
