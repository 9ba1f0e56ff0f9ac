"""Models that raise an error, models that are tried on loading, and padded vocabularies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from tiny_models import VOCAB, around, tokenizer

from adapmixed import Accountant, PrivateGenerator
from adapmixed.commands.doctor import sharing
from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import TESTED, Adapter, head_name, layer_shape, linear_names
from adapmixed.ensemble.public_model import check_model
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.training import token_stream
from adapmixed.training.settings import base_facts


def adapters(model: Any) -> list[Adapter]:
    """Return two random adapters of all linear layers but the output layer."""
    head, draw = head_name(model), partial(torch.randn, generator=torch.Generator().manual_seed(0))
    shapes = {
        name: layer_shape(model.get_submodule(name)) for name in linear_names(model) if name != head
    }
    return [
        Adapter(
            {
                name: (0.3 * draw(inputs, 2), 0.3 * draw(2, outputs))
                for name, (inputs, outputs) in shapes.items()
            }
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bart", "bart does not: left padding"),
        ("mixtral", "no mixture-of-experts layers, got mixtral with .*mlp"),
        ("qwen3_moe", "no mixture-of-experts layers, got qwen3_moe"),
        ("mamba", "key/value cache|attention layers only"),  # by the version of transformers
        ("lfm2", "attention layers only, .* got lfm2"),
        ("falcon_h1", "attention layers only, .* got falcon_h1"),  # a state besides attention
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
    model = tiny(family)
    ensemble = Ensemble(model, adapters(model))
    assert len(ensemble._cached_layers) == 2 < len(model.model.layers) == 4


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
    model.config.is_encoder_decoder = True
    refuses("decoder-only model, got llama", model)
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
    (layer,) = (name for name in linear_names(model) if name.endswith("1.mlp.down_proj"))
    last = [Adapter({layer: adapter.updates[layer]}) for adapter in adapters(model)]
    assert Ensemble(model, last).trunk.repeats_input  # whatever could be shared
    bert = tiny("bert").to(dtype)
    with pytest.raises(ValueError, match="bert does not: a later token changes earlier logits"):
        Ensemble(bert, adapters(bert))


def hooked(fault: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a change of a model: what its first MLP returns."""

    def change(model: Any) -> None:
        mlp = model.get_submodule("model.layers.0.mlp")
        mlp.register_forward_hook(lambda module, arguments, hidden: fault(hidden))

    return change


def without(ignored: str) -> Callable[[Any], None]:
    """Return a change of a model: an argument that it ignores."""

    def forward(whole: Any, past_key_values: Any = None, **arguments: Any) -> Any:
        return whole(**({"past_key_values": past_key_values, **arguments} | {ignored: None}))

    return lambda model: setattr(model, "forward", partial(forward, model.forward))


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        # All rows, that of two rows before, that of another member's same sequence, the first one.
        ("llama", hooked(lambda h: h + h.mean(0, True) / 999), "one row of a batch"),
        ("llama", hooked(lambda h: h + h.roll(2, 0) / 999), "one row of a batch"),
        ("llama", hooked(lambda h: h + h.roll(len(h) // 3, 0) / 999), "one row of a batch"),
        ("llama", hooked(lambda h: h + h[:1] / 999), "one row of a batch"),
        ("llama", hooked(lambda h: h + 0.5 * h[:, -1:]), "a later token"),
        ("llama", hooked(lambda h: h * h.shape[1]), "cache changes"),
        ("llama", hooked(lambda h: h[..., :3]), "RuntimeError"),
        ("llama", hooked(lambda h: h + (len(h) == 2 * 3) * 0.5), "join and leave a batch"),
        ("gpt2", without("position_ids"), "left padding"),
        ("gpt2", without("past_key_values"), "cache changes"),
    ],
)
def test_faults_are_found_on_loading(
    family: str, change: Callable[[Any], None], reason: str
) -> None:
    model = tiny(family)
    model.config.model_type = "new"
    Ensemble(copy.deepcopy(model), adapters(model))
    change(model)
    with pytest.raises(ValueError, match=f"new does not: .*{reason}"):
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


# Padded vocabularies

KNOWN = VOCAB - 7
BEYOND = f"got {VOCAB} with vocab_size = {VOCAB}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ids", [list(range(KNOWN)), [i for i in range(VOCAB) if i % 5 != 2]], ids=["tail", "holes"]
)
def test_ids_without_a_token_are_masked_in_every_row(dtype: torch.dtype, ids: list[int]) -> None:
    base = tiny("gpt2").to(dtype)
    names = ["transformer.h.0.attn.c_attn"]
    members = [Adapter({n: (torch.randn(16, 2), torch.randn(2, 48)) for n in names}), Adapter({})]
    plain = Ensemble(tiny("gpt2").to(dtype), members)
    padded = Ensemble(base, members, tokenizer=tokenizer(ids))
    prompt = torch.tensor([[3, 5, 8], [1, 0, 4]])
    missing = sorted(set(range(VOCAB)) - set(ids))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    outputs = [
        (ensemble.logits(prompt), ensemble.decoder(prompt, attention_mask=mask).logits[:2])
        for ensemble in (plain, padded)
    ]
    for before, after in zip(*outputs, strict=True):
        for expected, found in zip(before, after, strict=True):
            assert torch.equal(found[..., ids], expected[..., ids])
            assert bool(expected.isfinite().all())
            assert bool((found[..., missing] == float("-inf")).all())
    assert torch.equal(outputs[1][0][0][1], outputs[1][0][1])


def test_tokens_that_the_model_lacks_are_never_released_and_refused_in_prompts() -> None:
    """Google's Gemma 3 tokenizers have <image_soft_token>, one id beyond the text models."""
    wide = tokenizer(list(range(VOCAB + 1)))
    ensemble = Ensemble(tiny("gpt2"), [Adapter({})], tokenizer=wide)
    assert bool(ensemble.logits(torch.tensor([[3]]))[0].isfinite().all())
    accountant = Accountant(delta=1e-5, epsilon=1.0)
    generator = PrivateGenerator(ensemble, ClippedLogPool(-0.25, 0.5), accountant)
    reason = rf"tokens in \[0, {VOCAB}\), the base's vocab_size, got {VOCAB} \(w{VOCAB}\)"
    with pytest.raises(ValueError, match=reason):
        generator.generate(f"w3 w{VOCAB} w4", max_new_tokens=2)
    assert accountant.queries == 0
    assert token_stream(tokenizer([0, 1, VOCAB], eos_token="w0"), ["w1 w61 w1"], VOCAB) == [1, 1, 0]


@pytest.mark.parametrize(
    ("wide", "reason"),
    [
        (
            around(tokenizer(list(range(VOCAB + 1)), eos_token="w0"), VOCAB),
            f"begins a text, {BEYOND}",
        ),
        (tokenizer(list(range(VOCAB + 1)), eos_token=f"w{VOCAB}"), f"end-of-text token.*{BEYOND}"),
        (None, r"\(eos_token\), got no tokenizer"),
    ],
)
def test_a_base_must_have_the_tokens_around_a_text(wide: Any, reason: str, tmp_path: Path) -> None:
    base = tiny("gpt2")
    base.save_pretrained(tmp_path)
    if wide is not None:
        wide.save_pretrained(tmp_path)
    for refuse in (sharing, base_facts):
        with pytest.raises(ValueError, match=reason):
            refuse(str(tmp_path))
    if reason.startswith("begins"):
        with pytest.raises(ValueError, match=reason):
            Ensemble(base, [Adapter({})], tokenizer=wide)
