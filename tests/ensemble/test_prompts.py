"""Prompts as members: each row is its prompt alone, and no record moves a bit of another row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import around, tokenizer

from adapmixed import Accountant, ClippedLogPool
from adapmixed.ensemble.prompts import PromptEnsemble
from adapmixed.generation import PrivateGenerator
from adapmixed.rng import SeededRandom

RECORDS = ["w5 w6 w7", "w9 w10 w11 w12 w13 w14 w15 w16", None, "w3"]
LONGEST = 6
FAMILIES = ("gpt2", "llama", "gemma3_text")


def words() -> Any:
    """Return a tokenizer whose texts begin with BOS."""
    return around(tokenizer([59, *range(59), 60, 70], eos_token="w60"), 0)


def model_of(family: str) -> Any:
    window = {"sliding_window": 24} if family == "gemma3_text" else {}
    return tiny(family, max_position_embeddings=64, n_positions=64, **window)


def prompts(model: Any, records: Any = RECORDS, **settings: Any) -> PromptEnsemble:
    """Return members with these records; a text is described by the words 20 and 21."""
    options: dict[str, Any] = {"longest": LONGEST, "plain": True, "tokenizer": words()} | settings
    return PromptEnsemble(model, "w20 w21", records=len(records), **options).filled(records)


def alone(model: Any, record: str | None, tail: list[int]) -> torch.Tensor:
    """Return the logits behind one prompt that is written out, without padding."""
    asked = [20, 21, 59]  # "w20 w21:", of which the last token is not known
    shown = [] if record is None else [int(word[1:]) for word in record.split()][:LONGEST]
    ids = [0, *(asked if shown else []), *shown, *asked, *tail]
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return found


def expect(ensemble: PromptEnsemble, model: Any, decoder: Any, tails: list[list[int]]) -> None:
    private, public, _ = decoder.logits
    for b, tail in enumerate(tails):
        torch.testing.assert_close(public[b], alone(model, None, tail), rtol=0, atol=2e-5)
        for i, record in enumerate(RECORDS):
            exact = alone(model, record, tail)
            torch.testing.assert_close(private[i, b], exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_member_is_its_prompt_alone(family: str) -> None:
    """Read in one pass and in parts, while sequences join, are padded and leave."""
    model = model_of(family)
    ensemble = prompts(model)
    assert ensemble.cut == 1 and ensemble.opening == [20, 21, 59]
    start = torch.tensor([ensemble.opening])
    decoder = ensemble.decoder(start.repeat(2, 1), new_tokens=4, unread=True)
    decoder.read(2)
    left = ensemble.decoder(start.repeat(2, 1), new_tokens=1, unread=True)
    left.read(1)
    left.drop(torch.tensor([True, False]))
    for reader, tails in ((decoder, [[], []]), (left, [[]])):
        reader.read()
        expect(ensemble, model, reader, tails)
    decoder.append(torch.tensor([7, 30]))
    expect(ensemble, model, decoder, [[7], [30]])
    later = ensemble.decoder(start, new_tokens=4)
    decoder.join(later)
    decoder.append(torch.tensor([8, 31, 40]))
    expect(ensemble, model, decoder, [[7, 8], [30, 31], [40]])
    decoder.drop(torch.tensor([True, True, False]))
    decoder.append(torch.tensor([41]))
    expect(ensemble, model, decoder, [[40, 41]])
    private, public = ensemble.logits(start)
    torch.testing.assert_close(public[0, -1], alone(model, None, []), rtol=0, atol=2e-5)
    torch.testing.assert_close(private[0, 0, -1], alone(model, RECORDS[0], []), rtol=0, atol=2e-5)


@pytest.mark.parametrize("active", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_record_moves_a_bit_of_another_member(
    family: str, dtype: torch.dtype, active: int | None
) -> None:
    model = model_of(family).to(dtype)
    ensemble = prompts(model)
    ids = torch.tensor([ensemble.opening, [4, 5, 6]])
    before = ensemble.decoder(ids, active=active).logits
    assert torch.equal(
        before.private[2],
        before.public if active is None else before.public.gather(1, before.tokens),
    )
    for records in ([RECORDS[0], None, "w8", None], [RECORDS[0], "w2", *RECORDS[:2]]):
        after = ensemble.filled(records).decoder(ids, active=active).logits
        assert torch.equal(before.public, after.public)
        assert torch.equal(before.private[0], after.private[0])
        assert not torch.equal(before.private[1], after.private[1])


def test_a_chat_template_is_split_where_the_record_stands() -> None:
    chat = words()
    chat.chat_template = "w50{% for m in messages %} {{ m.content }} {% endfor %}w51"
    ensemble = prompts(model_of("llama"), plain=False, tokenizer=chat)
    assert ensemble.opening[-1] == 51
    with pytest.raises(ValueError, match="base must have a chat template.*--plain"):
        prompts(model_of("llama"), plain=False)


def test_tokens_that_the_base_does_not_have_are_left_out_of_records() -> None:
    model = model_of("llama")
    ensembles = [prompts(model, [record]) for record in ("w5 w70 w6", "w5 w6")]
    ids = torch.tensor([ensembles[0].opening])
    assert ensembles[0].cut == 0
    assert torch.equal(*(ensemble.decoder(ids).logits.private for ensemble in ensembles))


def test_a_hub_name_counts_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = lambda *_: (model_of("llama"), words())  # noqa: E731
    monkeypatch.setattr("adapmixed.ensemble.prompts.load_base", loaded)
    ensembles = [prompts(base, ["w5"], tokenizer=None) for base in ("org/one", "org/other")]
    assert ensembles[0].fingerprint != ensembles[1].fingerprint


def test_answers_are_charged_for_one_record() -> None:
    ensemble = prompts(model_of("llama"), ["w5", "w6", "w7", "w8"] * 4)
    mechanism = ClippedLogPool(lower=0.0, upper=1.0, scale=2.0, queries=5)
    accountant = Accountant(1e-5)
    settings: Any = {"rng": SeededRandom(3), "active": 8}
    generator = PrivateGenerator(ensemble, mechanism, accountant, **settings)
    steps = generator.stream_tokens(torch.tensor([ensemble.opening]), max_new_tokens=5)
    assert len([*steps]) == 5 and accountant.guarantee().budget == 5
    with pytest.raises(ValueError, match="another ensemble"):
        PrivateGenerator(ensemble.filled(["w9"] * 16), mechanism, accountant, **settings)


def test_memory_counts_the_prompts_of_all_members() -> None:
    ensemble = prompts(model_of("llama"))
    start = torch.tensor([ensemble.opening])
    least = ensemble.sequence_bytes(3, new_tokens=2)
    ensemble.decoder(start, new_tokens=2, memory_bytes=least)
    with pytest.raises(ValueError, match="memory_bytes must be >="):
        ensemble.decoder(start, new_tokens=2, memory_bytes=least - 1)
    with pytest.raises(ValueError, match="memory_bytes must be >="):
        ensemble.iter_logits(start, memory_bytes=ensemble.cache_bytes(1, ensemble.begun))
    longer = prompts(model_of("llama"), longest=LONGEST + 4).sequence_bytes(3, new_tokens=2)
    # Four positions of keys and values of two heads of four, for five rows of two layers, of which
    # one counts twice; and a row of scores for each of four heads.
    assert longer - least == 4 * (3 * 5 * 2 * 2 * 4 * 4 + 5 * 4 * 4)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"records": []}, "records must be"),
        ({"records": ["w1", ""]}, "records must hold text"),
        ({"longest": 0}, "longest must be an integer >= 1"),
        ({"longest": 90}, "longest must .* window of 64 positions, got 90, with which .* take 97"),
        ({"tokenizer": None}, "base must have a tokenizer"),
    ],
)
def test_bad_arguments(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prompts(model_of("llama"), **change)
    with pytest.raises(ValueError, match="records must be 4, got 1"):
        prompts(model_of("llama")).filled(["w1"])
