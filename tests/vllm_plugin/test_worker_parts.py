"""The sampler draws for granted rows alone, and vLLM's settings that void this are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="vllm is not installed: `make test-vllm` has it")

from vllm_cases import BASE, POOL, arguments, options, write_ensemble  # noqa: E402

from adapmixed.mechanisms import Origin  # noqa: E402
from adapmixed.privacy import BudgetSpentError  # noqa: E402
from adapmixed.vllm.heads import load  # noqa: E402
from adapmixed.vllm.sampler import PrivateSampler, Step  # noqa: E402
from adapmixed.vllm.till import Grants  # noqa: E402

PLAIN = SimpleNamespace(max_num_logprobs=None, logprob_token_ids=None)


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("ensembles") / "heads", 3)


class Public:
    """Stands in the place of vLLM's own sampler."""

    logprobs_mode, topk_topp_sampler = "raw_logprobs", None

    def __call__(self, *_: Any, **__: Any) -> str:
        return "public"


@pytest.fixture
def sampler(ensemble: Path) -> PrivateSampler:
    loaded = load(str(BASE), ensemble)
    heads = loaded.heads(torch.device("cpu"))
    return PrivateSampler(Public(), heads, POOL, 3, loaded.origin, None)


def step(sampler: PrivateSampler, paid: int = 2, **changes: Any) -> Step:
    positions = changes.pop("granted", {"a": 0, "b": 0})
    grants = Grants(paid, positions, changes.pop("origin", sampler._origin))
    given = {"names": ["a", "b"], "positions": [0, 0], "drawing": [True, True]} | changes
    shapes = [(1.0, None)] * len(given["names"])
    hidden = torch.zeros(len(given["names"]), 128)
    return Step(hidden=hidden, shapes=shapes, grants=grants, **given)


def drawn(sampler: PrivateSampler, rows: int = 2) -> Any:
    with torch.inference_mode():
        return sampler(logits=torch.zeros(rows, 2048), sampling_metadata=PLAIN)


def test_the_warm_up_is_public(sampler: PrivateSampler) -> None:
    assert drawn(sampler) == "public"
    sampler.start()
    with pytest.raises(RuntimeError, match="rows without a step"):
        drawn(sampler)


def test_a_step_is_drawn_once(sampler: PrivateSampler) -> None:
    sampler.start()
    sampler.expect(step(sampler))
    tokens = drawn(sampler).sampled_token_ids
    assert tokens.shape == (2, 1) and tokens.dtype == torch.int32
    with pytest.raises(RuntimeError, match="rows without a step"):
        drawn(sampler)
    with pytest.raises(RuntimeError, match="another token than the next one"):
        sampler.expect(step(sampler))
    sampler.expect(step(sampler, positions=[1, 1], granted={"a": 1, "b": 1}))
    drawn(sampler)
    sampler.forget(["a", "b"])
    sampler.expect(step(sampler))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"granted": {"a": 0}}, "no grant for its next token"),
        ({"granted": {"a": 0, "b": 1}}, "no grant for its next token"),
        ({"granted": {"a": 0, "b": 0, "c": 0}}, "a grant has no row"),
        ({"drawing": [True, False]}, "a grant has no row"),
        ({"origin": Origin("ab" * 32, ())}, "another ensemble was charged"),
    ],
)
def test_rows_and_grants_must_fit(
    sampler: PrivateSampler, changes: dict[str, Any], message: str
) -> None:
    sampler.start()
    with pytest.raises(RuntimeError, match=message):
        sampler.expect(step(sampler, **changes))
    with pytest.raises(RuntimeError, match="rows without a step"):
        drawn(sampler)


def test_what_is_not_paid_is_not_drawn(sampler: PrivateSampler) -> None:
    sampler.start()
    sampler.expect(step(sampler, paid=1))
    with pytest.raises(BudgetSpentError):
        drawn(sampler)


def test_a_row_whose_prompt_goes_on_gets_no_private_token(sampler: PrivateSampler) -> None:
    sampler.start()
    sampler.expect(step(sampler, paid=1, drawing=[True, False], granted={"a": 0}))
    assert int(drawn(sampler).sampled_token_ids[1]) == 0
    assert sampler._allowance.left == 0


def test_other_rows_than_those_of_the_step_raise(sampler: PrivateSampler) -> None:
    sampler.start()
    sampler.expect(step(sampler))
    with pytest.raises(RuntimeError, match="rows without a step"):
        drawn(sampler, rows=3)


def test_log_probabilities_are_not_told(sampler: PrivateSampler) -> None:
    sampler.start()
    sampler.expect(step(sampler))
    asked = SimpleNamespace(max_num_logprobs=1, logprob_token_ids=None)
    with pytest.raises(RuntimeError, match="not told"):
        sampler(logits=torch.zeros(2, 2048), sampling_metadata=asked)


def config_of(folder: Path, ensemble: Path, **changes: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = arguments(options(folder, ensemble), **changes)
    return EngineArgs(**given).create_engine_config()


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "--pipeline-par"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"enable_lora": True}, "--enable-lora"),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
                "logits_processors": None,
            },
            "--speculative-config",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "--kv-transfer-config",
        ),
        ({"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}, "--otlp-traces-endpoint"),
        ({"logprobs_mode": "processed_logprobs"}, "--logprobs-mode"),
        ({"scheduler_cls": None}, "--scheduler-cls"),
        ({"worker_cls": "auto"}, "--worker-cls"),
        ({"logits_processors": None}, "--logits-processors"),
        ({"additional_config": {}}, "--additional-config"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_refused_options(
    tmp_path: Path, ensemble: Path, changes: dict[str, Any], name: str
) -> None:
    from adapmixed.vllm.checking import check_config

    with pytest.raises(ValueError, match=name):
        check_config(config_of(tmp_path, ensemble, **changes))


def test_settings_that_are_served(
    tmp_path: Path, ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adapmixed.vllm import checking

    config = config_of(tmp_path, ensemble)
    assert checking.check_config(config) == options(tmp_path, ensemble)
    config.scheduler_config.async_scheduling = True  # on the CPU vLLM itself turns it off
    with pytest.raises(ValueError, match="--async-scheduling"):
        checking.check_config(config)
    config.scheduler_config.async_scheduling = False
    config.parallel_config._api_process_count = 2
    with pytest.raises(ValueError, match="--api-server-count"):
        checking.check_config(config)
    monkeypatch.setattr(checking, "VERSION", "0.31.0")
    with pytest.raises(ValueError, match="vllm must have the version 0.31.0"):
        checking.check_config(config)
