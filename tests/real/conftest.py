"""The folders of pretrained models, and what is loaded from them once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from adapmixed import Ensemble

PARAGRAPH = (
    "The city of {0} is the capital of {1}. It lies on the river {2}, in the north of the country. "
    "About two million people live there, and more than twelve million in its suburbs. The city "
    "was founded in the third century before Christ by a Celtic people called the {0}ii, who gave "
    "it its name. In the Middle Ages it was the largest city of the western world, and its "
    "university was one of the first in Europe. Today it is known for its museums, its food and "
    "its fashion. "
)


@pytest.fixture(scope="session")
def paragraphs() -> list[str]:
    """Return two paragraphs of English."""
    cities = (("Paris", "France", "Seine"), ("Vienna", "Austria", "Danube"))
    return [PARAGRAPH.format(*names) for names in cities]


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Return the folder of a pretrained model."""
    built = Path(__file__).parents[2] / "build" / "models"
    models = Path(os.environ.get("ADAPMIXED_REAL_MODELS") or built)
    if not (models / request.param).is_dir():
        make = f"python scripts/real_models.py --only {request.param} --out {models}"
        pytest.fail(f"{models / request.param} is missing; this makes it: {make}", pytrace=False)
    return models / str(request.param)


@pytest.fixture(scope="session")
def base(folder: Path) -> Any:
    """Return the model as transformers loads it, in its folder's fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="session")
def public(folder: Path) -> Ensemble:
    """Return two absent members, which answer as the public model does."""
    return Ensemble.from_pretrained(folder, [None, None], adapted={"lm_head": 4})
