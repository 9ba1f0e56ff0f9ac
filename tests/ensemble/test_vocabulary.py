"""Padded vocabularies, and adapter folders with their own tokenizer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered
from families import tiny
from tiny_models import VOCAB, write_adapter

from adapmixed.ensemble import Adapter, Ensemble
from adapmixed.mechanisms import Unprotected
from adapmixed.rng import SeededRandom

KNOWN = VOCAB - 7


def tokenizer(ids: list[int], lower: bool = False, **settings: Any) -> Any:
    """Return a tokenizer with one word for each of the ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in ids}, unk_token=f"w{ids[0]}"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


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
        (e.logits(prompt), e.decoder(prompt, attention_mask=mask).logits) for e in (plain, padded)
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


def test_a_tokenizer_wider_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=f"vocab_size = {VOCAB}, got {VOCAB}$"):
        Ensemble(tiny("gpt2"), [Adapter({})], tokenizer=tokenizer(list(range(VOCAB + 1))))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of a public model with its tokenizer, and of an adapter."""
    base = tiny("gpt2")
    base.save_pretrained(tmp_path / "base")
    tokenizer(list(range(KNOWN)), eos_token="w0").save_pretrained(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", seed=0, target_modules=["c_attn"])
    return tmp_path / "base", adapter


def test_an_equal_copy_of_the_tokenizer_is_accepted(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    own = tokenizer(list(range(KNOWN)), eos_token="w0", pad_token="w0")
    own("w1 w2", padding="max_length", max_length=5, truncation=True)  # these are stored, too
    own.save_pretrained(adapter)
    assert '"padding": null' not in (adapter / "tokenizer.json").read_text()
    assert Ensemble.from_pretrained(base, [adapter]).tokenizer is not None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (tokenizer(list(range(KNOWN + 1))), f"token 'w{KNOWN}' has id {KNOWN} there and None"),
        (tokenizer(list(range(KNOWN - 1))), f"it has {KNOWN - 1} tokens, the base {KNOWN}"),
        (tokenizer(list(range(KNOWN)), pad_token="[PAD]"), r"token '\[PAD\]'"),
        (tokenizer(list(range(VOCAB + 1))), f"reach {VOCAB}, but the base's vocab_size is {VOCAB}"),
        (tokenizer(list(range(KNOWN)), eos_token="w0", lower=True), "other rules cut text"),
    ],
)
def test_another_tokenizer_is_refused(folders: tuple[Path, Path], other: Any, reason: str) -> None:
    base, adapter = folders
    other.save_pretrained(adapter)
    with pytest.raises(ValueError, match=reason) as caught:
        Ensemble.from_pretrained(base, [adapter])
    assert str(adapter) in str(caught.value) and str(base) in str(caught.value)


def test_added_tokens_alone_are_compared(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    file = adapter / "added_tokens.json"
    file.write_text(json.dumps({"w3": 3}))
    Ensemble.from_pretrained(base, [adapter])
    for tokens, reason in (
        ({"<new>": KNOWN}, "'<new>' has id"),
        ({"<new>": VOCAB}, f"ids reach {VOCAB}"),
        ([1], "must map tokens to ids"),
    ):
        file.write_text(json.dumps(tokens))
        with pytest.raises(ValueError, match=reason):
            Ensemble.from_pretrained(base, [adapter])


def test_a_model_object_compares_the_range_of_ids(folders: tuple[Path, Path]) -> None:
    _, adapter = folders
    tokenizer(list(range(KNOWN - 1))).save_pretrained(adapter)
    Ensemble.from_pretrained(tiny("gpt2"), [adapter])
    tokenizer(list(range(VOCAB + 1))).save_pretrained(adapter)
    with pytest.raises(ValueError, match="ids reach"):
        Ensemble.from_pretrained(tiny("gpt2"), [adapter])


def test_a_damaged_tokenizer_is_refused(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    (adapter / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        Ensemble.from_pretrained(base, [adapter])
