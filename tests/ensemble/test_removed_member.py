"""Removing a member changes no shape, batch, error or bit of another member's logits.

Neighbours have the same N, since `ensemble.json` has null in place of the member. Matrix libraries
round by the shapes of their operands, and by the place of a number in them. Here hooks scale what a
block returns by the number of rows, and a member's logits by its place. So each test has a control
that fails on any processor: the ensemble of N - 1 members.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import VOCAB, adapted_layers, write_adapter
from torch import Tensor

from adapmixed import Accountant, PrivateGenerator
from adapmixed.data import demo_base
from adapmixed.ensemble import Ensemble, Manifest, write_manifest
from adapmixed.ensemble.public_model import load_base
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.rng import SeededRandom

WHOLE = ("m0", "m1", "m2", "empty")
REMOVED = ("m0", None, "m2", "empty")
ALL_BUT_EMPTY = ("m0", "m1", "m2", None)
FEW = (None, None, "m2", None)
ANOTHER_N = ("m0", "m2", "empty")

Members = Sequence[str | None]


def write_members(base: Any, folder: Path, **settings: Any) -> None:
    """Write three members, one of another rank, and one that was trained on nothing."""
    for seed, name in enumerate(("m0", "m1", "m2", "empty")):
        rank: dict[str, Any] = dict.fromkeys(("r", "lora_alpha"), 5 if name == "m1" else 3)
        write_adapter(base, folder / name, seed=seed, zero=name == "empty", **rank, **settings)


def load(base: Any, folder: Path, members: Members, **settings: Any) -> Ensemble:
    """Return an ensemble of these members, with the same adapted layers for every choice."""
    layers = adapted_layers([folder / name for name in ("m0", "m1")])
    write_manifest(folder, Manifest("tiny", tuple(members), layers))
    return Ensemble.from_pretrained(base, folder, **settings)


@pytest.fixture(scope="module")
def tiny_members(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder, base = tmp_path_factory.mktemp("members"), tiny("gpt2")
    write_members(base, folder, target_modules=["c_attn", "c_proj", "c_fc"])
    return base, folder


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def of(request: Any, tiny_members: tuple[Any, Path]) -> Any:
    """Return a function from members to their ensemble, which rounds by rows and places."""
    base, folder = tiny_members
    dtype = request.param
    step = torch.finfo(dtype).eps

    def by_rows(module: Any, arguments: Any, output: Tensor) -> Tensor:
        return output * (1 + len(output) * step)

    def loaded(members: Members) -> Ensemble:
        ensemble = load(base, folder, members, dtype=dtype)

        def by_places(module: Any, arguments: Any, output: Tensor) -> None:
            columns = output[..., VOCAB:].view(*output.shape[:-1], len(members), -1)
            columns *= 1 + step * torch.arange(2, len(members) + 2)[:, None]

        ensemble.model.get_submodule("transformer.h.1.mlp").register_forward_hook(by_rows)
        ensemble.output_layer.register_forward_hook(by_places)
        return ensemble

    return loaded


def every_way(ensemble: Ensemble) -> list[Tensor]:
    """Return logits (N + 1, ...) of whole passes, chunks, and decoding after padded prompts."""
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    memory = ensemble.sequence_bytes(14) * 3
    answers = [ensemble.logits(ids), ensemble.logits(ids[:1])]
    chunks = list(ensemble.iter_logits(ids, memory_bytes=memory))
    assert len(chunks) > 1
    answers += [(private, public) for _, private, public, _ in chunks]
    decoder = ensemble.decoder(ids, attention_mask=mask, memory_bytes=memory, new_tokens=5)
    for step in range(5):
        answers.append(decoder.logits[:2])
        if step == 3:
            decoder.drop(torch.tensor([True, False]))
        decoder.append(torch.full((2 if step < 3 else 1,), step + 1))
    return [torch.cat([public[None], private]) for private, public in answers]


def test_a_removed_member_moves_no_bit_of_the_others(of: Any) -> None:
    """Its own row becomes the public one. To remove an empty member changes nothing."""
    every = [every_way(of(members)) for members in (WHOLE, REMOVED, ALL_BUT_EMPTY, ANOTHER_N)]
    for whole, removed, same, fewer in zip(*every, strict=True):
        assert torch.equal(whole[[0, 1, 3, 4]], removed[[0, 1, 3, 4]])
        assert torch.equal(removed[2], removed[0]) and not torch.equal(whole[2], removed[2])
        assert torch.equal(whole, same) and torch.equal(whole[4], whole[0])
        for row in (0, 1):
            assert not torch.equal(whole[row], fewer[row])  # the control


@pytest.fixture(scope="module")
def with_a_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from members to their ensemble on the demonstration's public model."""
    folder = tmp_path_factory.mktemp("demo-members")
    write_members(load_base(demo_base(), None)[0], folder, target_modules=["c_attn", "lm_head"])
    return partial(load, demo_base(), folder)


def public_shapes(ensemble: Ensemble) -> list[Any]:
    """Return batches, chunks, bytes, and the errors about memory."""
    mechanism = ClippedLogPool(-0.25, 0.5, queries=10**6)
    prompt = "the function returns a list of values "

    def answer_bytes(rows: int, vocab: int, element: int, _active: int | None) -> int:
        return 32 * vocab

    bounds: list[Any] = []
    for length in (1, 40, 100):
        need = ensemble.sequence_bytes(length, new_tokens=8, answer_bytes=answer_bytes)
        chunk = partial(ensemble.chunk_size, 1, length, answer_bytes=answer_bytes)
        bounds += [need, chunk(3 * need, last_only=True), chunk(3 * need, last_only=False)]
        for memory in (need - 1, 1):
            with pytest.raises(ValueError, match="memory_bytes must be >=") as error:
                ensemble.decoder(
                    torch.ones(1, length, dtype=torch.int64),
                    memory_bytes=memory, new_tokens=8, answer_bytes=answer_bytes,
                )  # fmt: skip
            bounds.append(str(error.value))
        generator = PrivateGenerator(
            ensemble, mechanism, Accountant(1e-5), memory_bytes=20 * need, rng=SeededRandom(0)
        )
        prompts = [prompt * repeats for repeats in (1, 4, 2, 9) * 10]
        bounds.append([len(batch) for batch in generator.batches(prompts, 8)])
    return bounds


def test_shapes_batches_and_errors_do_not_tell_who_is_missing(with_a_tokenizer: Any) -> None:
    whole, removed, few, fewer = (
        public_shapes(with_a_tokenizer(members)) for members in (WHOLE, REMOVED, FEW, ANOTHER_N)
    )
    assert whole == removed == few
    assert whole[0] != fewer[0] and whole[3:5] != fewer[3:5]  # the control
