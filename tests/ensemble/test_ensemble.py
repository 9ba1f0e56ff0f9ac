"""An ensemble's model, memory, limits and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import Make
from families import tiny
from tiny_models import POSITIONS, VOCAB, adapted_layers, write_adapter

from adapmixed.ensemble import Ensemble


def test_given_model_is_left_alone_and_dropout_is_off(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    base.train()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    first, second = ensemble.logits(ids), ensemble.logits(ids)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert base.training and all(p.requires_grad for p in base.parameters())
    after = base.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_memory_bounds_the_logits_and_what_is_needed_is_named(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(3))
    with pytest.raises(ValueError, match="memory_bytes must be >= ") as short:
        ensemble.iter_logits(ids, memory_bytes=1)
    needed = int(str(short.value).split(">= ")[1].split()[0])
    with pytest.raises(ValueError, match=f"memory_bytes must be >= {needed} "):
        ensemble.iter_logits(ids, memory_bytes=needed - 1)
    for limit in (needed, 2 * needed, 4 * needed):
        stop = 0
        for part, private, public, _ in ensemble.iter_logits(ids, memory_bytes=limit):
            assert (private.numel() + public.numel()) * 4 <= limit
            assert part == slice(stop, stop + public.shape[1])
            stop = part.stop
        assert stop == ids.shape[1]


def test_input_limits(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(1))
    long = torch.zeros((1, POSITIONS + 1), dtype=torch.int64)
    for call in (ensemble.logits, ensemble.iter_logits, ensemble.decoder):
        with pytest.raises(ValueError, match=f"max_positions = {POSITIONS}"):
            call(long)
    decoder = ensemble.decoder(long[:, :-1])
    before = decoder.logits
    with pytest.raises(ValueError, match="max_positions"):
        decoder.append(torch.tensor([1]))
    assert decoder.length == POSITIONS and torch.equal(decoder.logits[1], before[1])
    with pytest.raises(ValueError, match=r"tokens must have shape \(1,\)"):
        decoder.append(torch.tensor([1, 2]))
    for bad, reason in [
        (ids[0], "shape"),
        (ids[:, :0], "shape"),
        (ids.float(), "int64"),
        (ids + VOCAB, "must lie in"),
        (ids - VOCAB, "must lie in"),
    ]:
        with pytest.raises(ValueError, match=reason):
            ensemble.logits(bad)
    mask = torch.ones_like(ids)
    holes = [mask.clone() for _ in range(2)]
    holes[0][0, -1] = holes[1][0, 3] = 0
    for bad_mask in (mask[:, 1:], mask[0], 2 * mask, 0 * mask, -mask, *holes):
        with pytest.raises(ValueError, match="attention_mask must have the shape .* 0s before 1s"):
            ensemble.decoder(ids, attention_mask=bad_mask)


def test_logits_that_somebody_keeps_stay_as_they_are(tmp_path: Path) -> None:
    """The memory is used again unless a view or an array over it is held."""
    base = tiny("gpt2")
    folder = write_adapter(base, tmp_path / "a", seed=0, target_modules=["lm_head"])
    ensemble = Ensemble.from_pretrained(base, [folder])
    decoder = ensemble.decoder(torch.tensor([[1, 2, 3]]), new_tokens=4)
    place = decoder.logits[0].data_ptr()
    decoder.append(torch.tensor([4]))
    assert decoder.logits[0].data_ptr() == place
    kept, copied = decoder.logits[0][0].numpy(), decoder.logits[0][0].clone()
    decoder.append(torch.tensor([5]))
    assert decoder.logits[0].data_ptr() != place
    assert (kept == copied.numpy()).all() and not torch.equal(decoder.logits[0][0], copied)


def test_threads_share_an_ensemble(tmp_path: Path) -> None:
    base, names = tiny("llama"), ["lm_head", "1.mlp.up_proj"]
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, target_modules=targets)
        for i, targets in enumerate((names[:1], names[1:], names))
    ]
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randint(1, VOCAB, (size, 4 + size), generator=generator) for size in (1, 2, 3)]
    expected = [ensemble.logits(ids)[0] for ids in inputs]

    def asks(number: int) -> bool:
        answers = [ensemble.logits(inputs[number])[0] for _ in range(40)]
        return all(torch.equal(answer, expected[number]) for answer in answers)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(asks, range(3)))
