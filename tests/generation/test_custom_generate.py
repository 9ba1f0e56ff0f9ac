"""The interface of transformers: `generate` with `custom_generate=private_generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered
from generation_cases import FIRST, PROMPT, tokens_of
from tiny_models import POSITIONS, tiny_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from adapmixed.data.demo import demo_base
from adapmixed.ensemble import Ensemble
from adapmixed.errors import BudgetSpentError
from adapmixed.generation.custom_generate import private_generate
from adapmixed.generation.refused import REASONS
from adapmixed.generation.settings import HONOURED, NEUTRAL, NOT_RUN, check_settings
from adapmixed.mechanisms import AdaPMixED, PMixED, Unprotected
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom


@pytest.fixture
def ensemble(base: Any, make_adapters: Callable[..., list[Path]]) -> Ensemble:
    return Ensemble.from_pretrained(base, make_adapters(2))


def hf(base: Any, ensemble: Ensemble | None, prompt: torch.Tensor, **settings: Any) -> torch.Tensor:
    arguments = {
        "do_sample": True, "max_new_tokens": 6, "mechanism": PMixED(8.0, 1e-5, 100, 3.0),
        "accountant": Accountant(1e-5), "rng": SeededRandom(3), "top_k": 0, "pad_token_id": 9,
    } | settings  # fmt: skip
    result: torch.Tensor = base.generate(
        prompt, custom_generate=private_generate, ensemble=ensemble, **arguments
    )
    return result


def test_transformers_generate(base: Any, ensemble: Ensemble) -> None:
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    accountant = Accountant(1e-5)
    here = hf(base, ensemble, prompt, attention_mask=mask, accountant=accountant)
    there = answered(
        ensemble, PMixED(8.0, 1e-5, 100, 3.0), prompt, attention_mask=mask, max_new_tokens=6,
        rng=SeededRandom(3), stop_token=0,
    )  # fmt: skip
    assert torch.equal(here[:, :3], prompt)
    assert torch.equal(here[:, 3:], there.masked_fill(there < 0, 9))
    assert accountant.queries == int((there >= 0).sum())


class Streamer(BaseStreamer):
    def put(self, value: Any) -> None:
        pass

    def end(self) -> None:
        pass


class OneToken(TopKLogitsWarper):  # type: ignore[misc]  # transformers is not followed
    """Inherits from a processor that is honoured, and does something else."""


@pytest.mark.parametrize(
    "given,message",
    [
        (
            {"inputs_embeds": torch.zeros(1, 3, 16), "position_ids": torch.zeros(1, 9)},
            "attention_mask, got inputs_embeds, too",
        ),
        ({"token_type_ids": torch.zeros(1, 3)}, "attention_mask, got token_type_ids, too"),
        ({"streamer": Streamer()}, "streamer must not be 'Streamer'"),
        ({"past_key_values": "filled"}, "past_key_values must be empty, got 2 positions"),
    ],
)
def test_model_inputs_that_are_refused(
    base: Any, ensemble: Ensemble, given: dict[str, Any], message: str
) -> None:
    if "past_key_values" in given:
        cache = DynamicCache(config=base.config)
        base(torch.tensor([[1, 2]]), past_key_values=cache)
        given = {"past_key_values": cache}
    accountant = Accountant(1e-5)
    config = GenerationConfig(do_sample=True, max_length=5)
    with pytest.raises(ValueError, match=message):
        private_generate(
            base, torch.tensor([[1, 2, 3]]), [], StoppingCriteriaList(), config,
            ensemble=ensemble, mechanism=Unprotected(), accountant=accountant, **given,
        )  # fmt: skip
    assert accountant.queries == 0


@pytest.mark.slow
def test_transformers_stop_strings(demo: Ensemble, base: Any, ensemble: Ensemble) -> None:
    """The test calls `generate` itself, which does not pass the tokenizer to a callable."""
    from transformers import AutoModelForCausalLM

    model, prompt = AutoModelForCausalLM.from_pretrained(demo_base()), tokens_of(demo, PROMPT)
    settings: dict[str, Any] = {"max_new_tokens": 30, "mechanism": FIRST, "top_k": 1}

    def text(**more: Any) -> str:
        released = hf(model, demo, prompt, **settings, **more)[0, prompt.shape[1] :]
        return str(demo.tokenizer.decode(released, skip_special_tokens=True))

    whole = text()
    stop = whole[20:23]
    for strings in (stop, [stop, "\u4e2d"]):
        for more in ({}, {"tokenizer": demo.tokenizer}):
            cut = text(stop_strings=strings, **more)
            assert whole.startswith(cut) and len(cut) < len(whole) and stop in cut
    assert text(stop_strings=["statement executes"]) == whole  # of the prompt
    for strings in ([""], [3]):
        with pytest.raises(ValueError, match="stop_strings must be a list of strings"):
            text(stop_strings=strings)
    with pytest.raises(ValueError, match="the ensemble has no tokenizer, got 'a': .*PrivateGener"):
        hf(base, ensemble, torch.tensor([[1, 2]]), stop_strings="a")
    given = GenerationConfig(stop_strings=["a"], do_sample=True, max_new_tokens=3)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(prompt, given, custom_generate=private_generate, ensemble=demo)


@pytest.mark.slow
def test_a_criterion_sees_what_is_returned(base: Any, ensemble: Ensemble) -> None:
    seen: list[torch.Tensor] = []

    def first_ends(ids: torch.Tensor, scores: None, **unused: Any) -> torch.Tensor:
        seen.append(ids)
        return torch.tensor([True, ids.shape[1] == 6])

    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    result = hf(base, ensemble, prompt, stopping_criteria=StoppingCriteriaList([first_ends]))
    assert result[0, 4:].tolist() == [9, 9]
    assert all(torch.equal(ids, result[:, : ids.shape[1]]) for ids in seen) and len(seen) == 3


def test_transformers_with_a_window_that_slides(base: Any, ensemble: Ensemble) -> None:
    prompt = torch.tensor([[1, 2, 3]])
    settings: dict[str, Any] = {"max_new_tokens": 2 * POSITIONS, "mechanism": Unprotected()}
    here = hf(base, ensemble, prompt, overflow="slide", **settings)
    there = answered(
        ensemble, Unprotected(), prompt, max_new_tokens=2 * POSITIONS, rng=SeededRandom(3),
        stop_token=0, overflow="slide",
    )  # fmt: skip
    assert torch.equal(here[:, 3:], there)


def test_every_setting_of_transformers_is_honoured_refused_or_of_a_pass_that_is_not_run() -> None:
    """All settings of the installed version are covered, and an unknown one raises."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    kinds = (HONOURED, NOT_RUN, NEUTRAL.keys())
    assert not fields - set().union(*kinds), "say in generation/settings.py what becomes of them"
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    for name in sorted(fields):
        config = GenerationConfig(do_sample=True)
        check_settings(config)
        values = [False, 3, 0.5, "other", {"a": 1}, [[1]]]
        if name in NEUTRAL:
            for value in (None, False, *NEUTRAL[name]):
                setattr(config, name, value)
                check_settings(config)
            assert name in REASONS, name
            for value in [True, *values[1:]]:
                setattr(config, name, value)
                if value not in NEUTRAL[name]:
                    with pytest.raises(ValueError, match=f"{name} must not be .* if tokens are"):
                        check_settings(config)
        elif name != "do_sample":
            for value in values:
                setattr(config, name, value)
                check_settings(config)
    config = GenerationConfig(do_sample=True)
    config.another_setting = 0.5
    with pytest.raises(ValueError, match="another_setting must not be 0.5 .* not known to leave"):
        check_settings(config)


def test_transformers_temperature_and_top_k_come_before_projection(
    base: Any, ensemble: Ensemble
) -> None:
    prompt = torch.tensor([[1, 2, 3]])
    here = hf(base, ensemble, prompt, temperature=0.4, top_k=3, mechanism=Unprotected())
    there = answered(
        ensemble, Unprotected(), prompt, max_new_tokens=6, rng=SeededRandom(3), stop_token=0,
        temperature=0.4, top_k=3,
    )  # fmt: skip
    assert torch.equal(here[:, 3:], there)


@pytest.mark.parametrize(
    "settings,message",
    [
        (
            {"do_sample": False},
            "do_sample must be True .* got False: pass do_sample=True to generate.*infinite",
        ),
        ({"num_beams": 3}, "num_beams must not be 3 .* a search keeps"),
        ({"top_p": 0.9}, "top_p must not be 0.9 .* but None or 1.0: .* another distri"),
        ({"repetition_penalty": 1.2}, "repetition_penalty must not be 1.2"),
        ({"logits_processor": [InfNanRemoveLogitsProcessor()]}, "must not be 'InfNanRemove"),
        ({"logits_processor": [OneToken(2)]}, "logits_processor must not be 'OneToken'"),
        ({"logits_processor": [TopKLogitsWarper(2)], "top_k": 5}, "must not be 'TopKLogitsWarper'"),
        (
            {"stopping_criteria": [StoppingCriteriaList([MaxTimeCriteria(5.0)])]},
            "max_time must not be 5.0",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha must not be 0.6 .* a search keeps"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate must not be True"),
        ({"min_new_tokens": 3}, "min_new_tokens must not be 3"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens must not be 2 .* a draft"),
        ({"max_time": 3.0}, "max_time must not be 3.0 .* where the answer ends"),
        (
            {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(5.0)])},
            "max_time must not be 5.0",
        ),
        ({"streamer": Streamer()}, "streamer must not be 'Streamer' .* PrivateGenerator.stream"),
        ({"assistant_model": tiny_model("gpt2")}, "assistant_model must not be 'GPT2.* a draft"),
        ({"position_ids": torch.tensor([[3, 4, 5]])}, "position_ids must count the tokens"),
        ({"memory_bytes": 1}, "memory_bytes must be >= "),
        ({"overflow": "crop"}, "overflow must be one of"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores must not be"),
        ({"num_return_sequences": 2}, "num_return_sequences must not be 2"),
        ({"ensemble": None}, "ensemble, mechanism and accountant must be given"),
        ({"accountant": None}, "ensemble, mechanism and accountant must be given"),
        (
            {"accountant": Accountant(1e-5, epsilon=3.0), "mechanism": AdaPMixED(3.0, 0.1)},
            "tells a bit",
        ),
        ({"max_new_tokens": POSITIONS}, "max_new_tokens must be <="),
    ],
)
@pytest.mark.slow
def test_transformers_settings_that_are_refused(
    base: Any, ensemble: Ensemble, settings: dict[str, Any], message: str
) -> None:
    given = {"ensemble": ensemble, "accountant": Accountant(1e-5)} | settings
    with pytest.raises(ValueError, match=message):
        hf(base, prompt=torch.tensor([[1, 2, 3]]), **given)
    assert given["accountant"] is None or given["accountant"].queries == 0


def test_transformers_calls_share_an_accountant(base: Any, ensemble: Ensemble) -> None:
    """Calls share one binding and one plan, which temperature and top-k do not affect."""
    accountant, prompt = Accountant(1e-5), torch.tensor([[1, 2, 3]])
    given: dict[str, Any] = {"accountant": accountant, "mechanism": PMixED(8.0, 1e-5, 8, 3.0)}
    hf(base, ensemble, prompt, **given, temperature=0.7)
    left = 8 - accountant.queries
    with pytest.raises(BudgetSpentError, match=f"got up to {left + 1} more"):
        hf(base, ensemble, prompt, **given, top_k=5, max_new_tokens=left + 1)
    with pytest.raises(ValueError, match="accountant must be charged for what it is bound to"):
        hf(base, ensemble, prompt, accountant=accountant, mechanism=Unprotected())
    assert accountant.queries == 8 - left
