"""Helpers of the tests of the table "Misuse" in docs/concepts/threat-model.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from decoding_cases import answered
from fake_ensemble import FakeEnsemble
from tiny_models import ADAPTED, TARGETS, tiny_model, write_adapter
from trained_demo import DEMO_ENSEMBLE

from adapmixed.data import demo_base
from adapmixed.ensemble import Manifest, write_manifest
from adapmixed.ensemble.public_model import base_files
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom

PROMPT = torch.tensor([[1, 2, 3]])
POOL = ClippedLogPool(-0.5, 0.5, queries=40)
MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]


def answer(mechanism: Any = POOL, ensemble: Any = None, **settings: Any) -> str:
    """Return the guarantee of a few answers."""
    accountant = settings.setdefault("accountant", Accountant(1e-5))
    settings = dict(max_new_tokens=2, rng=SecureRandom()) | settings
    answered(ensemble or FakeEnsemble(), mechanism, PROMPT, **settings)
    return str(accountant.guarantee())


def two_adapters(folder: Path) -> list[Path]:
    """Write the adapters of an ensemble whose public model is called some-org/Tiny."""
    base = tiny_model("gpt2")
    paths = [
        write_adapter(base, folder / f"m{i}", seed=i, target_modules=TARGETS["gpt2"])
        for i in range(2)
    ]
    for path in paths:
        name_base(path, "some-org/Tiny")
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED))
    return paths


def name_base(adapter: Path, name: str) -> None:
    config = adapter / "adapter_config.json"
    named = json.loads(config.read_text()) | {"base_model_name_or_path": name}
    config.write_text(json.dumps(named))


def named(name: str) -> Any:
    """Return a model like the one of `from_pretrained(name)`."""
    base = tiny_model("gpt2")
    base.config._name_or_path = name
    return base


def public_folder(folder: Path, **manifest: Any) -> Path:
    """Write the public model, record its digest in the ensemble, and return its folder."""
    base = folder.parent / "tiny"
    tiny_model("gpt2").save_pretrained(base)
    write_manifest(
        folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=base_files(base), **manifest)
    )
    return base
