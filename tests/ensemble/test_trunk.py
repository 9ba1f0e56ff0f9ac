"""Members that share the public trunk: every family, adapted output layers and last blocks."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import linear_names, tiny
from tiny_models import VOCAB, adapted_layers, peft_logits, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble, Manifest, write_manifest
from adapmixed.ensemble.lora import block_names
from adapmixed.ensemble.output_layer import LogitsRoom
from adapmixed.ensemble.support import TESTED
from adapmixed.ensemble.trunk import SHARES_NO_BLOCK

LOOP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
PASSES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-4}
LENGTH, PADDING = 9, 4
KINDS = ("head", "last:1", "mixed")
WAYS = list(zip(KINDS, (torch.bfloat16, torch.float32, torch.float32), strict=True))


def targets(base: Any, kind: str) -> list[list[str]]:
    """Return the target modules of three members."""
    last = [f"{block_names(base)[-1]}.{name}" for name in _inside(base)]
    if kind == "mixed":
        return [["lm_head"], last, ["lm_head", *last]]
    return [["lm_head"] if kind == "head" else last] * 3


def _inside(base: Any) -> list[str]:
    prefix = f"{block_names(base)[-1]}."
    wanted = set(linear_names(base))
    return [
        name.removeprefix(prefix)
        for name, _ in base.named_modules()
        if name.startswith(prefix) and name.rpartition(".")[2] in wanted
    ]


def close(found: Tensor, expected: Tensor, allowed: float) -> None:
    atol = float(expected.float().abs().max()) * allowed
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=atol)


@pytest.fixture(scope="module", params=sorted(TESTED))
def written(request: Any, tmp_path_factory: Any) -> tuple[Any, dict[str, list[Path]]]:
    base = tiny(request.param)
    found = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(f"{request.param}-{kind[:4]}")
        found[kind] = [
            write_adapter(base, root / str(i), seed=i, r=3 if i < 2 else 5, target_modules=names)
            for i, names in enumerate(targets(base, kind))
        ]
    return base, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "dtype"), WAYS, ids=KINDS)
@pytest.mark.slow
def test_every_way_of_reading_equals_the_peft_loop(written: Any, kind: str, dtype: Any) -> None:
    base, folders = copy.deepcopy(written[0]).to(dtype), written[1][kind]
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    depth = len(block_names(base))
    if base.config.model_type in SHARES_NO_BLOCK and kind != "head":
        assert ensemble.trunk.repeats_input  # its blocks cannot be shared
    elif kind == "head":
        assert ensemble.trunk.head == "lm_head"
    else:
        assert (len(ensemble.trunk.blocks), ensemble.trunk.depth) == (1, depth)
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    private, public = ensemble.logits(ids)
    close(private, peft_logits(base, folders, ids), LOOP[dtype])
    assert float((private - public).float().abs().amax(dim=(1, 2, 3)).min()) > 0.02
    with torch.no_grad():
        alone = base(input_ids=ids).logits
    close(public, alone, LOOP[dtype])
    if kind == "head":
        assert torch.equal(public, alone)
    whole = torch.cat([public[None], private])
    parts = ensemble.iter_logits(ids, memory_bytes=ensemble.sequence_bytes(LENGTH) * 3)
    chunks = [torch.cat([q[None], p]) for _, p, q, _ in parts]
    close(torch.cat(chunks, dim=2), whole, PASSES[dtype])
    _decode(ensemble, ids, whole, PASSES[dtype])


def _decode(ensemble: Ensemble, ids: Tensor, whole: Tensor, allowed: float) -> None:
    """Decode token by token with the first sequence padded, and later dropped."""
    padded, mask = torch.cat([ids[:1].roll(PADDING, 1), ids[1:]]), torch.ones_like(ids)
    padded[0, :PADDING], mask[0, :PADDING] = 9, 0
    own, shown = ensemble.logits(ids[:1, : LENGTH - PADDING])
    single = torch.cat([shown[None], own])
    decoder = ensemble.decoder(padded[:, :6], attention_mask=mask[:, :6])
    for position in range(6, LENGTH):
        private, public, _ = decoder.logits
        both = torch.cat([public[None], private])
        close(both[:, -1], whole[:, 1, position - 1], allowed)
        if position < LENGTH - 1:
            close(both[:, 0], single[:, 0, position - PADDING - 1], allowed)
        else:
            assert both.shape[1] == 1
        if position == LENGTH - 2:
            decoder.drop(torch.tensor([True, False]))
        del private, public, both
        decoder.append(padded[-len(decoder.logits[1]) :, position])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "dtype"), WAYS, ids=KINDS)
@pytest.mark.slow
def test_an_emptied_or_missing_member_changes_no_bit_of_others(
    written: Any, kind: str, dtype: Any, tmp_path: Path
) -> None:
    base, folders = copy.deepcopy(written[0]).to(dtype), written[1][kind]
    layers = adapted_layers(folders)
    full = Ensemble.from_pretrained(base, folders, adapted=layers)
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    for gone in (1, 2):
        empty = write_adapter(
            base, tmp_path / f"{gone}", seed=9, zero=True, r=3 if gone < 2 else 5,
            target_modules=targets(base, kind)[gone],
        )  # fmt: skip
        for stand_in in (None, empty):
            paths: list[Path | None] = list(folders)
            paths[gone] = stand_in
            other = Ensemble.from_pretrained(base, paths, adapted=layers)
            assert other.trunk == full.trunk
            assert other.sequence_bytes(7) == full.sequence_bytes(7)
            for tokens, live in ((ids, None), (ids[:1], None), (ids, mask)):
                for cut in (LENGTH, 4):
                    a, b = (_chunked(e, tokens, live, cut) for e in (full, other))
                    keep = slice(None) if live is None else live.bool()
                    for row in range(4):
                        expected = a[0] if row == gone + 1 else a[row]
                        assert torch.equal(b[row][keep], expected[keep])


def _chunked(ensemble: Ensemble, ids: Tensor, mask: Tensor | None, cut: int) -> Tensor:
    cache = ensemble.new_cache()
    parts = [
        ensemble.forward(ids[:, i : i + cut], None if mask is None else mask[:, : i + cut], cache)
        for i in range(0, ids.shape[1], cut)
    ]
    return torch.cat([torch.cat([one.public[None], one.private]) for one in parts], dim=2)


def test_members_that_differ_cannot_be_missing_without_a_constant(tmp_path: Path) -> None:
    base = tiny("gpt2")
    head = write_adapter(base, tmp_path / "a", seed=0, target_modules=["lm_head"])
    deep = write_adapter(base, tmp_path / "b", seed=1, target_modules=["c_attn"])
    assert Ensemble.from_pretrained(base, [head, None]).trunk.head == "lm_head"
    for members in ([head, deep], [head, deep, None], [None, head, deep]):
        with pytest.raises(ValueError, match="if members differ: .*a and .*b adapt"):
            Ensemble.from_pretrained(base, members)
    with pytest.raises(ValueError, match="adapted must be given if all members are missing"):
        Ensemble.from_pretrained(base, [None, None])
    with pytest.raises(ValueError, match="adapts transformer.h.0.* with rank 3, got None"):
        Ensemble.from_pretrained(base, [head, deep], adapted={"lm_head": [3]})
    with pytest.raises(ValueError, match="got .*4"):
        Ensemble.from_pretrained(base, [head], adapted={"lm_head": [4]})
    write_manifest(tmp_path, Manifest("tiny", ("a",), {"lm_head": (3,)}))
    with pytest.raises(ValueError, match="its ensemble.json names layers"):
        Ensemble.from_pretrained(base, tmp_path, adapted={"lm_head": (3,)})
    with pytest.raises(ValueError, match="adapted must name layers of the base"):
        Ensemble.from_pretrained(base, [head], adapted={"lm_head": [3], "nothing": [1]})
    both = {"lm_head": [3]} | {f"transformer.h.{i}.attn.c_attn": [3] for i in range(2)}
    for other in (deep, None):
        trunk = Ensemble.from_pretrained(base, [head, other], adapted=both).trunk
        assert trunk.head is None and len(trunk.blocks) == 2


def test_logits_that_somebody_keeps_stay_as_they_are(tmp_path: Path) -> None:
    """The memory of a step is used again, unless a view or an array over it is held."""
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
    ids = torch.randint(1, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(9))
    chunks = list(ensemble.iter_logits(ids, memory_bytes=ensemble.sequence_bytes(LENGTH) * 2))
    assert len(chunks) > 1
    found = torch.cat([private for _, private, _, _ in chunks], dim=2)
    close(found, ensemble.logits(ids)[0], PASSES[torch.float32])


def test_a_reader_of_many_inputs_finds_the_memory_of_the_one_before(tmp_path: Path) -> None:
    """The memory is used again unless it is held, with the same numbers as in fresh memory."""
    base = tiny("gpt2")
    folder = write_adapter(base, tmp_path / "a", seed=0, target_modules=["lm_head"])
    ensemble = Ensemble.from_pretrained(base, [folder])
    inputs = torch.randint(1, VOCAB, (3, 1, LENGTH), generator=torch.Generator().manual_seed(9))
    expected = [ensemble.logits(ids)[0] for ids in inputs]
    room = LogitsRoom()
    places: list[int] = []
    for ids, wanted in zip(inputs[:2], expected, strict=False):
        ((_, private, public, _),) = ensemble.iter_logits(ids, room=room)
        assert torch.equal(private, wanted)
        places.append(private.data_ptr())
        if len(places) == 1:
            del private, public
    ((_, other, _, _),) = ensemble.iter_logits(inputs[2], room=room)
    assert places[0] == places[1] != other.data_ptr()
    assert torch.equal(private, expected[1]) and torch.equal(other, expected[2])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_an_ensemble(kind: str, tmp_path: Path) -> None:
    base = tiny("llama")
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, target_modules=names)
        for i, names in enumerate(targets(base, kind))
    ]
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randint(1, VOCAB, (size, 4 + size), generator=generator) for size in (1, 2, 3)]
    expected = [ensemble.logits(ids)[0] for ids in inputs]

    def asks(number: int) -> bool:
        found = [ensemble.logits(inputs[number])[0] for _ in range(40)]
        return all(torch.equal(one, expected[number]) for one in found)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(asks, range(3)))
