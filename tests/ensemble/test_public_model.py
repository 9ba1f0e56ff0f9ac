"""Public models that are refused, and names that are not asked of the hub."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import Make
from tiny_models import write_adapter

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.public_model import load_base


def test_refused_bases(base: Any, make_adapters: Make, tmp_path: Path) -> None:
    from peft import PeftModel

    folders = make_adapters(1)
    head = [write_adapter(base, tmp_path / "head", seed=0, target_modules=["lm_head"])]
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), folders[0])
    for bad, reason in [
        (adapted, "carries adapters"),
        (Ensemble.from_pretrained(base, folders).model, "carries adapters"),
        (Ensemble.from_pretrained(base, head).model, "carries adapters"),
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
