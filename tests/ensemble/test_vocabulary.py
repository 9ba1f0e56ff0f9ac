"""Padded vocabularies, and adapter folders with their own tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered
from families import tiny
from tiny_models import VOCAB, around, tokenizer, write_adapter

from adapmixed import Accountant, PrivateGenerator
from adapmixed.commands.doctor import sharing
from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import Adapter
from adapmixed.mechanisms import ClippedLogPool, Unprotected
from adapmixed.rng import SeededRandom
from adapmixed.training import token_stream
from adapmixed.training.base import base_facts

KNOWN = VOCAB - 7
BEYOND = f"got {VOCAB} with vocab_size = {VOCAB}"


def added(known: int, *tokens: str, pad: str | None = None) -> Any:
    """Return the base's tokenizer with further tokens, as trainers leave it with an adapter."""
    made = tokenizer(list(range(known)), eos_token="w0")
    made.add_tokens(list(tokens))
    if pad is not None:
        made.add_special_tokens({"pad_token": pad})
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ids", [list(range(KNOWN)), [i for i in range(VOCAB) if i % 5 != 2]], ids=["tail", "holes"]
)
def test_ids_without_a_token_are_masked_in_every_row(dtype: torch.dtype, ids: list[int]) -> None:
    base = tiny("gpt2").to(dtype)
    names = ["transformer.h.0.attn.c_attn"]
    members = [Adapter({n: (torch.randn(16, 2), torch.randn(2, 48)) for n in names}), Adapter({})]
    plain = Ensemble(tiny("gpt2").to(dtype), members)
    padded = Ensemble(base, members, tokenizer=tokenizer(ids))
    prompt = torch.tensor([[3, 5, 8], [1, 0, 4]])
    missing = sorted(set(range(VOCAB)) - set(ids))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    outputs = [
        (one.logits(prompt), one.decoder(prompt, attention_mask=mask).logits[:2])
        for one in (plain, padded)
    ]
    for before, after in zip(*outputs, strict=True):
        for expected, found in zip(before, after, strict=True):
            assert torch.equal(found[..., ids], expected[..., ids])
            assert bool(expected.isfinite().all())
            assert bool((found[..., missing] == float("-inf")).all())
    assert torch.equal(outputs[1][0][0][1], outputs[1][0][1])


def test_ids_without_a_token_are_never_released() -> None:
    base = tiny("gpt2")
    with torch.no_grad():  # almost all of every model's probability is on the padding
        base.transformer.wte.weight[KNOWN:] = 30 * base.transformer.ln_f.bias
    prompt, members = torch.tensor([[3, 5, 8]]), [Adapter({})]
    released = []
    for known in (None, tokenizer(list(range(KNOWN)))):
        ensemble = Ensemble(copy.deepcopy(base), members, tokenizer=known)
        drawn = answered(ensemble, Unprotected(), prompt, rng=SeededRandom(1), max_new_tokens=12)
        released.append(int(drawn.max()))
    assert released[0] >= KNOWN > released[1]


def test_tokens_that_the_model_lacks_are_never_released_and_refused_in_prompts() -> None:
    """Google's Gemma 3 tokenizers have <image_soft_token>, one id beyond the text models."""
    wide = tokenizer(list(range(VOCAB + 1)))
    ensemble = Ensemble(tiny("gpt2"), [Adapter({})], tokenizer=wide)
    assert bool(ensemble.logits(torch.tensor([[3]]))[0].isfinite().all())
    accountant = Accountant(delta=1e-5, epsilon=1.0)
    generator = PrivateGenerator(ensemble, ClippedLogPool(-0.25, 0.5), accountant)
    reason = rf"tokens in \[0, {VOCAB}\), the base's vocab_size, got {VOCAB} \(w{VOCAB}\)"
    with pytest.raises(ValueError, match=reason):
        generator.generate(f"w3 w{VOCAB} w4", max_new_tokens=2)
    assert accountant.queries == 0
    assert token_stream(tokenizer([0, 1, VOCAB], eos_token="w0"), ["w1 w61 w1"], VOCAB) == [1, 1, 0]


@pytest.mark.parametrize(
    ("wide", "reason"),
    [
        (around(added(VOCAB + 1), VOCAB), f"begins a text, {BEYOND}"),
        (tokenizer(list(range(VOCAB + 1)), eos_token=f"w{VOCAB}"), f"end-of-text token.*{BEYOND}"),
        (None, r"\(eos_token\), got no tokenizer"),
    ],
)
def test_a_base_must_have_the_tokens_around_a_text(wide: Any, reason: str, tmp_path: Path) -> None:
    base = tiny("gpt2")
    base.save_pretrained(tmp_path)
    if wide is not None:
        wide.save_pretrained(tmp_path)
    for refuse in (sharing, base_facts):
        with pytest.raises(ValueError, match=reason):
            refuse(str(tmp_path))
    if reason.startswith("begins"):
        with pytest.raises(ValueError, match=reason):
            Ensemble(base, [Adapter({})], tokenizer=wide)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of a public model with its tokenizer, and of an adapter."""
    base = tiny("gpt2")
    base.save_pretrained(tmp_path / "base")
    tokenizer(list(range(KNOWN)), eos_token="w0").save_pretrained(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", seed=0, target_modules=["c_attn"])
    return tmp_path / "base", adapter


@pytest.mark.parametrize(
    ("of_base", "own"),
    [
        (added(KNOWN), added(KNOWN, pad="w0")),
        (added(KNOWN), added(KNOWN, pad="[PAD]")),
        (added(VOCAB), added(VOCAB, "[A]", pad="[B]")),
        (added(VOCAB, "[A]", pad="[B]"), added(VOCAB)),
    ],
)
def test_a_copy_that_cuts_text_alike_is_accepted(
    folders: tuple[Path, Path], of_base: Any, own: Any
) -> None:
    base, adapter = folders
    of_base.save_pretrained(base)
    own.padding_side = "left"
    own.backend_tokenizer.enable_padding(length=5)  # this is stored, too
    own.backend_tokenizer.enable_truncation(5)
    own.save_pretrained(adapter)
    assert Ensemble.from_pretrained(base, [adapter]).tokenizer is not None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (tokenizer(list(range(KNOWN + 1))), f"token 'w{KNOWN}' has id {KNOWN} there and None"),
        (
            tokenizer(list(range(KNOWN - 1))),
            f"token 'w{KNOWN - 1}' has id None there and {KNOWN - 1}",
        ),
        (tokenizer([*range(KNOWN), VOCAB], eos_token="w0"), "other rules cut text"),
        (added(KNOWN, "[NEW]"), r"token '\[NEW\]' has id 54 there and None in the base"),
        (tokenizer(list(range(KNOWN)), eos_token="w0", lower=True), "other rules cut text"),
    ],
)
def test_another_tokenizer_is_refused(folders: tuple[Path, Path], other: Any, reason: str) -> None:
    base, adapter = folders
    other.save_pretrained(adapter)
    with pytest.raises(ValueError, match=reason) as caught:
        Ensemble.from_pretrained(base, [adapter])
    assert str(adapter) in str(caught.value) and str(base) in str(caught.value)


def test_added_tokens_without_a_tokenizer_are_compared(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    added_tokens = adapter / "added_tokens.json"
    added_tokens.write_text('{"w1": 1}', encoding="utf-8")
    assert Ensemble.from_pretrained(base, [adapter]).tokenizer is not None
    added_tokens.write_text('{"[NEW]": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"token '\[NEW\]' has id 1 there and None in the base"):
        Ensemble.from_pretrained(base, [adapter])
