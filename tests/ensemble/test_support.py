"""Models that raise an error, and models that are tried on loading."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import linear_names, tiny
from tiny_models import VOCAB, write_adapter

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import Adapter, layer_shape
from adapmixed.ensemble.support import TESTED, check_model


def adapters(model: Any, count: int = 2, only: str = "") -> list[Adapter]:
    """Return random adapters of the linear layers named with `only`, but for the output layer."""
    names = [
        name
        for name, _ in model.named_modules()
        if name.rpartition(".")[2] in linear_names(model) and only in name
    ]
    shapes = {name: layer_shape(model.get_submodule(name)) for name in names}
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return [
        Adapter(
            {
                name: (0.3 * draw(size_in, 2), 0.3 * draw(2, size_out))
                for name, (size_in, size_out) in shapes.items()
            }
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bart", "bart does not: left padding"),
        ("mixtral", "no mixture-of-experts layers, got mixtral with .*mlp"),
        ("qwen3_moe", "no mixture-of-experts layers, got qwen3_moe"),
        ("mamba", "key/value cache|attention layers only"),  # by the version of transformers
        ("lfm2", "attention layers only, got lfm2"),
        ("falcon_h1", "attention layers only, got falcon_h1"),  # a state besides attention
    ],
)
def test_refused_families(family: str, reason: str) -> None:
    model = tiny(family)
    with pytest.raises(ValueError, match=reason):
        Ensemble(model, [Adapter({})])


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_shared_keys_and_values_pass_the_trial(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upper layers cache nothing; test_families.py has the logits, decoding and memory."""
    monkeypatch.setattr("adapmixed.ensemble.ensemble.TESTED", frozenset())
    monkeypatch.setattr("adapmixed.ensemble.trunk.SHARES_NO_BLOCK", frozenset())
    model = tiny(family)
    ensemble = Ensemble(model, adapters(model))
    assert ensemble.trunk.repeats_input  # its blocks cannot be shared, which the trial finds
    assert len(ensemble._cached_layers) == 2 < len(model.model.layers) == 4


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": VOCAB}
    model = BartForConditionalGeneration(BartConfig(**sizes))
    with pytest.raises(ValueError, match="decoder-only model, got bart"):
        Ensemble(model, [Adapter({})])


def test_refused_settings() -> None:
    def refuses(reason: str, model: Any) -> None:
        with pytest.raises(ValueError, match=reason):
            Ensemble(model, [Adapter({})])

    for family in ("gemma", "gemma3_text"):
        model = tiny(family, use_bidirectional_attention=True)
        refuses(f"causal, got {family} with use_bidirectional_attention = True", model)
    check_model(tiny("gemma4_text", use_bidirectional_attention="vision"))  # of images alone
    model = tiny("llama")
    model.config.layer_types = ["full_attention", "indexed_attention"]
    refuses("values alone, got llama with DynamicIndexedLayer", model)
    model = tiny("llama")
    model.is_quantized = True
    refuses("must not be quantised", model)
    model = tiny("llama")
    model.lm_head = torch.nn.Linear(16, VOCAB - 1)
    refuses(f"vocab_size = {VOCAB}, got {VOCAB - 1}", model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_without_tests_are_tried(dtype: torch.dtype) -> None:
    assert not {"glm", "bert"} & TESTED
    model = tiny("glm").to(dtype)
    members, name = adapters(model), "model.layers.0.self_attn.q_proj"
    layer = Ensemble(model, members).model.get_submodule(name)
    for i, member in enumerate(members):  # the trial restores the updates that it removed
        assert torch.equal(layer.up[i], member.updates[name][1])
    bert = tiny("bert").to(dtype)
    with pytest.raises(ValueError, match="bert does not: a later token changes earlier logits"):
        Ensemble(bert, adapters(bert))


def couple_rows(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + 2.0**-10 * hidden.mean(dim=0, keepdim=True)


def look_ahead(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + 0.5 * hidden[:, -1:]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (couple_rows, "changes another row"),
        (look_ahead, "a later token"),
        (lambda hidden: hidden * hidden.shape[1], "cache changes"),
        (lambda hidden: hidden[..., :3], "RuntimeError"),
        (lambda hidden: hidden + (len(hidden) == 2 * 3) * 0.5, "join and leave a batch"),
    ],
)
def test_faults_are_found_on_loading(fault: Any, reason: str) -> None:
    model = tiny("llama")
    model.config.model_type = "new"
    Ensemble(copy.deepcopy(model), adapters(model))
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, hidden: fault(hidden))
    with pytest.raises(ValueError, match=f"new does not: .*{reason}"):
        Ensemble(model, adapters(model))


def without(ignored: str) -> Any:
    def forward(whole: Any, past_key_values: Any = None, **given: Any) -> Any:
        return whole(**({"past_key_values": past_key_values, **given} | {ignored: None}))

    return forward


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (without("position_ids"), "left padding"),
        (without("past_key_values"), "cache changes"),
    ],
)
def test_models_that_ignore_arguments_or_padding_are_found(forward: Any, reason: str) -> None:
    model = tiny("gpt2")
    model.config.model_type = "new"
    model.forward = partial(forward, model.forward)
    with pytest.raises(ValueError, match=reason):
        Ensemble(model, adapters(model))


def test_a_longrope_window_ends_where_frequencies_change() -> None:
    factors = {"short_factor": [1.0, 1.0], "long_factor": [3.0, 4.0]}
    model = tiny(
        "phi3",
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0,
            "original_max_position_embeddings": 8, **factors,
        },
    )  # fmt: skip
    ensemble = Ensemble(model, adapters(model))
    assert ensemble.max_positions == 8
    with pytest.raises(ValueError, match="max_positions = 8"):
        ensemble.logits(torch.zeros((1, 9), dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapted_embeddings_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    folder = write_adapter(model, tmp_path / "a", seed=0, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="lora_A and lora_B of linear layers"):
        Ensemble.from_pretrained(model, [folder])
