"""The layers of N members: what they compute, and that a row depends on its own adapter alone.

The columns of the active vocabulary are those of all tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import Make
from families import tiny
from tiny_models import VOCAB, adapted_layers, peft_logits, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import BatchedLoRA, HeadAdapters, Update
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import ClippedLogPool, Unprotected
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom
from adapmixed_ext.inputs import likeliest

ACTIVE = 12
KINDS = {"head": ["lm_head"], "block": ["v_proj"], "both": ["v_proj", "lm_head"]}
IDS = torch.randint(1, VOCAB, (3, 7), generator=torch.Generator().manual_seed(3))


def test_unequal_ranks_rslora_and_targets(
    base: Any, family: str, tmp_path: Path, ids: Tensor
) -> None:
    first, second = ("c_attn", "c_fc") if family == "gpt2" else ("q_proj", "gate_proj")
    settings: list[dict[str, Any]] = [
        {"target_modules": [first], "r": 1},
        {"target_modules": [second], "r": 5},
        {"target_modules": [first, second], "r": 4, "use_rslora": True},
        {
            "target_modules": [first],
            "rank_pattern": {f".*0.*{first}": 2},
            "alpha_pattern": {f".*1.*{first}": 11},
        },
        {"target_modules": [second], "layers_to_transform": [1]},
        {"target_modules": rf".*\.1\..*{first}"},
    ]
    folders = [
        write_adapter(base, tmp_path / str(seed), seed=seed, **setting)
        for seed, setting in enumerate(settings, start=1)
    ]
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    private, public = ensemble.logits(ids)
    torch.testing.assert_close(private, peft_logits(base, folders, ids), rtol=0, atol=1e-5)
    assert float((private - public).abs().amax(dim=(1, 2, 3)).min()) > 0.1


@pytest.mark.parametrize("ranks", [(3, 3), (3, 5)])
def test_bfloat16_layer_rounds_once(ranks: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 24, dtype=torch.bfloat16)
    updates = [(torch.randn(16, rank), torch.randn(rank, 24)) for rank in ranks]
    x = torch.randn(6, 5, 16).to(torch.bfloat16)
    with torch.no_grad():
        y = BatchedLoRA(layer, updates, max(ranks))(x)
        exact = layer(x).double()
        for i, (down, up) in enumerate(updates):
            rows = slice(2 + 2 * i, 4 + 2 * i)
            exact[rows] += x[rows].double() @ down.double() @ up.double()
    half_ulp = exact.abs() * 2.0**-8
    assert bool(((y.double() - exact).abs() <= half_ulp + 1e-5).all())


def random_update(rank: int, seed: int, shape: tuple[int, int] = (128, 384)) -> Update:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(shape[0], rank, generator=generator)
    return down, torch.randn(rank, shape[1], generator=generator)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_ranks_of_other_members(
    threads: int, length: int, dtype: torch.dtype
) -> None:
    """At shapes where the matrix library's kernels differ, with 1 to N members of one rank."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    count = 8
    layer = torch.nn.Linear(128, 384, dtype=dtype)
    x = torch.randn(count + 1, length, 128).to(dtype)
    for rank in (1, 4, 7, 64):
        originals = [random_update(rank, seed) for seed in range(count)]
        with torch.no_grad():
            expected = BatchedLoRA(layer, originals, 64)(x)
            public = layer(x)
        for kept in range(count):
            updates: list[Update | None] = [*originals]
            for i in range(count):  # `kept` others keep `rank`, the rest change it
                if (i - 2) % count > kept:
                    other = (1, 3, 7, 64, None)[i % 5]
                    updates[i] = None if other is None else random_update(other, 100 + i)
            with torch.no_grad():
                y = BatchedLoRA(layer, updates, 64)(x)
            assert torch.equal(y[0], public[0])
            for i, update in enumerate(updates):
                if update is originals[i]:
                    assert torch.equal(y[i + 1], expected[i + 1]), (rank, kept, i)
                elif update is None:
                    assert torch.equal(y[i + 1], public[i + 1])
                else:
                    assert not torch.equal(y[i + 1], expected[i + 1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_broken_member_stays_in_its_rows(
    base: Any, make_adapters: Make, ids: Tensor, value: float
) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(3))
    private, public = ensemble.logits(ids)
    for module in ensemble.model.modules():
        if isinstance(module, BatchedLoRA):
            module.up[1].fill_(value)
    wild, public_2 = ensemble.logits(ids)
    assert not torch.equal(private[1], wild[1])
    assert torch.equal(public, public_2)
    assert torch.equal(private[0], wild[0]) and torch.equal(private[2], wild[2])


# The output layer


@pytest.fixture(params=["llama", "llama in bfloat16", "gemma2", "phi"])
def any_base(request: Any) -> Any:
    """Return a base, of which Gemma caps its logits and Phi has a bias in its output layer."""
    family, _, short = request.param.partition(" in ")
    made = tiny(family)
    if made.lm_head.bias is not None:
        torch.nn.init.uniform_(made.lm_head.bias, -1.0, 1.0)
    return made.to(torch.bfloat16) if short else made


def ensemble(base: Any, kind: str, folder: Path, first: int | None = 0) -> Ensemble:
    """Return an ensemble of two members of other ranks, an empty one and a missing one.

    The first member follows from its seed; without one it is missing, too.
    """
    folders = [
        None if seed is None
        else write_adapter(base, folder / f"{seed}", seed=seed, r=2 + seed % 2, zero=seed == 2,
                           target_modules=KINDS[kind])
        for seed in (first, 1, 2, None)
    ]  # fmt: skip
    layers = [name for name, _ in base.named_modules() if name.endswith(tuple(KINDS[kind]))]
    return Ensemble.from_pretrained(base, folders, adapted={n: 3 for n in layers})


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_those_of_all_tokens(any_base: Any, kind: str, tmp_path: Path) -> None:
    members, base = ensemble(any_base, kind, tmp_path), any_base
    memory = 3 * members.sequence_bytes(9, active=ACTIVE)
    if kind != "head":  # one more token is one more row of the weights, at least
        row = base.lm_head.weight[0].nbytes
        assert members.sequence_bytes(9, active=ACTIVE + 1) - memory // 3 >= row
    chunks = list(members.iter_logits(IDS, memory_bytes=memory, active=ACTIVE))
    assert len(chunks) > 1
    whole = list(members.iter_logits(IDS, memory_bytes=1 << 30))
    assert whole[0][3] is None
    decoder = members.decoder(IDS[:, :-1], new_tokens=1, active=ACTIVE)
    decoder.drop(torch.tensor([False, True, False]))
    decoder.append(IDS[::2, -1])
    plain = members.decoder(IDS, active=VOCAB).logits
    assert plain.tokens is None
    pairs = [(part[1:], (whole[0][1][:, :, part[0]], whole[0][2][:, part[0]])) for part in chunks]
    pairs.append((decoder.logits, (plain.private[:, ::2], plain.public[::2])))
    for (private, public, tokens), (every, expected) in pairs:
        assert private.shape == (4, *tokens.shape) and tokens.shape[-1] == ACTIVE
        allowed = 1e-5 if base.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(public, expected, rtol=allowed, atol=allowed)
        flat = public.reshape(-1, VOCAB)
        assert torch.equal(tokens.view(-1, ACTIVE), likeliest(flat, ACTIVE))
        chosen = every.gather(-1, tokens.expand(*every.shape[:-1], -1))
        torch.testing.assert_close(private, chosen, rtol=allowed, atol=allowed)
        for row in (2, 3):
            assert torch.equal(private[row], public.gather(-1, tokens))
        assert not torch.equal(private[0], private[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_moves_no_bit_of_another_row(kind: str, tmp_path: Path) -> None:
    base = tiny("llama")
    made = (ensemble(base, kind, tmp_path, first) for first in (0, 9, None))
    logits, *others = (members.decoder(IDS, active=ACTIVE).logits for members in made)
    for other in others:
        assert torch.equal(other.tokens, logits.tokens)
        assert torch.equal(other.public, logits.public)
        assert torch.equal(other.private[1:], logits.private[1:])
        assert not torch.equal(other.private[0], logits.private[0])


def test_answers_from_columns_are_answers_from_all_rows(tmp_path: Path) -> None:
    members = ensemble(tiny("llama"), "head", tmp_path)
    members.tokenizer = "unused"
    for mechanism in (ClippedLogPool(-1.0, 1.0, 2.0, queries=600), Unprotected()):
        for shape in ({}, {"temperature": 0.7}, {"top_k": 5}, {"top_k": 40, "temperature": 2.0}):
            answers = []
            for columns in (True, False):
                settings: Any = {"rng": SeededRandom(1), "active": ACTIVE}
                generator = PrivateGenerator(members, mechanism, Accountant(1e-5), **settings)
                logits = members.decoder(IDS, active=ACTIVE if columns else None).logits
                answers.append(torch.cat([generator.answer(*logits, **shape) for _ in range(40)]))
            assert torch.equal(*answers)


def test_bfloat16_factors_are_kept_as_such() -> None:
    """Every number is the same, in half the memory; a model in bfloat16 rounds the others."""
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(4, 2, generator=generator), torch.randn(2, 9, generator=generator)
    short = up.bfloat16().float()
    for ups, model, dtype in (
        ((short, short), torch.float32, torch.bfloat16),
        ((short, up), torch.float32, torch.float32),
        ((short, up), torch.bfloat16, torch.bfloat16),
    ):
        made = HeadAdapters([(down, factor) for factor in ups], (4, 9), 2, model == torch.bfloat16)
        assert made.factors.dtype == dtype
        columns = torch.empty(2, 3, 9)
        hidden = torch.randn(3, 4, generator=generator)
        made.write(torch.zeros(3, 9), hidden, None, columns)
        torch.testing.assert_close(columns[0], hidden @ down @ short)


def test_what_is_no_token_is_not_active(tmp_path: Path) -> None:
    members = ensemble(tiny("llama"), "head", tmp_path)
    top = members.decoder(IDS, active=ACTIVE).logits.public.argmax(-1)
    members.output_layer.masked = top.unique()
    tokens = members.decoder(IDS, active=ACTIVE).logits.tokens
    assert tokens is not None and not torch.isin(tokens, top).any()
