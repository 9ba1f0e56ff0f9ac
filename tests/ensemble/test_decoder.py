"""Sequences that join and leave a decoder between tokens answer as each does alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import FAST
from families import linear_names, tiny
from tiny_models import POSITIONS, VOCAB, write_adapter

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.decoder import Decoder
from adapmixed.ensemble.support import TESTED
from adapmixed.text import left_padded

TOKENS = torch.randint(1, VOCAB, (6, POSITIONS), generator=torch.Generator().manual_seed(11))


def reads(ensemble: Ensemble, rows: list[int], lengths: list[int], new: int = 0) -> Decoder:
    """Return a decoder of the first tokens of some rows."""
    prompts = [TOKENS[row, :length].tolist() for row, length in zip(rows, lengths, strict=True)]
    ids, mask = left_padded(prompts)
    return ensemble.decoder(ids, attention_mask=mask, new_tokens=new)


def assert_alone(ensemble: Ensemble, decoder: Decoder, held: dict[int, int], rtol: float) -> None:
    """Check that the logits are those of every sequence alone; `held` maps rows to lengths."""
    for place, (row, length) in enumerate(held.items()):
        alone = ensemble.decoder(TOKENS[row : row + 1, :length])
        for found, expected in zip(decoder.logits[:2], alone.logits[:2], strict=True):
            atol = rtol * float(expected.abs().max())
            torch.testing.assert_close(found[..., place, :], expected[..., 0, :], rtol=0, atol=atol)


def append(decoder: Decoder, held: dict[int, int]) -> None:
    decoder.append(torch.stack([TOKENS[row, length] for row, length in held.items()]))
    for row in held:
        held[row] += 1


def drop(decoder: Decoder, held: dict[int, int], *rows: int) -> None:
    decoder.drop(torch.tensor([row in rows for row in held]))
    for row in rows:
        del held[row]


def lively(ensemble: Ensemble, rtol: float) -> None:
    """Let sequences join a longer and a shorter batch, leave, and join again."""
    held = {0: 9, 1: 3}
    decoder = reads(ensemble, [0, 1], [9, 3], new=8)
    append(decoder, held)
    assert_alone(ensemble, decoder, held, rtol)
    decoder.join(reads(ensemble, [2, 3], [2, 6], new=10))
    held |= {2: 2, 3: 6}
    append(decoder, held)
    assert_alone(ensemble, decoder, held, rtol)
    drop(decoder, held, 0)
    assert decoder.length == max(held.values())  # the padding that was left has gone
    append(decoder, held)
    assert_alone(ensemble, decoder, held, rtol)
    drop(decoder, held, 3, 2)
    decoder.join(reads(ensemble, [4], [12], new=3))
    held |= {4: 12}
    append(decoder, held)
    assert decoder.length == 13
    assert_alone(ensemble, decoder, held, rtol)
    for _ in range(5):
        append(decoder, held)
    drop(decoder, held, 4)
    append(decoder, held)
    assert_alone(ensemble, decoder, held, rtol)


FAMILIES = [
    pytest.param(name, (), "", dtype, marks=() if fast else pytest.mark.slow)
    for name in sorted(TESTED)
    for dtype, fast in ((torch.float32, name in FAST), (torch.bfloat16, name == "gpt2"))
    if name in FAST or dtype == torch.float32
]
TRUNKS = [
    ("gpt2", ("lm_head",), "all blocks", torch.float32),
    ("gpt2", ("h.1.attn.c_attn",), "the first 1 of 2", torch.float32),
    ("gpt2", ("c_attn",), "no block", torch.float32),
]


@pytest.mark.parametrize(("name", "modules", "trunk", "dtype"), [*FAMILIES, *TRUNKS])
def test_every_family_and_trunk(
    name: str, modules: tuple[str, ...], trunk: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base: Any = tiny(name).to(dtype)
    targets = list(modules) or linear_names(base)
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, target_modules=targets) for i in (1, 2)
    ]
    ensemble = Ensemble.from_pretrained(base, folders)
    assert str(ensemble.trunk).startswith(trunk)
    lively(ensemble, rtol=2e-5 if dtype == torch.float32 else 2.0**-4)


def test_room_is_reserved_for_those_who_are_left(
    base: Any, make_adapters: Callable[..., list[Path]]
) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    decoder, held = reads(ensemble, [0], [4], new=20), {0: 4}
    append(decoder, held)
    decoder.join(reads(ensemble, [1, 2], [6, 2], new=3))
    held |= {1: 6, 2: 2}
    assert decoder.window == 24
    append(decoder, held)
    drop(decoder, held, 0)
    assert decoder.window == 9
    append(decoder, held)
    blocks = [layer._blocks[0].shape[-2] for layer in decoder._cache.layers]
    assert set(blocks) == {9}
    drop(decoder, held, 1)
    assert decoder.window == 5


@pytest.mark.parametrize("leaves_at", [0, 2, 5, None])
def test_a_prompt_is_read_in_parts(
    base: Any, make_adapters: Callable[..., list[Path]], leaves_at: int | None
) -> None:
    """A sequence that leaves before all is read begins the reading of the others anew."""
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    held = {0: 9, 1: 4, 2: 6}
    ids, mask = left_padded([TOKENS[row, :length].tolist() for row, length in held.items()])
    decoder = ensemble.decoder(ids, attention_mask=mask, new_tokens=3, unread=True)
    if leaves_at is not None:
        decoder.read(leaves_at)
        drop(decoder, held, 0)
        assert (decoder.length, decoder.unread, decoder.window) == (6, 6, 9)
    for left in (9, 5, 1) if leaves_at is None else (6, 2):
        assert decoder.unread == left
        for call in (
            lambda: decoder.append(torch.tensor([1] * len(held))),
            lambda: decoder.join(ensemble.decoder(ids)),
            lambda: ensemble.decoder(ids).join(decoder),
        ):
            with pytest.raises(ValueError, match=rf"read\(\) must be called first: {left} posit"):
                call()
        decoder.read(4)
    assert_alone(ensemble, decoder, held, 1e-5)
    append(decoder, held)
    assert_alone(ensemble, decoder, held, 1e-5)
