"""Removing a member changes no shape, batch, error or bit of another member's logits.

Neighbours have the same N, since `ensemble.json` has null in place of the member. Matrix libraries
round by the shapes of their operands. Here a hook scales every logit by the number of rows. So each
test has a control that fails on any processor: the ensemble of N - 1 members.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import individual, settled, stated
from families import tiny
from tiny_models import VOCAB, adapted_layers, write_adapter
from torch import Tensor

from adapmixed import Accountant, PrivateGenerator
from adapmixed.data import demo_base
from adapmixed.ensemble import Ensemble, Manifest, write_manifest
from adapmixed.ensemble.public_model import load_base
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.privacy import LeaveOneOutLoss
from adapmixed.privacy.costs import sound_bound
from adapmixed.rng import SeededRandom

DELTA, ORDER = 1e-5, 4.0
MECHANISMS: list[Mechanism] = [
    ClippedLogPool(-0.25, 0.5, 2.0),
    ClippedMixing(0.6, 1.7, order=ORDER),
    PMixED(8.0, DELTA, 20, ORDER),
    AdaPMixED(ORDER, 0.05, screen=None),
]
WHOLE = ("m0", "m1", "m2", "empty")
REMOVED = ("m0", None, "m2", "empty")
FEW = (None, None, "m2", None)
ANOTHER_N = ("m0", "m2", "empty")

Members = Sequence[str | None]


def write_members(base: Any, folder: Path, **settings: Any) -> None:
    """Write three members, one of another rank, and one that was trained on nothing."""
    for seed, name in enumerate(("m0", "m1", "m2", "empty")):
        rank = 5 if name == "m1" else 3
        write_adapter(
            base,
            folder / name,
            seed=seed,
            r=rank,
            lora_alpha=rank,
            zero=name == "empty",
            **settings,
        )


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
    """Return a function from members to their ensemble, whose logits depend on the row count."""
    base, folder = tiny_members
    dtype = request.param

    def round_by_rows(module: Any, arguments: Any, output: Tensor) -> Tensor:
        return output * (1 + len(output) * torch.finfo(dtype).eps)

    def loaded(members: Members) -> Ensemble:
        ensemble = load(base, folder, members, dtype=dtype)
        head = ensemble.model.get_output_embeddings()
        head.register_forward_hook(round_by_rows)
        return ensemble

    return loaded


def every_way(ensemble: Ensemble) -> list[Tensor]:
    """Return logits (N + 1, ...) of whole passes, chunks, and decoding after padded prompts."""
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    memory = ensemble.sequence_bytes(14) * 3
    found = [ensemble.logits(ids), ensemble.logits(ids[:1])]
    chunks = list(ensemble.iter_logits(ids, memory_bytes=memory))
    assert len(chunks) > 1
    found += [(private, public) for _, private, public, _ in chunks]
    decoder = ensemble.decoder(ids, attention_mask=mask, memory_bytes=memory, new_tokens=5)
    for step in range(5):
        found.append(decoder.logits[:2])
        if step == 3:
            decoder.drop(torch.tensor([True, False]))
        decoder.append(torch.full((2 if step < 3 else 1,), step + 1))
    return [torch.cat([public[None], private]) for private, public in found]


def test_a_removed_member_moves_no_bit_of_the_others(of: Any) -> None:
    """The removed member's own row becomes the public one."""
    whole, removed = (every_way(of(members)) for members in (WHOLE, REMOVED))
    assert len(whole) == len(removed)
    for here, there in zip(whole, removed, strict=True):
        assert torch.equal(here[[0, 1, 3, 4]], there[[0, 1, 3, 4]])
        assert torch.equal(there[2], there[0]) and not torch.equal(here[2], there[2])


def distribution(ensemble: Ensemble, mechanism: Mechanism) -> tuple[Tensor, Any]:
    ids = torch.randint(1, VOCAB, (6, 9), generator=torch.Generator().manual_seed(3))
    proposal = mechanism.propose(*ensemble.decoder(ids).logits[:2], rng=SeededRandom(1))
    return settled(proposal)._distribution.probabilities(), proposal


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda one: one.name)
def test_a_removed_member_that_was_empty_changes_no_probability(
    mechanism: Mechanism, of: Any
) -> None:
    """Removing such a member costs nothing, so it must change nothing."""
    here, _ = distribution(of(WHOLE), mechanism)
    there, _ = distribution(of(("m0", "m1", "m2", None)), mechanism)
    assert torch.equal(here, there)
    control, _ = distribution(of(("m0", "m1", "m2")), mechanism)
    assert not torch.equal(here, control)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return (B,) D_ORDER of normalised rows, the larger of both directions."""
    p, q = (one.double() / one.double().sum(-1, keepdim=True) for one in (p, q))
    ways = [(a**ORDER * b ** (1 - ORDER)).sum(-1).log() / (ORDER - 1) for a, b in ((p, q), (q, p))]
    return torch.maximum(*ways)


def cost(mechanism: Mechanism, proposal: Any) -> Tensor:
    """Return the charge for removing the second member at ORDER, (B,) or ()."""
    if isinstance(mechanism, AdaPMixED):
        (event,) = (one for one in stated(proposal) if isinstance(one, LeaveOneOutLoss))
        return torch.from_numpy(event.loss[1, :, 0].copy())
    if isinstance(mechanism, PMixED):
        return torch.tensor(sound_bound(ORDER, mechanism.radius(4), 4))
    charges = torch.from_numpy(individual(proposal)[1])
    return ORDER * charges if mechanism.measure == ("zcdp", None) else charges


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda one: one.name)
def test_the_removal_of_a_member_costs_no_more_than_its_charge(
    mechanism: Mechanism, of: Any
) -> None:
    here, proposal = distribution(of(WHOLE), mechanism)
    there, _ = distribution(of(REMOVED), mechanism)
    true, charged = divergence(here, there), cost(mechanism, proposal)
    assert (true > 0).all()
    assert (true <= charged + 1e-14).all()  # 1e-14 for the divergence's rounding


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
        return mechanism.answer_bytes(vocab)

    found: list[Any] = []
    for length in (1, 40, 100):
        need = ensemble.sequence_bytes(length, new_tokens=8, answer_bytes=answer_bytes)
        chunk = partial(ensemble.chunk_size, 1, length, answer_bytes=answer_bytes)
        found += [need, chunk(3 * need, last_only=True), chunk(3 * need, last_only=False)]
        for memory in (need - 1, 1):
            with pytest.raises(ValueError, match="memory_bytes must be >=") as error:
                ensemble.decoder(
                    torch.ones(1, length, dtype=torch.int64),
                    memory_bytes=memory, new_tokens=8, answer_bytes=answer_bytes,
                )  # fmt: skip
            found.append(str(error.value))
        generator = PrivateGenerator(
            ensemble, mechanism, Accountant(DELTA), memory_bytes=20 * need, rng=SeededRandom(0)
        )
        prompts = [prompt * repeats for repeats in (1, 4, 2, 9) * 10]
        found.append([len(batch) for batch in generator.batches(prompts, 8)])
    return found


def test_shapes_batches_and_errors_do_not_tell_who_is_missing(with_a_tokenizer: Any) -> None:
    whole, removed, few, fewer = (
        public_shapes(with_a_tokenizer(members)) for members in (WHOLE, REMOVED, FEW, ANOTHER_N)
    )
    assert whole == removed == few
    assert whole[0] != fewer[0] and whole[3:5] != fewer[3:5]  # the control
