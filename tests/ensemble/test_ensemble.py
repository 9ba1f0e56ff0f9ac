"""An ensemble's model, memory, limits and threads, its decoder, and the models that it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import TOKENS, Make, Sequences
from families import tiny
from tiny_models import POSITIONS, VOCAB, adapted_layers, write_adapter

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.decoder import Decoder
from adapmixed.ensemble.lora import TESTED, Adapter, head_name, layer_shape, linear_names
from adapmixed.ensemble.public_model import check_model


def test_given_model_is_left_alone_and_dropout_is_off(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    base.train()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    first, second = ensemble.logits(ids), ensemble.logits(ids)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert base.training and all(p.requires_grad for p in base.parameters())
    after = base.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_memory_bounds_the_logits_and_what_is_needed_is_named(
    base: Any, make_adapters: Make, ids: torch.Tensor
) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(3))
    with pytest.raises(ValueError, match="memory_bytes must be >= ") as short:
        ensemble.iter_logits(ids, memory_bytes=1)
    needed = int(str(short.value).split(">= ")[1].split()[0])
    with pytest.raises(ValueError, match=f"memory_bytes must be >= {needed} "):
        ensemble.iter_logits(ids, memory_bytes=needed - 1)
    for limit in (needed, 2 * needed, 4 * needed):
        stop = 0
        for part, private, public, _ in ensemble.iter_logits(ids, memory_bytes=limit):
            assert (private.numel() + public.numel()) * 4 <= limit
            assert part == slice(stop, stop + public.shape[1])
            stop = part.stop
        assert stop == ids.shape[1]


def test_input_limits(base: Any, make_adapters: Make, ids: torch.Tensor) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(1))
    long = torch.zeros((1, POSITIONS + 1), dtype=torch.int64)
    for call in (ensemble.logits, ensemble.iter_logits, ensemble.decoder):
        with pytest.raises(ValueError, match=f"max_positions = {POSITIONS}"):
            call(long)
    decoder = ensemble.decoder(long[:, :-1])
    before = decoder.logits
    with pytest.raises(ValueError, match="max_positions"):
        decoder.append(torch.tensor([1]))
    assert decoder.length == POSITIONS and torch.equal(decoder.logits[1], before[1])
    with pytest.raises(ValueError, match=r"tokens must have shape \(1,\)"):
        decoder.append(torch.tensor([1, 2]))
    for bad, reason in [
        (ids[0], "shape"),
        (ids[:, :0], "shape"),
        (ids.float(), "int64"),
        (ids + VOCAB, "must lie in"),
        (ids - VOCAB, "must lie in"),
    ]:
        with pytest.raises(ValueError, match=reason):
            ensemble.logits(bad)
    mask = torch.ones_like(ids)
    holes = [mask.clone() for _ in range(2)]
    holes[0][0, -1] = holes[1][0, 3] = 0
    for bad_mask in (mask[:, 1:], mask[0], 2 * mask, 0 * mask, -mask, *holes):
        with pytest.raises(ValueError, match="attention_mask must have the shape .* 0s before 1s"):
            ensemble.decoder(ids, attention_mask=bad_mask)


def test_logits_that_somebody_keeps_stay_as_they_are(tmp_path: Path) -> None:
    """The memory is used again unless a view or an array over it is held."""
    base = tiny("gpt2")
    folder = write_adapter(base, tmp_path / "a", seed=0, target_modules=["lm_head"])
    ensemble = Ensemble.from_pretrained(base, [folder])
    decoder = ensemble.decoder(torch.tensor([[1, 2, 3]]), new_tokens=4)
    place = decoder.logits[0].data_ptr()
    decoder.append(torch.tensor([4]))
    assert decoder.logits[0].data_ptr() == place
    kept, copied = decoder.logits[0][0].numpy(), decoder.logits[0][0].clone()
    decoder.append(torch.tensor([5]))
    assert decoder.logits[0].data_ptr() != place
    assert (kept == copied.numpy()).all() and not torch.equal(decoder.logits[0][0], copied)


def test_threads_share_an_ensemble(tmp_path: Path) -> None:
    base, names = tiny("llama"), ["lm_head", "1.mlp.up_proj"]
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, target_modules=one)
        for i, one in enumerate((names[:1], names[1:], names))
    ]
    ensemble = Ensemble.from_pretrained(base, folders, adapted=adapted_layers(folders))
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randint(1, VOCAB, (size, 4 + size), generator=generator) for size in (1, 2, 3)]
    expected = [ensemble.logits(ids)[0] for ids in inputs]

    def asks(number: int) -> bool:
        found = [ensemble.logits(inputs[number])[0] for _ in range(40)]
        return all(torch.equal(one, expected[number]) for one in found)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(asks, range(3)))


# The decoder's cache: as large as it is counted, and prompts that are read in parts.


def parts(decoder: Decoder) -> list[torch.Tensor]:
    return [one for layer in decoder._cache.layers for one in (layer.keys, layer.values)]


def rooms(decoder: Decoder) -> set[int]:
    """Return the positions that the tensors have room for."""
    return {
        one.untyped_storage().nbytes() // one[..., :1, :].numel() // one.element_size()
        for one in parts(decoder)
    }


def test_a_decoder_has_room_for_all_that_was_counted_and_no_more(
    base: Any, make_adapters: Make
) -> None:
    """Chunks, decoding, an end and a restart stay within the counted bytes."""
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    counted = ensemble.cache_bytes(3, 7 + 5)  # the largest of two layers counts twice
    with pytest.raises(ValueError, match="memory_bytes must be >= ") as caught:
        ensemble.decoder(TOKENS[:3, :7], memory_bytes=1, new_tokens=5)
    needed = int(str(caught.value).split(">= ")[1].split()[0])
    held = Sequences(ensemble, dict.fromkeys(range(3), 7), memory_bytes=needed, new_tokens=5)

    def check(rows: int) -> None:
        total = sum(one.untyped_storage().nbytes() for one in parts(held.decoder))
        assert total * 9 == counted * 2 * rows

    assert rooms(held.decoder) == {12}
    check(3)
    place = parts(held.decoder)[0].data_ptr()
    for _ in range(3):
        held.append()
    assert parts(held.decoder)[0].data_ptr() == place
    held.drop(1)
    for _ in range(2):
        held.append()
    assert rooms(held.decoder) == {12}
    check(2)


def test_room_is_reserved_for_those_who_are_left(base: Any, make_adapters: Make) -> None:
    ensemble = Ensemble.from_pretrained(base, make_adapters(2))
    held = Sequences(ensemble, {0: 4}, new_tokens=20)
    held.append()
    held.join({1: 6, 2: 2}, new=3)
    assert held.decoder.window == 24
    held.append()
    held.drop(0)
    assert held.decoder.window == 9
    held.append()
    assert rooms(held.decoder) == {9}
    held.drop(1)
    assert held.decoder.window == 5


@pytest.mark.parametrize("leaves_at", [0, 2, 5, None])
def test_a_prompt_is_read_in_parts(base: Any, make_adapters: Make, leaves_at: int | None) -> None:
    """A sequence may leave before all is read: test_families.py has the logits of the others."""
    ensemble = Ensemble.from_pretrained(base, make_adapters(1))
    held = Sequences(ensemble, {0: 9, 1: 4, 2: 6}, new_tokens=3, unread=True)
    decoder, other = held.decoder, ensemble.decoder(TOKENS[:1, :2])
    if leaves_at is not None:
        decoder.read(leaves_at)
        held.drop(0)
        assert (decoder.length, decoder.window) == (6, 9)
    for left in {None: (9, 5, 1), 0: (6, 2), 2: (6, 2), 5: (4,)}[leaves_at]:
        assert decoder.unread == left
        for call in (held.append, lambda: decoder.join(other), lambda: other.join(decoder)):
            with pytest.raises(ValueError, match=rf"read\(\) must be called first: {left} posit"):
                call()
        decoder.read(4)
    held.append()


# Models that raise an error, and models that are tried on loading.


def adapters(model: Any) -> list[Adapter]:
    """Return two random adapters of all linear layers but the output layer."""
    head, draw = head_name(model), partial(torch.randn, generator=torch.Generator().manual_seed(0))
    shapes = {
        name: layer_shape(model.get_submodule(name)) for name in linear_names(model) if name != head
    }
    return [
        Adapter(
            {
                name: (0.3 * draw(given, 2), 0.3 * draw(2, to))
                for name, (given, to) in shapes.items()
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
    last = [Adapter({layer: one.updates[layer]}) for one in adapters(model)]
    assert Ensemble(model, last).trunk.repeats_input  # whatever could be shared
    bert = tiny("bert").to(dtype)
    with pytest.raises(ValueError, match="bert does not: a later token changes earlier logits"):
        Ensemble(bert, adapters(bert))


def hooked(fault: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a change of a model: what its first MLP returns."""

    def change(model: Any) -> None:
        mlp = model.get_submodule("model.layers.0.mlp")
        mlp.register_forward_hook(lambda module, given, hidden: fault(hidden))

    return change


def without(ignored: str) -> Callable[[Any], None]:
    """Return a change of a model: an argument that it ignores."""

    def forward(whole: Any, past_key_values: Any = None, **given: Any) -> Any:
        return whole(**({"past_key_values": past_key_values, **given} | {ignored: None}))

    return lambda model: setattr(model, "forward", partial(forward, model.forward))


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        # All rows, that of two rows before, that of another member's same sequence, the first one.
        ("llama", hooked(lambda one: one + one.mean(0, True) / 999), "one row of a batch"),
        ("llama", hooked(lambda one: one + one.roll(2, 0) / 999), "one row of a batch"),
        ("llama", hooked(lambda one: one + one.roll(len(one) // 3, 0) / 999), "one row of a batch"),
        ("llama", hooked(lambda one: one + one[:1] / 999), "one row of a batch"),
        ("llama", hooked(lambda one: one + 0.5 * one[:, -1:]), "a later token"),
        ("llama", hooked(lambda one: one * one.shape[1]), "cache changes"),
        ("llama", hooked(lambda one: one[..., :3]), "RuntimeError"),
        ("llama", hooked(lambda one: one + (len(one) == 2 * 3) * 0.5), "join and leave a batch"),
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
