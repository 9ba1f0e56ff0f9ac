"""An ensemble's folder and its manifest: reading, writing and errors."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import Make
from tiny_models import ADAPTED, adapted_layers, write_adapter

from adapmixed.ensemble import Ensemble, Manifest, parts, read_manifest, write_manifest
from adapmixed.ensemble.provenance import fingerprint, member_digests
from adapmixed.ensemble.public_model import load_base


def save_ensemble(folder: Path, adapters: list[Path], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    names = []
    for index, adapter in enumerate(adapters):
        names.append(f"member-{index:03d}")
        adapter.rename(folder / names[-1])
    layers = adapted_layers([folder / name for name in names])
    write_manifest(folder, Manifest("tiny", tuple(names), layers, **settings))
    return folder


def test_folder_round_trip(
    base: Any, make_adapters: Make, ids: torch.Tensor, tmp_path: Path
) -> None:
    adapters = make_adapters(2)
    expected = Ensemble.from_pretrained(base, adapters).logits(ids)
    base.save_pretrained(tmp_path / "base")
    folder = save_ensemble(tmp_path / "ensemble", adapters)
    for location in (tmp_path / "base", str(tmp_path / "base")):
        ensemble = Ensemble.from_pretrained(location, folder)
        assert ensemble.tokenizer is None
        assert torch.equal(ensemble.logits(ids)[0], expected[0])
    low = Ensemble.from_pretrained(tmp_path / "base", folder, dtype=torch.bfloat16)
    assert low.logits(ids)[1].dtype == torch.bfloat16


def test_another_base_is_refused(make_adapters: Make, base: Any, tmp_path: Path) -> None:
    base.save_pretrained(tmp_path / "base")
    folder = save_ensemble(
        tmp_path / "ensemble", make_adapters(1), base_files={"config.json": "0" * 64}
    )
    with pytest.raises(ValueError, match="base must be the one"):
        Ensemble.from_pretrained(tmp_path / "base", folder)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    recorded = {"tokenizer.json": "0" * 64}
    write_manifest(folder, Manifest("tiny", ("member-000",), ADAPTED, base_files=recorded))
    with pytest.raises(ValueError, match="tokenizer.json has another SHA-256"):
        Ensemble.from_pretrained(tmp_path / "base", folder)


def test_refused_bases(base: Any, make_adapters: Make, tmp_path: Path) -> None:
    from peft import PeftModel

    folders = make_adapters(1)
    head = [write_adapter(base, tmp_path / "head", seed=0, target_modules=["lm_head"])]
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), folders[0])
    for bad, reason in [
        (adapted, "carries adapters"),
        (Ensemble.from_pretrained(base, folders)._forward.model, "carries adapters"),
        (Ensemble.from_pretrained(base, head)._forward.model, "carries adapters"),
        (torch.nn.Linear(2, 2), "transformers model"),
        (3, "transformers model"),
        (tmp_path / "nowhere", "existing folder"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Ensemble.from_pretrained(bad, folders)


def test_a_base_folder_with_an_adapter_is_refused(
    base: Any, make_adapters: Make, tmp_path: Path
) -> None:
    """transformers would add it to the weights, and private text would become public."""
    (member,) = make_adapters(1)
    base.save_pretrained(tmp_path / "base")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(member / file, tmp_path / "base" / file)
    with pytest.raises(ValueError, match="adapter_config.json, which makes an adapter part of it"):
        Ensemble.from_pretrained(tmp_path / "base", [member])


@pytest.mark.parametrize(
    "name",
    ["./modle", "/modle", "a/b/c", "", "models/modle"],
)
def test_a_path_is_not_asked_of_the_hub(
    name: str, make_adapters: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()

    def asked(*_: Any, **__: Any) -> None:
        raise OSError("the hub is asked")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", asked)
    words = f"base must be an existing folder or a hub name, got {name!r}"
    if name == "models/modle":
        words += ", which is a path since models is a folder here"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        load_base(name, None)
    with pytest.raises(ValueError, match=re.escape(words)):
        Ensemble.from_pretrained(name, make_adapters(1))
    with pytest.raises(OSError, match="the hub is asked"):
        load_base("some-org/modle", None)
    # A model that was downloaded before keeps its name, whatever folders are here.
    cached = "adapmixed.ensemble.public_model.try_to_load_from_cache"
    monkeypatch.setattr(cached, lambda name, file: f"{name}/{file}")
    with pytest.raises(OSError, match="the hub is asked"):
        load_base("models/modle", None)


def test_adapted_layers_have_their_full_names(base: Any, make_adapters: Make) -> None:
    adapters = make_adapters(1)
    full, (rank,) = next(iter(adapted_layers(adapters).items()))
    short = full.rsplit(".", 1)[-1]
    words = f"full names of layers, got '{short}' instead of '{full}'"
    with pytest.raises(ValueError, match=words):
        Ensemble.from_pretrained(base, adapters, adapted={short: [rank]})
    with pytest.raises(
        ValueError, match=f"got '{short}': a full name is needed, such as '.*{short}'"
    ):
        Ensemble.from_pretrained(base, [None], adapted={short: [rank]})


def test_members_are_counted_once(base: Any, make_adapters: Make, tmp_path: Path) -> None:
    (folder,) = make_adapters(1)
    with pytest.raises(ValueError, match="at least one private model"):
        Ensemble.from_pretrained(base, [])
    with pytest.raises(ValueError, match="members must be distinct, got .* more than once"):
        Ensemble.from_pretrained(base, [folder, folder.parent / "." / folder.name])
    with pytest.raises(ValueError, match="num_models"):
        Ensemble(base, [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 5}, "format_version|newer"),
        ({"adapted": {"lm_head": []}}, "adapted"),
        ({"num_models": 3}, "num_models"),
        ({"members": [], "num_models": 0}, "at least one"),
        ({"members": ["a", "a"]}, "distinct"),
        ({"members": ["a", "../b"]}, "plain folder names"),
        ({"base_files": {"vocab.json": "zz"}}, "base_files"),
        ({"shards": [{}]}, "each of the 2 members"),
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
        {"lm_head": (2, 8)},
        base_files={"merges.txt": "d" * 64},
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
    (single := tmp_path / "single").mkdir()
    (single / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="a single adapter: give a list of such folders"):
        read_manifest(single)


def test_a_fingerprint_is_of_the_members_in_their_order(make_adapters: Make) -> None:
    """Charges belong to members, so in another order one shard would pay for another."""
    one, two = make_adapters(2)
    found = {
        fingerprint("base", member_digests(members), {})
        for members in ([one, two], [two, one], [one, None], [None, one], [one, one])
    }
    assert len(found) == 5


def test_a_fingerprint_is_of_what_answers(make_adapters: Make) -> None:
    """Settings that change an answer count, versions and names do not; nor does a hub's branch."""
    (member,) = make_adapters(1)
    path = member / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    before = fingerprint("me/base", member_digests([member]), {}, "abc")
    assert fingerprint("me/base", member_digests([member]), {}, "abd") != before
    assert fingerprint("you/base", member_digests([member]), {}, "abc") != before
    for name in ("peft_version", "base_model_name_or_path", "inference_mode"):
        path.write_text(json.dumps(config | {name: "other"}, indent=3))
        assert fingerprint("me/base", member_digests([member]), {}, "abc") == before
    path.write_text(json.dumps(config | {"lora_alpha": 17}))
    assert fingerprint("me/base", member_digests([member]), {}, "abc") != before


def test_a_fingerprint_is_of_what_was_read(
    make_adapters: Make, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise old weights could answer under the fingerprint of the new ones."""
    one, two = make_adapters(2)
    read = parts.read_adapters
    before = Ensemble.from_pretrained(base, [one, two]).fingerprint

    def changed(model: Any, folders: list[Path]) -> Any:
        found = read(model, folders)
        shutil.copy(two / "adapter_model.safetensors", one)
        return found

    monkeypatch.setattr(parts, "read_adapters", changed)
    assert Ensemble.from_pretrained(base, [one, two]).fingerprint == before
    assert Ensemble.from_pretrained(base, [one, two]).fingerprint != before


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_member_without_a_file(make_adapters: Make, base: Any, name: str) -> None:
    members = make_adapters(2)
    (members[1] / name).unlink()
    with pytest.raises(ValueError, match=f"must be a peft folder, but .* no {name}"):
        Ensemble.from_pretrained(base, members)


def test_a_fingerprint_does_not_tell_where_the_base_lies(
    make_adapters: Make, base: Any, tmp_path: Path
) -> None:
    """A ledger is still that of the ensemble if the base's folder is renamed."""
    members = make_adapters(1)
    base.save_pretrained(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "renamed")
    before = Ensemble.from_pretrained(tmp_path / "base", members).fingerprint
    assert Ensemble.from_pretrained(tmp_path / "renamed", members).fingerprint == before
    (tmp_path / "renamed" / "special_tokens_map.json").write_text("{}")
    assert Ensemble.from_pretrained(tmp_path / "renamed", members).fingerprint != before
    assert fingerprint("base", [], {}) != fingerprint("renamed", [], {})
