"""An ensemble of random heads on the built-in base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

import adapmixed
from adapmixed.ensemble import Manifest, base_files, write_manifest
from adapmixed.mechanisms import ClippedLogPool

BASE = Path(adapmixed.__file__).parent / "assets" / "demo" / "base"
POOL = ClippedLogPool(-1.0, 1.0, 4.0, queries=100_000)
MODELS, RANK = 64, 8
TEXTS = [
    "The",
    "A function that returns a list of the names",
    "This module",
    "The statement is a",
    "An object is",
    "Every class has one or more base classes, and",
    "If the name",
    "Return the",
]


def write_base(folder: Path) -> Path:
    """Write the built-in base with a chat template."""
    shutil.copytree(BASE, folder)
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def write_ensemble(folder: Path, models: int = MODELS, *, base: Path = BASE, seed: int = 1) -> Path:
    """Write members with random output layers, whose logits differ by about 1."""
    generator, sizes = torch.Generator().manual_seed(seed), AutoConfig.from_pretrained(base)
    width, vocab = sizes.hidden_size, sizes.vocab_size
    names: list[str | None] = []
    for number in range(models):
        name = f"member-{number:03d}"
        (folder / name).mkdir(parents=True)
        down = torch.randn(RANK, width, generator=generator) / width**0.5
        up = torch.randn(vocab, RANK, generator=generator) / RANK**0.5
        prefix = "base_model.model.lm_head"
        save_file(
            {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up},
            folder / name / "adapter_model.safetensors",
        )
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
            "target_modules": ["lm_head"], "bias": "none", "base_model_name_or_path": str(base),
        }  # fmt: skip
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        names.append(name)
    write_manifest(
        folder, Manifest(str(base), tuple(names), {"lm_head": RANK}, base_files=base_files(base))
    )
    return folder
