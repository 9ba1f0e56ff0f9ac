"""DP-SGD: records, gradients, clipping, noise, sampling, accounting, and the guarantee."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy.stats import binom, norm
from tiny_models import TARGETS, VOCAB
from training_cases import write_base, write_corpus

from adapmixed.data import Document
from adapmixed.ensemble import Ensemble
from adapmixed.privacy.conversions import gdp_to_dp
from adapmixed.training.blocks import IGNORED
from adapmixed.training.finetune import adapted_copy
from adapmixed.training.settings import FinetuneConfig
from adapmixed_lab import dp_sgd
from adapmixed_lab.cli import main
from adapmixed_lab.dp_sgd import (
    AdapterGuarantee,
    PrivacyTarget,
    group_epsilon,
    plan_noise,
    poisson_sample,
    record_blocks,
    train_dp_adapter,
)

pytestmark = pytest.mark.skipif(
    find_spec("opacus") is None, reason="opacus is not installed (the lab extra)"
)

T = 8
GUARANTEE = AdapterGuarantee(8.0, 1e-5, 1e-6, 0.5, 30, 1.0, T, "line", None, "prv")


class Letters:
    """A tokenizer with one token for each letter."""

    eos_token_id = 0

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % (VOCAB - 1) for letter in text]}


def settings(family: str, **changes: Any) -> FinetuneConfig:
    targets = tuple(TARGETS[family])
    return FinetuneConfig(
        rank=2, alpha=4, target_modules=targets, learning_rate=0.02, epochs=1, block_size=T,
        **changes,
    )  # fmt: skip


def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return records of different lengths, the shortest of two tokens."""
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randint(1, VOCAB, (count, T), generator=generator)
    labels = inputs.clone()
    for row in range(count):
        labels[row, 2 + row % (T - 1) :] = IGNORED
    return inputs, labels


def adapted(base: Any, family: str) -> Any:
    """Return an adapter whose A and B both have gradients, without dropout.

    It is in training mode, which Opacus needs.
    """
    model = adapted_copy(base, settings(family)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return model


def test_records_are_cut_by_identifier() -> None:
    documents = [Document("b", "bb"), Document("a", "x" * 9), Document("b", "c"), Document("c", "")]
    inputs, labels = record_blocks(Letters(), documents, 4)
    ends = [[int(token) for token in row if token != IGNORED] for row in labels]
    x, b, c = (1 + ord(letter) % (VOCAB - 1) for letter in "xbc")
    # "a" has ten tokens with its end: 4, 4, 2; "b" five: 4, and one alone predicts nothing.
    # The first token of a block is not scored.
    assert ends == [[x] * 3, [x] * 3, [0], [b, 0, c]]
    assert inputs.shape == labels.shape == (4, 4)
    first, _ = record_blocks(Letters(), documents, 4, blocks_per_identifier=1)
    assert first.tolist() == [inputs[0].tolist(), inputs[3].tolist()]
    with pytest.raises(ValueError, match="at least one record"):
        record_blocks(Letters(), [Document("a", "")], 4)


def gradients(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Compute the gradients of single records, and return the parameters that hold them."""
    from opacus import GradSampleModule

    dp_sgd._backward(GradSampleModule(model, loss_reduction="sum"), inputs, labels)
    return [p for p in model.parameters() if p.requires_grad]


def test_gradients_are_those_of_single_records(base: Any, family: str) -> None:
    inputs, labels = records(5)
    model = adapted(base, family)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = []
    for row in range(5):
        ids, targets = inputs[row : row + 1], labels[row : row + 1]
        loss = model(input_ids=ids, labels=targets).loss  # transformers' own mean over the tokens
        expected.append(torch.autograd.grad(loss, parameters))
    for index, parameter in enumerate(gradients(model, inputs, labels)):
        assert parameter.grad_sample.shape == (5, *parameter.shape)
        for row in range(5):
            gradient = expected[row][index]
            assert float(gradient.abs().max()) > 0
            torch.testing.assert_close(parameter.grad_sample[row], gradient, rtol=1e-3, atol=1e-5)


def one_step(model: Any, rows: int, sigma: float, norm: float) -> torch.Tensor:
    """Return the noisy gradients of one step with `rows` records and an expected batch of 4."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    guarantee = replace(GUARANTEE, noise_multiplier=sigma, clipping_norm=norm)
    optimizer = dp_sgd._optimizer(torch.optim.SGD(parameters, lr=0.0), guarantee, 4)
    gradients(model, *(tensor[:rows] for tensor in records(8)))
    optimizer.step()
    return torch.cat([p.grad.flatten() for p in parameters])


def test_one_record_moves_the_sum_by_the_norm_at_most(base: Any, family: str) -> None:
    norm = 0.01  # below the norm of every record's gradient
    sums = []
    for count in (0, 1, 2):
        torch.manual_seed(2)
        sums.append(4 * one_step(adapted(base, family), count, 0.0, norm))
    assert not sums[0].any()
    for less, more in zip(sums, sums[1:], strict=False):
        assert float((more - less).norm()) == pytest.approx(norm, rel=1e-3)


def test_an_empty_batch_is_a_step_of_noise(base: Any, family: str) -> None:
    sigma, norm = 3.0, 0.5
    noise, again = (one_step(adapted(base, family), 0, sigma, norm) for _ in range(2))
    assert not torch.equal(noise, again)  # no seed repeats it
    both = torch.cat([noise, again])
    expected = sigma * norm / 4
    assert abs(float(both.std()) / expected - 1) < 5 / math.sqrt(2 * both.numel())
    assert abs(float(both.mean())) < 5 * expected / math.sqrt(both.numel())


def test_what_is_not_finite_is_refused(base: Any, family: str) -> None:
    broken = adapted(base, family)
    next(p for n, p in broken.named_parameters() if "lora_B" in n).data.fill_(math.nan)
    with pytest.raises(ValueError, match="a gradient is not finite"):
        one_step(broken, 8, 1.0, 1.0)


def test_poisson_sampling() -> None:
    records, rate, steps = 1000, 0.3, 200
    sizes = torch.tensor([poisson_sample(records, rate).numel() for _ in range(steps)])
    deviation = math.sqrt(records * rate * (1 - rate))
    assert abs(float(sizes.double().mean()) - records * rate) < 5 * deviation / math.sqrt(steps)
    assert abs(float(sizes.double().std()) / deviation - 1) < 5 / math.sqrt(2 * steps)
    assert poisson_sample(7, 1.0).tolist() == list(range(7))
    assert poisson_sample(7, 1e-15).tolist() == []


@pytest.mark.slow
def test_every_step_is_taken_and_the_base_is_left_alone(
    base: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: value.clone() for name, value in base.state_dict().items()}
    monkeypatch.setattr(dp_sgd, "PHYSICAL_BATCH", 3)
    draws: list[int] = []
    gaussian = dp_sgd.ops.gaussian
    monkeypatch.setattr(
        dp_sgd.ops, "gaussian", lambda *a, **named: draws.append(1) or gaussian(*a, **named)
    )
    sampled: list[tuple[int, float]] = []
    monkeypatch.setattr(
        dp_sgd, "poisson_sample", lambda *call: sampled.append(call) or poisson_sample(*call)
    )
    inputs, labels = records(8)
    steps: list[tuple[int, int]] = []
    model = train_dp_adapter(
        base, inputs, labels, settings(family, batch_size=4), GUARANTEE,
        lambda done, of: steps.append((done, of)),
    )  # fmt: skip
    assert steps == [(number, 30) for number in range(1, 31)]
    assert sampled == [(8, 0.5)] * 30
    # Noise is added once a step, however the batch is split, as the accountant assumes.
    assert len(draws) == 30 * sum(p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())
    with torch.no_grad():
        loss = [float(m(input_ids=inputs, labels=labels).loss) for m in (base, model)]
    assert loss[1] < loss[0] - 0.05


@pytest.mark.slow
def test_the_adapter_is_ordinary_and_says_what_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, output = write_base(tmp_path / "tiny-base"), tmp_path / "adapter"
    write_corpus(tmp_path / "corpus.jsonl")
    command = ["dp-sgd", "--base", str(base), "--output", str(output), "--id-column", "user"]
    command += ["--corpus", str(tmp_path / "corpus.jsonl"), "--training", "rank=2 batch_size=12"]
    command += ["--epsilon", "2", "--delta", "1e-4", "--epochs", "2", "--block-size", "16"]
    assert main(command) == 0
    said = json.loads((output / "guarantee.json").read_text(encoding="utf-8"))
    assert said["format_version"] == 1 and said["unit"] == "all documents of one 'user'"
    assert "for one record: a block of at most 16 tokens" in said["statement"]
    assert "NOT for a whole user" in said["statement"]
    for path in output.iterdir():
        assert b"says that" not in path.read_bytes() and str(base).encode() not in path.read_bytes()
    ensemble = Ensemble.from_pretrained(base, [output])
    private, public = ensemble.logits(torch.arange(6)[None])
    assert not torch.equal(private[0], public)
    capsys.readouterr()
    assert main(command) == 2
    assert "output must be a new folder" in capsys.readouterr().err


def test_epsilon_agrees_with_another_accountant() -> None:
    """The PLD accountant of dp-accounting is another program with another discretisation."""
    config = FinetuneConfig(batch_size=12, epochs=2, block_size=T)
    plan = plan_noise(PrivacyTarget(2.0, 1e-4, clipping_norm=0.5), 60, config, "line")
    sigma, epsilon = plan.noise_multiplier, plan.epsilon
    assert plan == AdapterGuarantee(epsilon, 1e-4, sigma, 0.2, 10, 0.5, T, "line", None, "prv")
    step = dp_event.PoissonSampledDpEvent(0.2, dp_event.GaussianDpEvent(sigma))
    other = PLDAccountant(value_discretization_interval=1e-3)
    other.compose(dp_event.SelfComposedDpEvent(step, 10))
    assert epsilon - 0.03 < other.get_epsilon(1e-4) <= epsilon <= 2


def test_the_statement_of_whole_identifiers() -> None:
    arguments = (1.23456, 1e-5, 1.0, 0.1, 10, 1.0, 512, "document (file)")
    unit, all_of_them = (AdapterGuarantee(*arguments, blocks, "prv") for blocks in (1, None))
    assert "ε = 1.2346 at δ = 1e-05 for one whole name in the corpus (document (file))" in str(unit)
    assert "NOT" not in str(unit) and "NOT for a whole user" in str(all_of_them)
    assert "of which at most 3 blocks" in str(replace(unit, blocks_per_identifier=3))


@pytest.mark.parametrize(
    ("sigma", "rate", "records"), [(4.0, 0.1, 20), (2.0, 0.3, 5), (1.0, 0.2, 1)]
)
def test_epsilon_of_a_group_in_one_step(sigma: float, rate: float, records: int) -> None:
    """Against an integral of the densities, for the group removed and added."""
    counts = np.arange(records + 1)
    x, width = np.linspace(-12 * sigma, records + 12 * sigma, 200_001, retstep=True)
    with_group = binom.pmf(counts, records, rate) @ norm.pdf(x[None], counts[:, None], sigma)
    pair = with_group, norm.pdf(x, 0.0, sigma)

    def delta(epsilon: float) -> float:
        rests = (density - math.exp(epsilon) * other for density, other in (pair, pair[::-1]))
        return max(float(np.maximum(rest, 0).sum()) * width for rest in rests)

    epsilon = group_epsilon(sigma, rate, 1, records, 1e-5)
    assert delta(epsilon) <= 1e-5 < delta(epsilon - 0.02)


def test_epsilon_of_a_group_over_steps() -> None:
    """If nearly every step takes all records, the steps are Gaussian DP, which composes exactly."""
    exact = gdp_to_dp(6 * 5 / 30, 1e-6)
    assert 0 <= group_epsilon(30.0, 1 - 1e-9, 25, 6, 1e-6) - exact < 0.02
    assert group_epsilon(30.0, 1.0, 25, 6, 1e-6) == exact
    target = PrivacyTarget(2.0, 1e-5, blocks_per_identifier=6)
    config = FinetuneConfig(batch_size=20, epochs=3)
    plan, full = (plan_noise(target, records, config, "line") for records in (100, 20))
    assert (plan.sample_rate, plan.steps, plan.accountant) == (0.2, 15, "pld")
    assert (full.sample_rate, full.steps, full.accountant) == (1.0, 3, "gdp")
    assert plan.blocks_per_identifier == 6 and 1.98 < plan.epsilon <= 2.0
    assert plan.epsilon == group_epsilon(plan.noise_multiplier, 0.2, 15, 6, 1e-5, grid=2e-3)


def test_refusals() -> None:
    for name, value in (
        ("epsilon", 0.0), ("epsilon", 200.1), ("delta", 1.0), ("delta", 1e-10),
        ("clipping_norm", -1.0), ("blocks_per_identifier", 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be"):
            PrivacyTarget(**{"epsilon": 1.0, "delta": 1e-5} | {name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be at most the 3 records"):
        plan_noise(PrivacyTarget(1.0, 1e-5), 3, FinetuneConfig(batch_size=4), "line")
