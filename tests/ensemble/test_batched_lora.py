"""The stacked layer against peft's own loop, and what it refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TARGETS, VOCAB, adapted_layers, peft_logits, write_adapter

from adapmixed.ensemble import BatchedLoRA, Ensemble, read_adapter
from adapmixed.ensemble.adapted_layers import adapter_layers

Make = Callable[..., list[Path]]
Update = tuple[torch.Tensor, torch.Tensor]


def edit(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def logits(base: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return Ensemble.from_pretrained(base, [folder]).logits(ids)[0]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return folder


def test_unequal_ranks_rslora_and_targets(
    base: Any, family: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    first, second = ("c_attn", "c_fc") if family == "gpt2" else ("q_proj", "gate_proj")
    settings: list[dict[str, Any]] = [
        {"target_modules": [first], "r": 1},
        {"target_modules": [second], "r": 5},
        {"target_modules": [first, second], "r": 4, "use_rslora": True},
        {
            "target_modules": [first],
            "rank_pattern": {f".*0.*{first}": 2},
            "alpha_pattern": {f".*1.*{first}": 11},
        },
        {"target_modules": [second], "layers_to_transform": [1]},
        {"target_modules": rf".*\.1\..*{first}"},
    ]
    folders = [
        write_adapter(base, tmp_path / str(seed), seed=seed, **one)
        for seed, one in enumerate(settings, start=1)
    ]
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    private, public = ensemble.logits(ids)
    torch.testing.assert_close(private, peft_logits(base, folders, ids), rtol=0, atol=1e-5)
    assert float((private - public).abs().amax(dim=(1, 2, 3)).min()) > 0.1


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
    allowed = float(expected.abs().max()) * max(torch.finfo(one).eps for one in (trained, served))
    torch.testing.assert_close(private.float(), expected, rtol=0, atol=4 * allowed)

    def widen(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "base_layer" in name]:
            weights[name] = weights[name].float()

    read_adapter(base, rewrite(folder, widen))

    def train_head(weights: dict[str, torch.Tensor]) -> None:
        next(value for name, value in weights.items() if "base_layer" in name)[7, 3] *= 1.05

    with pytest.raises(ValueError, match="must equal the base's weights"):
        read_adapter(base, rewrite(folder, train_head))


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

    reason = f"must have the {VOCAB} rows of the base, got {VOCAB + 3}: .*resized embeddings"
    for one in (folder, rewrite(folder, lora_alone)) if target else (folder,):
        with pytest.raises(ValueError, match=reason):
            Ensemble.from_pretrained(base, [one])


def test_pickled_weights_are_refused_with_the_lines_that_convert_them(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    (folder,) = make_adapters(1)
    expected, file = logits(base, folder, ids), folder / "adapter_model.safetensors"
    strided = {key: value.T.clone().T for key, value in load_file(file).items()}
    torch.save(strided, folder / "adapter_model.bin")
    file.unlink()
    reason = r"must be a peft folder with adapter_model.safetensors.* got adapter_model.bin.*:\n"
    for read in (adapter_layers, lambda folder: read_adapter(base, folder)):
        with pytest.raises(ValueError, match=reason) as caught:
            read(folder)
    _, *lines = str(caught.value).splitlines()
    assert len(lines) == 2
    exec("\n".join(lines), {})
    assert torch.equal(logits(base, folder, ids), expected)


def test_adapters_are_kept_in_float32(base: Any, make_adapters: Make) -> None:
    """Whatever the dtype of their file and of the base."""

    def halve(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            weights[name] = weights[name].half()

    folders = [rewrite(folder, halve) for folder in make_adapters(2)]
    ensemble = Ensemble.from_pretrained(base.to(torch.bfloat16), folders)
    layers = [m for m in ensemble._forward.model.modules() if isinstance(m, BatchedLoRA)]
    groups = [group for layer in layers for group in layer.groups]
    assert {part.dtype for group in groups for part in (group.down, group.up)} == {torch.float32}


@pytest.mark.parametrize("ranks", [(3, 3), (3, 5)])
def test_bfloat16_layer_rounds_once(ranks: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 24, dtype=torch.bfloat16)
    updates = [(torch.randn(16, rank), torch.randn(rank, 24)) for rank in ranks]
    x = torch.randn(6, 5, 16).to(torch.bfloat16)
    with torch.no_grad():
        y = BatchedLoRA(layer, updates)(x)
        exact = layer(x).double()
        for i, (down, up) in enumerate(updates):
            rows = slice(2 + 2 * i, 4 + 2 * i)
            exact[rows] += x[rows].double() @ down.double() @ up.double()
    half_ulp = exact.abs() * 2.0**-8
    assert bool(((y.double() - exact).abs() <= half_ulp + 1e-5).all())


def random_update(rank: int, seed: int, shape: tuple[int, int] = (128, 384)) -> Update:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(shape[0], rank, generator=generator)
    return down, torch.randn(rank, shape[1], generator=generator)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_ranks_of_other_members(
    threads: int, length: int, dtype: torch.dtype
) -> None:
    """Group sizes 1 to N of every rank, at shapes where the matrix library's kernels differ."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    count = 8
    layer = torch.nn.Linear(128, 384, dtype=dtype)
    x = torch.randn(count + 1, length, 128).to(dtype)
    for rank in (1, 4, 7, 64):
        own = [random_update(rank, seed) for seed in range(count)]
        with torch.no_grad():
            expected = BatchedLoRA(layer, own)(x)
            public = layer(x)
        for kept in range(count):
            updates: list[Update | None] = [*own]
            for i in range(count):  # `kept` others stay in the group of `rank`, the rest leave it
                if (i - 2) % count > kept:
                    other = (1, 3, 7, 64, None)[i % 5]
                    updates[i] = None if other is None else random_update(other, 100 + i)
            with torch.no_grad():
                y = BatchedLoRA(layer, updates)(x)
            assert torch.equal(y[0], public[0])
            for i, update in enumerate(updates):
                if update is own[i]:
                    assert torch.equal(y[i + 1], expected[i + 1]), (rank, kept, i)
                elif update is None:
                    assert torch.equal(y[i + 1], public[i + 1])
                else:
                    assert not torch.equal(y[i + 1], expected[i + 1])


def test_rows_of_other_ranks_are_not_even_added_zero() -> None:
    """0 * inf is NaN and -0.0 + 0.0 is 0.0, so that a sum with zeros would show."""
    (group,) = BatchedLoRA(torch.nn.Linear(4, 6), [None, random_update(2, 0, (4, 6)), None]).groups
    y = torch.full((4, 5, 6), -0.0)
    group(y[1:], torch.full((3, 5, 4), float("inf")))
    for i in (0, 1, 3):
        assert bool((y[i] == 0).all()) and bool(y[i].signbit().all())
    assert not bool(y[2].isfinite().any())


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
        ({"rank_pattern": {".*": 2}}, "shapes"),
        ({"target_modules": ["other"]}, "must agree"),
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

    def wider(weights: dict[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            weights[name] = value.repeat(1, 2) if "lora_A" in name else value

    cases = [
        (missing_layer, "must agree"),
        (missing_half, "got only lora_A"),
        (foreign_module, "adapts .*9.*, which the base does not have"),
        (not_finite, "must be finite"),
        (embedding, "lora_A and lora_B of linear layers"),
        (empty, "holds no weights"),
        (wider, "must have shapes"),
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
    with pytest.raises(ValueError, match="there is no adapter_model.safetensors$"):
        read_adapter(base, first)
    (second / "adapter_model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="readable safetensors"):
        read_adapter(base, second)
    (third / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        read_adapter(base, third)
