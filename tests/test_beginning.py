"""BOS: every training block, scored window and prompt begins as the tokenizer begins a text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import around, of_windows, own_loss
from training_cases import a_run, write_base
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapmixed import Accountant, Ensemble, PublicOnly
from adapmixed.data import Document, demo_base
from adapmixed.evaluation import Evaluation, evaluate
from adapmixed.rng import SeededRandom
from adapmixed.serving.fields import conversation_of, prompts_of
from adapmixed.text import beginning_of, begun, text_ids
from adapmixed.training import finetune, token_blocks, token_stream, train_ensemble
from adapmixed_lab.dp_sgd import record_blocks

BOS = 5
TEXT = "The try statement specifies exception handlers and cleanup code for a group of statements."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_base(tmp_path_factory.mktemp("base") / "model")
    tokenizer = around(AutoTokenizer.from_pretrained(folder), BOS)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base).eval()


@pytest.fixture(scope="module")
def ensemble(base: Path) -> Ensemble:
    return Ensemble.from_pretrained(base, [None, None], adapted={"lm_head": 4})


def plain(ensemble: Ensemble, text: str = TEXT) -> list[int]:
    return list(ensemble.tokenizer(text, add_special_tokens=False)["input_ids"])


def evaluated(ensemble: Ensemble, tokens: list[int], **settings: Any) -> Evaluation:
    settings |= {"delta": 1e-5, "rng": SeededRandom(0)}
    return evaluate(ensemble, tokens, {"public": PublicOnly()}, **settings)[0]


@pytest.mark.parametrize(("before", "after"), [((), ()), ((BOS,), ()), ((BOS, 7), (0,))])
def test_a_beginning_is_what_stands_before_a_text(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    tokenizer = around(AutoTokenizer.from_pretrained(demo_base()), *before, after=after)
    assert beginning_of(tokenizer) == before and beginning_of(None) == ()
    ids = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert text_ids(tokenizer, TEXT) == [*before, *ids]
    assert text_ids(tokenizer, "") == list(before) or [0]  # the end of a text, without BOS
    assert begun((1, 2), [1, 2, 3]) == [1, 2, 3] and begun((1, 2), [2, 3]) == [1, 2, 2, 3]


def test_training_blocks_begin_with_it_and_score_the_same_tokens() -> None:
    inputs, labels = token_blocks([1, 2, 3, 4, 5], 3, (8, 9))
    assert inputs.tolist() == [[8, 9, 1, 2, 3], [8, 9, 4, 5, 0]]
    assert labels.tolist() == [[-100, -100, -100, 2, 3], [-100, -100, -100, 5, -100]]


def test_a_conversation_begins_with_one_in_training(ensemble: Ensemble) -> None:
    """A chat template writes BOS before every conversation."""
    texts = [ensemble.tokenizer.bos_token + TEXT, TEXT]
    tokens = token_stream(ensemble.tokenizer, texts)
    assert tokens == [*plain(ensemble), 0] * 2
    inputs, _ = token_blocks(tokens, 8, ensemble.beginning)
    assert inputs[0, :2].tolist() == [BOS, tokens[0]]


def test_records_of_dp_sgd_begin_with_it(ensemble: Ensemble) -> None:
    inputs, labels = record_blocks(ensemble.tokenizer, [Document("a", TEXT)], 6)
    assert inputs.shape[1] == 7 and bool((inputs[:, 0] == BOS).all())
    assert bool((labels[:, :2] == -100).all()) and labels[0, 2:].tolist() == inputs[0, 2:].tolist()


@pytest.mark.parametrize(("block", "stride"), [(8, None), (None, None), (8, 3)])
def test_scored_windows_begin_with_it(
    ensemble: Ensemble, model: Any, block: int | None, stride: int | None
) -> None:
    tokens = plain(ensemble)
    found = evaluated(ensemble, tokens, block=block, stride=stride)
    expected, queries = of_windows(model, [BOS], tokens, block or len(tokens), stride)
    assert found.queries == queries
    assert math.log(found.perplexity) == pytest.approx(math.log(expected), abs=1e-5)
    # One that stands there counts, and the first token of the text is scored.
    loss = own_loss(model, [BOS, *tokens], 1) / len(tokens)
    again = evaluated(ensemble, [BOS, *tokens])
    assert math.log(again.perplexity) == pytest.approx(loss, abs=1e-5)
    assert (ensemble.max_positions, ensemble.longest_text) == (32, 31)
    with pytest.raises(ValueError, match=r"block must be <= 31, got 32"):
        evaluated(ensemble, tokens * 4, block=32)


def test_the_harness_scores_it_as_context(ensemble: Ensemble, model: Any) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (the lm-eval extra)")
    from lm_eval.api.instance import Instance

    from adapmixed.evaluation.lm_eval import MixtureLM

    lm = MixtureLM(ensemble, PublicOnly(), accountant=Accountant(1e-5), rng=SeededRandom(0))
    ids = [BOS, *plain(ensemble)]
    whole, rest = (own_loss(model, ids, n) for n in (1, 1 + len(plain(ensemble, "The try"))))

    def request(kind: str, *arguments: str) -> Any:
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]

    (rolling,) = lm.loglikelihood_rolling(request("loglikelihood_rolling", TEXT))
    assert -rolling == pytest.approx(whole, rel=1e-6)
    assert lm._encode_pair(" ", TEXT)[0] == [BOS]
    for context, loss in (("The try", rest), ("", whole)):
        asked = request("loglikelihood", context, TEXT.removeprefix(context))
        ((value, _),) = lm.loglikelihood(asked)
        assert -value == pytest.approx(loss, rel=1e-6)


def test_prompts_begin_with_one(ensemble: Ensemble) -> None:
    tokenizer, ids = ensemble.tokenizer, plain(ensemble)
    assert prompts_of(tokenizer, [TEXT, "", tokenizer.bos_token + TEXT]) == (
        (BOS, *ids), (BOS,), (BOS, *ids),
    )  # fmt: skip
    assert prompts_of(tokenizer, [[3, 4]]) == ((3, 4),)  # ids are taken as they are
    for content in (TEXT, tokenizer.bos_token + TEXT):
        (found,) = conversation_of(tokenizer, [{"role": "user", "content": content}])
        assert found == (BOS, *ids)
    with pytest.raises(ValueError, match="at least one token"):
        prompts_of(tokenizer, [[]])


def test_members_see_it_and_another_beginning_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[torch.Tensor] = []

    def recorded(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = token_blocks(*arguments)
        blocks.append(found[0])
        return found

    monkeypatch.setattr(finetune, "token_blocks", recorded)
    run = a_run(tmp_path, base)
    manifest = train_ensemble(run, say=lambda _: None)
    assert manifest.beginning == (BOS,)
    assert sum(map(len, blocks)) > 8 and all(bool((ids[:, 0] == BOS).all()) for ids in blocks)
    ensemble = Ensemble.from_pretrained(base, run.output)
    assert ensemble.beginning == (BOS,)
    path = run.output / "ensemble.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for beginning, error in (([], "beginning .*must be \\[5\\].*got \\[\\]: train"), ("5", "list")):
        path.write_text(json.dumps(content | {"beginning": beginning}), encoding="utf-8")
        with pytest.raises(ValueError, match=error):
            Ensemble.from_pretrained(base, run.output)
    path.write_text(json.dumps(content | {"beginning": None}), encoding="utf-8")
    Ensemble.from_pretrained(base, run.output)  # of adapters that were trained elsewhere
    too_long = a_run(tmp_path, base, "long", config=replace(run.config, block_size=32))
    with pytest.raises(ValueError, match="<= the base's 31 positions after the 1 that"):
        train_ensemble(too_long, say=lambda _: None)
