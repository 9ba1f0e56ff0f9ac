"""Logits of pretrained models and of adapters on them, against peft and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import adapted_layers, peft_logits, write_adapter
from torch import Tensor

from adapmixed import Ensemble

pytestmark = pytest.mark.real

TARGETS = {"head": ["lm_head"], "attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}
LENGTHS = (20, 7)
NEW = 3


@pytest.fixture(scope="module", params=TARGETS)
def members(
    request: pytest.FixtureRequest, base: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Return adapters of unequal ranks; with the first one peft saves the head that it adapts."""
    root, targets = tmp_path_factory.mktemp(request.param), TARGETS[request.param]
    settings = {"target_modules": targets, "std": 0.03}
    return [
        write_adapter(base, root / "0", seed=0, r=4, save_embedding_layers="auto", **settings),
        write_adapter(base, root / "1", seed=1, r=7, save_embedding_layers=False, **settings),
    ]


@pytest.fixture(scope="module")
def ensemble(folder: Path, members: list[Path]) -> Ensemble:
    return Ensemble.from_pretrained(folder, members, adapted=adapted_layers(members))


@pytest.fixture(scope="module")
def ids(base: Any, public: Ensemble) -> Tensor:
    """Return a text that is longer than the sliding window, if the model has one."""
    length = (getattr(base.config, "sliding_window", None) or 50) + 10
    text = "The Seine flows through Paris 🫨. " * 80
    return torch.tensor([public.tokenizer(text).input_ids[:length]])


def close(found: Tensor, expected: Tensor) -> None:
    spread = float(expected.amax() - expected.amin())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * spread)


def rows(private: Tensor, public: Tensor) -> Tensor:
    return torch.cat([public[None], private])


def test_members_answer_as_peft(
    ensemble: Ensemble, members: list[Path], base: Any, ids: Tensor
) -> None:
    ids = ids[:, :10].reshape(2, 5)
    private, public = ensemble.logits(ids)
    close(private, peft_logits(base, members, ids))
    with torch.no_grad():
        close(public, base(input_ids=ids).logits)
    assert float((private - public).abs().amax(dim=(1, 2, 3)).min()) > 0.1


def test_padded_batches_in_chunks_answer_as_single_passes(ensemble: Ensemble, ids: Tensor) -> None:
    singles = [rows(*ensemble.logits(ids[:, : length + NEW]))[:, 0] for length in LENGTHS]
    width = max(LENGTHS)
    padded, mask = torch.full((2, width), 5), torch.zeros(2, width, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        padded[row, width - length :], mask[row, width - length :] = ids[0, :length], 1
    whole = rows(*ensemble.forward(padded, mask, None)[:2])
    decoder = ensemble.decoder(padded, attention_mask=mask, new_tokens=NEW, unread=True)
    while decoder.unread:
        decoder.read(8)
    for step in range(NEW):
        logits = rows(*decoder.logits[:2])
        for row, length in enumerate(LENGTHS):
            close(whole[:, row, width - length :], singles[row][:, :length])
            close(logits[:, row], singles[row][:, length - 1 + step])
        decoder.append(ids[0, torch.tensor(LENGTHS) + step])


def test_a_prompt_longer_than_the_sliding_window(
    ensemble: Ensemble, members: list[Path], base: Any, ids: Tensor
) -> None:
    decoder = ensemble.decoder(ids[:, :-1], memory_bytes=4 << 30, new_tokens=1, unread=True)
    while decoder.unread:
        decoder.read(ids.shape[1] // 3)
    decoder.append(ids[:, -1])
    private, public, _ = decoder.logits
    close(private[:1], peft_logits(base, members[:1], ids, logits_to_keep=1)[:, :, -1])
    with torch.no_grad():
        close(public, base(input_ids=ids, logits_to_keep=1).logits[:, -1])
