"""Reading members: peft folders, `ensemble.json`, and the fingerprint of an ensemble."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import Make, rewrite
from families import tiny
from safetensors.torch import load_file
from tiny_models import ADAPTED, TARGETS, VOCAB, adapted_layers, peft_logits, write_adapter

from adapmixed.ensemble import Ensemble, Manifest, members, read_manifest, write_manifest
from adapmixed.ensemble.members import fingerprint, member_digests, read_adapters


def edit(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    content = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: item for name, item in content.items() if item is not ...}))
    return folder


def logits(base: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return Ensemble.from_pretrained(base, [folder]).logits(ids)[0]


RECORD = {
    "documents": 1, "sha256": "b" * 64, "identifiers": ["a" * 32], "identifier_key": "c" * 32,
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("trained", DTYPES)
@pytest.mark.parametrize("served", DTYPES)
def test_a_copy_of_the_head_may_be_rounded_otherwise(
    base: Any, tmp_path: Path, ids: torch.Tensor, trained: torch.dtype, served: torch.dtype
) -> None:
    """peft stores the head in the dtype of the training, whatever the base is served in."""
    with torch.no_grad():
        base.get_output_embeddings().weight[0] *= 2.0**-24  # the smallest numbers of fp16
    low, base = copy.deepcopy(base).to(trained), base.to(served)
    folder = write_adapter(low, tmp_path / "a", seed=1, target_modules=["lm_head"])
    weights = load_file(folder / "adapter_model.safetensors")
    (stored,) = (value for name, value in weights.items() if "base_layer" in name)
    assert stored.dtype == trained
    private = logits(base, folder, ids)
    expected = peft_logits(base, [folder], ids).float()  # with the copy as its head
    allowed = float(expected.abs().max()) * max(torch.finfo(kind).eps for kind in (trained, served))
    torch.testing.assert_close(private.float(), expected, rtol=0, atol=4 * allowed)

    def train_head(weights: dict[str, torch.Tensor]) -> None:
        next(value for name, value in weights.items() if "base_layer" in name)[7, 3] *= 1.05

    with pytest.raises(ValueError, match="must equal the base's weights"):
        read_adapters(base, [rewrite(folder, train_head)])


@pytest.mark.filterwarnings("ignore")  # peft's, about saved embeddings and tied heads
@pytest.mark.parametrize("target", ["lm_head", ""])
def test_resized_embeddings_are_refused_with_their_sizes(
    base: Any, family: str, tmp_path: Path, target: str
) -> None:
    wide = copy.deepcopy(base)
    wide.resize_token_embeddings(VOCAB + 3)
    base.save_pretrained(tmp_path / "base")  # peft looks there whether the sizes differ
    wide.name_or_path = wide.config._name_or_path = str(tmp_path / "base")
    targets = [target or TARGETS[family][0]]
    folder = write_adapter(wide, tmp_path / "a", seed=1, target_modules=targets)

    def lora_alone(weights: dict[str, torch.Tensor]) -> None:
        for key in [key for key in weights if "lora_" not in key]:
            del weights[key]

    reason = rf"must .*\({VOCAB}, .* got .*\({VOCAB + 3}, .*resized embeddings"
    for adapter in (folder, rewrite(folder, lora_alone)) if target else (folder,):
        with pytest.raises(ValueError, match=reason):
            Ensemble.from_pretrained(base, [adapter])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"some_later_setting": {"x": 1}}, "some_later_setting"),
        ({"r": 4}, "shapes"),
        ({"lora_alpha": ...}, "settings of LoRA: 'lora_alpha'"),
        ({"base_model_name_or_path": 5}, "must be a string or null"),
        ({"rank_pattern": {".*": 2}}, "shapes"),
        ({"rank_pattern": {"(": 2}}, "settings of LoRA"),
        ({"target_modules": ["other"]}, "settings of LoRA: .*other"),
    ],
)
def test_refused_settings(
    base: Any, make_adapters: Make, settings: dict[str, Any], reason: str
) -> None:
    (folder,) = make_adapters(1)
    with pytest.raises(ValueError, match=reason) as caught:
        read_adapters(base, [edit(folder, **settings)])
    assert str(folder) in str(caught.value)


def some(weights: dict[str, torch.Tensor], part: str) -> list[str]:
    return sorted(name for name in weights if part in name)


WEIGHTS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda w: [w.pop(some(w, part)[0]) for part in ("lora_A", "lora_B")], "must agree"),
    (lambda w: w.pop(some(w, "lora_B")[0]), r"got {'A': \(3, \d+\)} \("),
    (
        lambda w: [w.update({name.replace(".0.", ".9."): w.pop(name)}) for name in list(w)],
        "must agree",
    ),
    (lambda w: w[some(w, "lora_B")[0]][0].fill_(float("nan")), "must be finite"),
    (
        lambda w: w.update({"base_model.model.wte.lora_embedding_A": torch.zeros(3, 61)}),
        "lora_A and lora_B of linear layers",
    ),
    (
        lambda w: w.update({name: w[name].repeat(1, 2) for name in some(w, "lora_A")}),
        "must have shapes",
    ),
    (lambda w: w.clear(), "must hold lora_A and lora_B of linear layers"),
]
FILES = [
    ("adapter_model.safetensors", None, "there is no adapter_model.safetensors$"),
    ("adapter_model.safetensors", b"not safetensors at all", "readable safetensors"),
    ("adapter_config.json", None, "no adapter_config.json"),
    ("adapter_config.json", b"{", "must be JSON"),
]


def test_refused_folders(base: Any, make_adapters: Make) -> None:
    folders = make_adapters(len(WEIGHTS) + len(FILES))
    for folder, (change, _) in zip(folders, WEIGHTS, strict=False):
        rewrite(folder, change)
    for folder, (name, content, _) in zip(folders[len(WEIGHTS) :], FILES, strict=True):
        (folder / name).write_bytes(content or b"")
        if content is None:
            (folder / name).unlink()
    for folder, (*_, reason) in zip(folders, [*WEIGHTS, *FILES], strict=True):
        with pytest.raises(ValueError, match=reason):
            Ensemble.from_pretrained(base, [folder])


def test_folder_round_trip(
    base: Any, family: str, make_adapters: Make, ids: torch.Tensor, tmp_path: Path, monkeypatch: Any
) -> None:
    adapters, plans = make_adapters(2), iter(4 * [members._planned])  # one for each loading
    monkeypatch.setattr(members, "_planned", lambda *arguments: next(plans)(*arguments))
    for order, folder in zip((1, -1), adapters, strict=True):  # peft writes sets in any order
        edit(folder, target_modules=TARGETS[family][::order])
    expected = Ensemble.from_pretrained(base, adapters).logits(ids)
    base.save_pretrained(tmp_path / "base")
    folder, names = adapters[0].parent, tuple(path.name for path in adapters)
    write_manifest(folder, Manifest("tiny", names, adapted_layers(adapters)))
    for location in (tmp_path / "base", str(tmp_path / "base")):
        ensemble = Ensemble.from_pretrained(location, folder)
        assert ensemble.tokenizer is None
        assert torch.equal(ensemble.logits(ids)[0], expected[0])
    low = Ensemble.from_pretrained(tmp_path / "base", folder, dtype=torch.bfloat16)
    assert low.logits(ids)[1].dtype == torch.bfloat16


def test_members_are_counted_once(base: Any, make_adapters: Make) -> None:
    (folder,) = make_adapters(1)
    with pytest.raises(ValueError, match="at least one private model"):
        Ensemble.from_pretrained(base, [])
    write_manifest(folder.parent, Manifest("", (folder.name,) * 2, adapted_layers([folder])))
    for twice in (folder.parent, [folder, folder.parent / "." / folder.name]):
        with pytest.raises(ValueError, match="members must be distinct, got .* more than once"):
            Ensemble.from_pretrained(base, twice)
    with pytest.raises(ValueError, match="num_models"):
        Ensemble(base, [])


def test_members_that_differ_cannot_be_missing_without_a_constant(tmp_path: Path) -> None:
    base = tiny("gpt2")
    head = write_adapter(base, tmp_path / "a", seed=0, target_modules=["lm_head"])
    deep = write_adapter(base, tmp_path / "b", seed=1, target_modules=["c_attn"])
    assert Ensemble.from_pretrained(base, [head, None]).trunk.head == "lm_head"
    for listed in ([head, deep], [head, deep, None], [None, head, deep]):
        with pytest.raises(ValueError, match="if members differ: .*[ab] adapts other"):
            Ensemble.from_pretrained(base, listed)
    with pytest.raises(ValueError, match="adapted must be given if all members are missing"):
        Ensemble.from_pretrained(base, [None, None])
    with pytest.raises(ValueError, match="adapts transformer.h.0.* with rank 3, got None"):
        Ensemble.from_pretrained(base, [head, deep], adapted={"lm_head": 3})
    with pytest.raises(ValueError, match="lm_head with rank 3, got 2"):
        Ensemble.from_pretrained(base, [head], adapted={"lm_head": 2})
    write_manifest(tmp_path, Manifest("tiny", ("a",), {"lm_head": 3}))
    with pytest.raises(ValueError, match="its ensemble.json names layers"):
        Ensemble.from_pretrained(base, tmp_path, adapted={"lm_head": 3})
    with pytest.raises(ValueError, match="adapted must name layers of the base"):
        Ensemble.from_pretrained(base, [head], adapted={"lm_head": 3, "nothing": 1})
    both = {"lm_head": 3} | {f"transformer.h.{i}.attn.c_attn": 3 for i in range(2)}
    for other in (deep, None):
        trunk = Ensemble.from_pretrained(base, [head, other], adapted=both).trunk
        assert trunk.head is None and len(trunk.blocks) == 2


def test_a_fingerprint_is_of_what_answers(make_adapters: Make) -> None:
    """Members count in their order, since charges belong to them; versions and names do not."""
    first, second = make_adapters(2)

    def digest(*members: Path | None, base: str = "me/base", commit: str = "abc") -> str:
        return fingerprint(base, member_digests(members), {}, commit)

    orders = ((first, second), (second, first), (first, None), (None, first), (first, first))
    before = digest(first)
    others = {digest(first, commit="abd"), digest(first, base="you/base"), before}
    assert len({digest(*members) for members in orders} | others) == 8
    path = first / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("peft_version", "base_model_name_or_path", "inference_mode"):
        path.write_text(json.dumps(config | {name: "other"}, indent=3))
        assert digest(first) == before
    path.write_text(json.dumps(config | {"lora_alpha": 17}))
    assert digest(first) != before


def test_a_fingerprint_is_of_what_was_read(
    make_adapters: Make, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise old weights could answer under the fingerprint of the new ones."""
    first, second = make_adapters(2)
    read = members.read_adapters
    before = Ensemble.from_pretrained(base, [first, second]).fingerprint

    def changed(model: Any, folders: list[Path]) -> Any:
        adapters = read(model, folders)
        shutil.copy(second / "adapter_model.safetensors", first)
        return adapters

    monkeypatch.setattr(members, "read_adapters", changed)
    assert Ensemble.from_pretrained(base, [first, second]).fingerprint == before
    assert Ensemble.from_pretrained(base, [first, second]).fingerprint != before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 4}, "format_version must be 5, got 4"),
        ({"adapted": {"lm_head": [8]}}, "adapted must map layer names to .* got .*'lm_head'"),
        ({"members": []}, "at least one"),
        ({"members": ["a", "../b"]}, "plain folder names"),
        ({"members": "ab"}, "members must be a list"),
        ({"base_files": ["vocab.json"]}, "base_files must be an object"),
        ({"revision": 5}, "revision must be a string"),
        ({"training": "x"}, "training must be an object"),
        ({"shards": [RECORD]}, "each of the 2 members"),
    ],
)
def test_manifest_refusals(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    write_manifest(tmp_path, Manifest("tiny", ("a", "b"), ADAPTED))
    path = tmp_path / "ensemble.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=reason):
        read_manifest(tmp_path)


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = Manifest(
        "tiny",
        ("a", None),
        {"lm_head": 8},
        base_files={"merges.txt": "d" * 64},
        training={"rank": 4},
        shards=(RECORD, RECORD | {"documents": 0, "identifiers": []}),
    )
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    (tmp_path / "ensemble.json").write_text("[]")
    with pytest.raises(ValueError, match="format_version must be 5, got None"):
        read_manifest(tmp_path)
    with pytest.raises(ValueError, match="must hold ensemble.json"):
        read_manifest(tmp_path / "elsewhere")
    (single := tmp_path / "single").mkdir()
    (single / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="a single adapter: give a list of such folders"):
        read_manifest(single)
