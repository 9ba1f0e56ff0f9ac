"""The folders of pretrained models, and what is loaded from them once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from adapmixed import Ensemble

ROOT = Path(__file__).parents[2]
PARAGRAPHS = (
    "The city of Paris is the capital of France. It lies on the river Seine, in the north of the "
    "country. About two million people live there, and more than twelve million in its suburbs. "
    "The city was founded in the third century before Christ by a Celtic people called the "
    "Parisii, who gave it its name. In the Middle Ages it was the largest city of the western "
    "world, and its university was one of the first in Europe. Today it is known for its museums, "
    "its food and its fashion. ",
)
PARAGRAPHS += (
    PARAGRAPHS[0]
    .replace("Paris", "Vienna")
    .replace("France", "Austria")
    .replace("Seine", "Danube"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("real")


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Return the folder of a pretrained model."""
    models = Path(os.environ.get("ADAPMIXED_REAL_MODELS") or ROOT / "build" / "models")
    if not (models / request.param).is_dir():
        make = f"python scripts/real_models.py --only {request.param} --out {models}"
        pytest.fail(f"{models / request.param} is missing; this makes it: {make}", pytrace=False)
    return models / str(request.param)


@pytest.fixture(scope="session")
def base(folder: Path) -> Any:
    """Return the model as transformers loads it, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def public(folder: Path) -> Ensemble:
    """Return two absent members, which answer as the public model does."""
    return Ensemble.from_pretrained(folder, [None, None], adapted={"lm_head": [4]})


@pytest.fixture(scope="session")
def tokenizer(public: Ensemble) -> Any:
    return public.tokenizer
