"""Loading, separation of members, chunks, decoding, padding, budgets."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import POSITIONS, VOCAB

from adapmixed.models import (
    Adapter,
    BatchedLoRA,
    Ensemble,
    Manifest,
    read_adapter,
    read_manifest,
    write_manifest,
)

Make = Callable[..., list[Path]]


def save_ensemble(folder: Path, adapters: list[Path], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    names = []
    for index, adapter in enumerate(adapters):
        names.append(f"member-{index:03d}")
        adapter.rename(folder / names[-1])
    write_manifest(folder, Manifest("tiny", tuple(names), **settings))
    return folder


def budget(ensemble: Ensemble, batch: int, length: int, chunk: int, last_only: bool) -> int:
    """The smallest budget that gives this chunk."""
    low, high = 0, 1 << 30
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            size = ensemble._forward.chunk_size(batch, length, middle, last_only=last_only)
        except ValueError:
            size = 0
        low, high = (middle, high) if size < chunk else (low, middle)
    return high


def test_shapes_and_attributes(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    ensemble = Ensemble.load(base, make_adapters(3))
    private, public = ensemble.logits(ids)
    assert tuple(private.shape) == (3, 2, 9, VOCAB)
    assert tuple(public.shape) == (2, 9, VOCAB)
    assert (ensemble.num_models, ensemble.vocab_size) == (3, VOCAB)
    assert (ensemble.max_positions, ensemble.tokenizer) == (POSITIONS, None)
    assert ensemble.device == torch.device("cpu")
    assert private.stride(-1) == 1 and not private.requires_grad and not private.is_inference()


def test_public_block_is_bitwise_the_public_model(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    _, public = Ensemble.load(base, make_adapters(3)).logits(ids)
    with torch.no_grad():
        plain = base(input_ids=ids.repeat(4, 1)).logits[:2]
    assert torch.equal(public, plain)


def test_given_model_is_left_alone(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    base.train()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    Ensemble.load(base, make_adapters(2)).logits(ids)
    assert base.training and all(p.requires_grad for p in base.parameters())
    after = base.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dropout_is_off(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    base.train()
    ensemble = Ensemble.load(base, make_adapters(2))
    first, second = ensemble.logits(ids), ensemble.logits(ids)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def assert_only_one_member_differs(
    ensemble: Ensemble,
    neighbour: Ensemble,
    ids: torch.Tensor,
    mask: torch.Tensor,
    changed: int,
    limit: int,
) -> None:
    """Whole passes, padded passes, chunks and decoding agree bit by bit but for one member."""
    pairs = [
        (ensemble.logits(ids), neighbour.logits(ids)),
        (ensemble.logits(ids, mask), neighbour.logits(ids, mask)),
    ]
    chunks = [
        list(e.iter_logits(ids, memory_bytes=limit, attention_mask=mask))
        for e in (ensemble, neighbour)
    ]
    assert len(chunks[0]) == 3
    pairs += [(a[1:], b[1:]) for a, b in zip(*chunks, strict=True)]
    decoders = [e.decoder(ids) for e in (ensemble, neighbour)]
    for _ in range(2):
        pairs.append((decoders[0].logits, decoders[1].logits))
        for decoder in decoders:
            decoder.append(torch.tensor([5, 6]))
    for (private, public), (private_2, public_2) in pairs:
        assert torch.equal(public, public_2)
        for member in range(ensemble.num_models):
            assert torch.equal(private[member], private_2[member]) == (member != changed)


@pytest.mark.parametrize("changed", [0, 2, 4])
def test_changing_one_adapter_leaves_all_other_rows_bit_identical(
    base: Any, make_adapters: Make, ids: torch.Tensor, changed: int
) -> None:
    folders = make_adapters(5)
    (other,) = make_adapters(1, first=50)
    (zero,) = make_adapters(1, first=60, zero=True)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ensemble = Ensemble.load(base, folders)
    limit = budget(ensemble, 2, 9, 4, False)
    for replacement in (other, zero):
        neighbour = Ensemble.load(base, [*folders[:changed], replacement, *folders[changed + 1 :]])
        assert_only_one_member_differs(ensemble, neighbour, ids, mask, changed, limit)


@pytest.mark.parametrize("ranks", [(3, 3, 3, 3), (3, 2, 7, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_changing_rank_or_targets_leaves_all_other_rows_bit_identical(
    base: Any,
    family: str,
    make_adapters: Make,
    ids: torch.Tensor,
    ranks: tuple[int, ...],
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    folders = [make_adapters(1, first=i, r=rank)[0] for i, rank in enumerate(ranks)]
    members = [read_adapter(base, folder) for folder in folders]
    fewer, others = (["c_attn"], ["c_fc"]) if family == "gpt2" else (["v_proj"], ["o_proj"])
    settings: list[dict[str, Any]] = [
        {"r": 1},
        {"r": 7},
        {"r": 64},
        {"r": 64, "zero": True},
        {"target_modules": fewer},
        {"target_modules": others},
        {"target_modules": fewer + others, "r": 7},
    ]
    replacements = [
        read_adapter(base, make_adapters(1, first=50 + i, **s)[0]) for i, s in enumerate(settings)
    ]
    ensemble = Ensemble(copy.deepcopy(base), members)
    limit = budget(ensemble, 2, 9, 4, False)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for replacement in [*replacements, Adapter({})]:
        neighbour = Ensemble(copy.deepcopy(base), [members[0], replacement, *members[2:]])
        assert_only_one_member_differs(ensemble, neighbour, ids, mask, 1, limit)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_broken_member_stays_in_its_rows(
    base: Any, make_adapters: Make, ids: torch.Tensor, value: float
) -> None:
    ensemble = Ensemble.load(base, make_adapters(3))
    private, public = ensemble.logits(ids)
    for module in ensemble._forward.model.modules():
        if isinstance(module, BatchedLoRA):
            (group,) = module.groups
            group.up[1].fill_(value)
    wild, public_2 = ensemble.logits(ids)
    assert not torch.equal(private[1], wild[1])
    assert torch.equal(public, public_2)
    assert torch.equal(private[0], wild[0]) and torch.equal(private[2], wild[2])


def test_zero_adapter_answers_exactly_the_public_model(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    folders = make_adapters(4) + make_adapters(2, first=50, zero=True)
    ensemble = Ensemble.load(base, folders)
    private, public = ensemble.logits(ids)
    assert torch.equal(private[4], public) and torch.equal(private[5], public)
    decoder = ensemble.decoder(ids)
    private, public = decoder.logits
    assert torch.equal(private[4], public) and not torch.equal(private[3], public)


def test_zero_adapter_is_exact_where_rows_round_differently(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    """Matrix products may round a row by its place; the answer must not show it."""
    ensemble = Ensemble.load(base, make_adapters(1) + make_adapters(1, first=60, zero=True))

    def round_by_row(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        row = torch.arange(output.shape[0], dtype=output.dtype)[:, None, None]
        return output * (1 + row * 2.0**-20)

    ensemble._forward.model.get_output_embeddings().register_forward_hook(round_by_row)
    private, public = ensemble.logits(ids)
    assert torch.equal(private[1], public) and not torch.equal(private[0], public)


@pytest.mark.parametrize("chunk", [1, 2, 4, 9])
def test_chunks_equal_the_whole(
    base: Any, make_adapters: Make, ids: torch.Tensor, chunk: int
) -> None:
    ensemble = Ensemble.load(base, make_adapters(3))
    private, public = ensemble.logits(ids)
    limit = budget(ensemble, 2, 9, chunk, False)
    covered = 0
    for part, chunk_private, chunk_public in ensemble.iter_logits(ids, memory_bytes=limit):
        assert part == slice(covered, min(covered + chunk, 9))
        covered = part.stop
        torch.testing.assert_close(chunk_private, private[:, :, part], rtol=0, atol=2e-5)
        torch.testing.assert_close(chunk_public, public[:, part], rtol=0, atol=2e-5)
    assert covered == 9


def test_budget_bounds_the_logits_and_names_what_is_needed(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    ensemble = Ensemble.load(base, make_adapters(3))
    needed = budget(ensemble, 2, 9, 1, False)
    assert needed >= 4 * 2 * VOCAB * 4
    with pytest.raises(ValueError, match=f"memory_bytes must be >= {needed} "):
        ensemble.iter_logits(ids, memory_bytes=needed - 1)
    for limit in (needed, 3 * needed, 5 * needed):
        for _, private, public in ensemble.iter_logits(ids, memory_bytes=limit):
            assert (private.numel() + public.numel()) * 4 <= limit
    needed = budget(ensemble, 2, 9, 1, True)
    with pytest.raises(ValueError, match=f"memory_bytes must be >= {needed} "):
        ensemble.decoder(ids, memory_bytes=needed - 1)


def test_decoder_equals_recomputation(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    ensemble = Ensemble.load(base, make_adapters(3))
    generator = torch.Generator().manual_seed(3)
    for chunk in (2, 9):
        limit = budget(ensemble, 2, 9, chunk, True)
        decoder = ensemble.decoder(ids, memory_bytes=limit)
        sequence = ids
        for _ in range(5):
            private, public = ensemble.logits(sequence)
            next_private, next_public = decoder.logits
            assert tuple(next_private.shape) == (3, 2, VOCAB)
            torch.testing.assert_close(next_private, private[:, :, -1], rtol=0, atol=2e-5)
            torch.testing.assert_close(next_public, public[:, -1], rtol=0, atol=2e-5)
            tokens = torch.randint(0, VOCAB, (2,), generator=generator)
            decoder.append(tokens)
            sequence = torch.cat([sequence, tokens[:, None]], dim=1)
            assert decoder.length == sequence.shape[1]


def test_left_padding_changes_nothing(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    ensemble = Ensemble.load(base, make_adapters(3))
    short = ids[:1, 4:]
    padded = torch.cat([torch.cat([torch.full((1, 4), 9), short], dim=1), ids[1:]])
    mask = torch.ones_like(padded)
    mask[0, :4] = 0
    expected = [ensemble.logits(short), ensemble.logits(ids[1:])]
    private, public = ensemble.logits(padded, mask)
    torch.testing.assert_close(private[:, :1, 4:], expected[0][0], rtol=0, atol=2e-5)
    torch.testing.assert_close(private[:, 1:], expected[1][0], rtol=0, atol=2e-5)
    torch.testing.assert_close(public[:1, 4:], expected[0][1], rtol=0, atol=2e-5)
    for chunk in (2, 3):
        limit = budget(ensemble, 2, 9, chunk, False)
        for part, chunk_private, _ in ensemble.iter_logits(
            padded, memory_bytes=limit, attention_mask=mask
        ):
            live = slice(max(part.start, 4), part.stop)
            torch.testing.assert_close(
                chunk_private[:, 0, max(4 - part.start, 0) :],
                private[:, 0, live],
                rtol=0,
                atol=2e-5,
            )
    decoder = ensemble.decoder(padded, attention_mask=mask)
    alone = ensemble.decoder(short)
    for token in (3, 4):
        torch.testing.assert_close(
            decoder.logits[0][:, 0], alone.logits[0][:, 0], rtol=0, atol=2e-5
        )
        decoder.append(torch.tensor([token, token]))
        alone.append(torch.tensor([token]))


def test_input_limits(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    ensemble = Ensemble.load(base, make_adapters(1))
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
    for bad_mask, reason in [(mask[:, 1:], "shape"), (2 * mask, "0 or 1"), (0 * mask, "0 or 1")]:
        with pytest.raises(ValueError, match=reason):
            ensemble.logits(ids, bad_mask)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="pad on the left"):
        ensemble.decoder(ids, attention_mask=mask)


def test_folder_round_trip(
    base: Any, make_adapters: Make, ids: torch.Tensor, tmp_path: Path
) -> None:
    adapters = make_adapters(2)
    expected = Ensemble.load(base, adapters).logits(ids)
    base.save_pretrained(tmp_path / "base")
    folder = save_ensemble(tmp_path / "ensemble", adapters)
    for location in (tmp_path / "base", str(tmp_path / "base")):
        ensemble = Ensemble.load(location, folder)
        assert ensemble.tokenizer is None
        assert torch.equal(ensemble.logits(ids)[0], expected[0])
    low = Ensemble.load(tmp_path / "base", folder, dtype=torch.bfloat16)
    assert low.logits(ids)[1].dtype == torch.bfloat16


def test_another_base_is_refused(make_adapters: Make, base: Any, tmp_path: Path) -> None:
    base.save_pretrained(tmp_path / "base")
    folder = save_ensemble(tmp_path / "ensemble", make_adapters(1), base_sha256="0" * 64)
    with pytest.raises(ValueError, match="base must be the one"):
        Ensemble.load(tmp_path / "base", folder)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    write_manifest(folder, Manifest("tiny", ("member-000",), tokenizer_sha256="0" * 64))
    with pytest.raises(ValueError, match="tokenizer.json has another SHA-256"):
        Ensemble.load(tmp_path / "base", folder)


def test_refused_bases(base: Any, make_adapters: Make, tmp_path: Path) -> None:
    from peft import PeftModel

    folders = make_adapters(1)
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), folders[0])
    for bad, reason in [
        (adapted, "carries adapters"),
        (Ensemble.load(base, folders)._forward.model, "carries adapters"),
        (torch.nn.Linear(2, 2), "transformers model"),
        (3, "transformers model"),
        (tmp_path / "nowhere", "existing folder"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Ensemble.load(bad, folders)


def test_members_are_counted_once(base: Any, make_adapters: Make, tmp_path: Path) -> None:
    (folder,) = make_adapters(1)
    with pytest.raises(ValueError, match="at least one private model"):
        Ensemble.load(base, [])
    with pytest.raises(ValueError, match="distinct"):
        Ensemble.load(base, [folder, folder.parent / "." / folder.name])
    with pytest.raises(ValueError, match="at least one private model"):
        Ensemble(base, [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 2}, "written by a newer adapmixed"),
        ({"format_version": 0}, "format_version"),
        ({"format_version": "1"}, "format_version"),
        ({"num_models": 3}, "num_models"),
        ({"members": [], "num_models": 0}, "at least one"),
        ({"members": ["a", "a"]}, "distinct"),
        ({"members": ["a", "../b"]}, "plain folder names"),
        ({"members": "ab"}, "list of folder names"),
        ({"tokenizer_sha256": "zz"}, "hexadecimal"),
        ({"tokenizer_files": {"vocab.json": "zz"}}, "tokenizer_files of vocab.json .* hexadecimal"),
        ({"tokenizer_files": ["vocab.json"]}, "tokenizer_files must be an object"),
        ({"shards": [{}]}, "each of the 2 members"),
    ],
)
def test_manifest_refusals(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    write_manifest(tmp_path, Manifest("tiny", ("a", "b")))
    path = tmp_path / "ensemble.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=reason):
        read_manifest(tmp_path)


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = Manifest(
        "tiny",
        ("a", "b"),
        tokenizer_sha256="a" * 64,
        tokenizer_files={"merges.txt": "d" * 64},
        training={"rank": 4},
        shards=({"documents": 1, "sha256": "b" * 64}, {"documents": 0, "sha256": "c" * 64}),
    )
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    (tmp_path / "ensemble.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        read_manifest(tmp_path)
    with pytest.raises(ValueError, match="must hold ensemble.json"):
        read_manifest(tmp_path / "elsewhere")
