"""The stacked layer against peft's own loop, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import peft_logits, write_adapter

from adapmixed.models import BatchedLoRA, Ensemble, read_adapter, stack_adapters

Make = Callable[..., list[Path]]


def edit(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return folder


def test_equals_peft_loop(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    folders = make_adapters(4)
    private, public = Ensemble.load(base, folders).logits(ids)
    expected = peft_logits(base, folders, ids)
    with torch.no_grad():
        plain = base(input_ids=ids).logits
    torch.testing.assert_close(private, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(public, plain, rtol=0, atol=1e-5)
    assert float((private - public).abs().amax(dim=(1, 2, 3)).min()) > 0.1


def test_unequal_ranks_rslora_and_targets(
    base: Any, family: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    first, second = ("c_attn", "c_fc") if family == "gpt2" else ("q_proj", "gate_proj")
    folders = [
        write_adapter(base, tmp_path / "a", seed=1, r=1, target_modules=[first]),
        write_adapter(base, tmp_path / "b", seed=2, r=5, target_modules=[second]),
        write_adapter(
            base, tmp_path / "c", seed=3, r=4, use_rslora=True, target_modules=[first, second]
        ),
        write_adapter(
            base,
            tmp_path / "d",
            seed=4,
            target_modules=[first],
            rank_pattern={f".*0.*{first}": 2},
            alpha_pattern={f".*1.*{first}": 11},
        ),
        write_adapter(
            base, tmp_path / "e", seed=5, target_modules=[second], layers_to_transform=[1]
        ),
        write_adapter(base, tmp_path / "f", seed=6, target_modules=rf".*\.1\..*{first}"),
    ]
    private, _ = Ensemble.load(base, folders).logits(ids)
    expected = peft_logits(base, folders, ids)
    torch.testing.assert_close(private, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapted_output_head(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    """peft stores a copy of the adapted head: accepted if it is the base's, else refused."""
    folders = make_adapters(2, target_modules=["lm_head"], fan_in_fan_out=False)
    assert any("base_layer" in k for k in load_file(folders[0] / "adapter_model.safetensors"))
    private, _ = Ensemble.load(base, folders).logits(ids)
    torch.testing.assert_close(private, peft_logits(base, folders, ids), rtol=0, atol=1e-5)

    def train_head(weights: dict[str, torch.Tensor]) -> None:
        next(value for name, value in weights.items() if "base_layer" in name)[0, 0] += 1.0

    with pytest.raises(ValueError, match="differs from the base's"):
        read_adapter(base, rewrite(folders[0], train_head))


def test_bfloat16_base_keeps_adapters_in_float32(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    folders = make_adapters(3)
    low = base.to(torch.bfloat16)
    ensemble = Ensemble.load(low, folders)
    private, public = ensemble.logits(ids)
    assert private.dtype == public.dtype == torch.bfloat16
    layers = [m for m in ensemble._forward.model.modules() if isinstance(m, BatchedLoRA)]
    assert layers
    assert all(m.down.dtype == m.up.dtype == torch.float32 for m in layers)
    expected = peft_logits(low, folders, ids).float()
    scale = float(expected.abs().max())
    torch.testing.assert_close(private.float(), expected, rtol=0, atol=scale * 2.0**-6)


def test_bfloat16_layer_rounds_once() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 24, dtype=torch.bfloat16)
    down, up = torch.randn(2, 16, 3), torch.randn(2, 3, 24)
    x = torch.randn(6, 5, 16).to(torch.bfloat16)
    with torch.no_grad():
        y = BatchedLoRA(layer, down, up)(x)
        exact = layer(x).double()
        for i in range(2):
            rows = slice(2 + 2 * i, 4 + 2 * i)
            exact[rows] += x[rows].double() @ down[i].double() @ up[i].double()
    half_ulp = exact.abs() * 2.0**-8
    assert bool(((y.double() - exact).abs() <= half_ulp + 1e-5).all())


def test_half_precision_adapter_files_are_read_as_float32(make_adapters: Make, base: Any) -> None:
    (folder,) = make_adapters(1)

    def halve(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            weights[name] = weights[name].half()

    adapter = read_adapter(base, rewrite(folder, halve))
    assert {t.dtype for pair in adapter.updates.values() for t in pair} == {torch.float32}


def test_rows_must_fill_blocks() -> None:
    layer = BatchedLoRA(torch.nn.Linear(4, 4), torch.zeros(2, 4, 1), torch.zeros(2, 1, 4))
    with pytest.raises(ValueError, match="multiple of num_models"):
        layer(torch.zeros(4, 1, 4))


def test_no_adapters_refused(base: Any) -> None:
    with pytest.raises(ValueError, match="at least one adapter"):
        stack_adapters(base, [])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias must be none"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"some_later_setting": {"x": 1}}, "some_later_setting"),
        ({"r": 4}, "must have shapes"),
        ({"r": 0}, "r must be"),
        ({"lora_alpha": "six"}, "lora_alpha"),
        ({"rank_pattern": {".*": 2}}, "must have shapes"),
        ({"target_modules": ["other"]}, "do not agree"),
    ],
)
def test_refused_settings(
    base: Any, make_adapters: Make, settings: dict[str, Any], reason: str
) -> None:
    (folder,) = make_adapters(1)
    with pytest.raises(ValueError, match=reason) as caught:
        read_adapter(base, edit(folder, **settings))
    assert str(folder) in str(caught.value)


def test_refused_fan_in_fan_out(base: Any, family: str, make_adapters: Make) -> None:
    (folder,) = make_adapters(1)
    read_adapter(base, folder)
    with pytest.raises(ValueError, match="fan_in_fan_out"):
        read_adapter(base, edit(folder, fan_in_fan_out=family == "llama"))


def test_refused_weights(base: Any, make_adapters: Make) -> None:
    def missing_layer(weights: dict[str, torch.Tensor]) -> None:
        name = sorted(weights)[0].replace("lora_A", "lora_*").replace("lora_B", "lora_*")
        del weights[name.replace("*", "A")], weights[name.replace("*", "B")]

    def missing_half(weights: dict[str, torch.Tensor]) -> None:
        del weights[next(name for name in weights if "lora_B" in name)]

    def foreign_module(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.replace(".0.", ".9.")] = weights.pop(name)

    def not_finite(weights: dict[str, torch.Tensor]) -> None:
        next(value for name, value in weights.items() if "lora_B" in name)[0, 0] = float("nan")

    def embedding(weights: dict[str, torch.Tensor]) -> None:
        weights["base_model.model.transformer.wte.lora_embedding_A"] = torch.zeros(3, 61)

    def empty(weights: dict[str, torch.Tensor]) -> None:
        weights.clear()

    cases = [
        (missing_layer, "do not agree"),
        (missing_half, "got only lora_A"),
        (foreign_module, "has no module"),
        (not_finite, "must be finite"),
        (embedding, "lora_A, lora_B of linear layers"),
        (empty, "holds no weights"),
    ]
    folders = make_adapters(len(cases))
    for folder, (change, reason) in zip(folders, cases, strict=True):
        with pytest.raises(ValueError, match=reason):
            read_adapter(base, rewrite(folder, change))


def test_refused_folders(base: Any, make_adapters: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no adapter_config.json"):
        read_adapter(base, tmp_path)
    first, second, third = make_adapters(3)
    (first / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="pickled weights are not read"):
        read_adapter(base, first)
    (second / "adapter_model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="readable safetensors"):
        read_adapter(base, second)
    (third / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        read_adapter(base, third)


def test_adapter_of_a_wider_base_is_refused(family: str, base: Any, tmp_path: Path) -> None:
    target = "c_attn" if family == "gpt2" else "q_proj"
    folder = write_adapter(base, tmp_path / "a", seed=1, target_modules=[target])

    def widen(weights: dict[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            if "lora_A" in name:
                weights[name] = torch.zeros(value.shape[0], value.shape[1] + 1)

    with pytest.raises(ValueError, match="must have shapes"):
        read_adapter(base, rewrite(folder, widen))
