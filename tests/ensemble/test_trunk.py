"""Members that share the public trunk: what they must declare, memory used again, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import tiny
from tiny_models import VOCAB, adapted_layers, write_adapter

from adapmixed.ensemble import Ensemble, Manifest, write_manifest
from adapmixed.ensemble.output_layer import LogitsRoom

LENGTH = 9
MODULES = {
    "head": [["lm_head"]] * 3,
    "last:1": [["1.self_attn.q_proj", "1.mlp.up_proj"]] * 3,
    "mixed": [["lm_head"], ["1.mlp.up_proj"], ["lm_head", "1.mlp.up_proj"]],
}


def test_members_that_differ_cannot_be_missing_without_a_constant(tmp_path: Path) -> None:
    base = tiny("gpt2")
    head = write_adapter(base, tmp_path / "a", seed=0, target_modules=["lm_head"])
    deep = write_adapter(base, tmp_path / "b", seed=1, target_modules=["c_attn"])
    assert Ensemble.from_pretrained(base, [head, None]).trunk.head == "lm_head"
    for members in ([head, deep], [head, deep, None], [None, head, deep]):
        with pytest.raises(ValueError, match="if members differ: .*[ab] adapts other"):
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
    inputs = torch.randint(1, VOCAB, (3, 1, LENGTH), generator=torch.Generator().manual_seed(9))
    room = LogitsRoom()  # of many inputs
    places: list[int] = []
    for ids in inputs:
        ((_, private, public, _),) = ensemble.iter_logits(ids, room=room)
        assert torch.equal(private, ensemble.logits(ids)[0])
        places.append(private.data_ptr())
        if len(places) == 1:
            del private, public
        elif len(places) == 2:
            held = private
    assert places[0] == places[1] != places[2]
    assert torch.equal(held, ensemble.logits(inputs[1])[0])


@pytest.mark.parametrize("kind", MODULES)
def test_threads_share_an_ensemble(kind: str, tmp_path: Path) -> None:
    base = tiny("llama")
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, target_modules=names)
        for i, names in enumerate(MODULES[kind])
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
