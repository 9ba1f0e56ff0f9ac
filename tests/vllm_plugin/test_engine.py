"""Inside vLLM: rows equal our own engine's, and every drawn token was charged before."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from head_ensembles import BASE, POOL, TEXTS, write_ensemble
from transformers import AutoTokenizer

pytest.importorskip("vllm.v1", reason="vllm is not installed: `make test-vllm` has it")

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from adapmixed.ensemble import Ensemble  # noqa: E402
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool  # noqa: E402
from adapmixed.privacy import Accountant, read_ledger  # noqa: E402
from adapmixed.serving.engine import Drawing, Prompt  # noqa: E402
from adapmixed.vllm import engine as engine_module  # noqa: E402
from adapmixed.vllm.engine import VllmEngine  # noqa: E402
from adapmixed.vllm.heads import Heads  # noqa: E402

CLOSE = 2e-5  # of logits of size 10, fp32
FEW = {"block_size": 32, "num_gpu_blocks_override": 12, "enable_prefix_caching": False}


def prompts(texts: Sequence[str], tokens: int, **settings: Any) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    return [Prompt(tuple(tokenizer(text)["input_ids"]), tokens, **settings) for text in texts]


LONG = [f"{'The function returns a new list of the names in the module. ' * 6}{t}" for t in TEXTS]


@dataclass
class Run:
    """An engine, and every draw so far: the prompt, both rows and the token."""

    engine: VllmEngine
    accountant: Any
    folder: Path
    draws: list[tuple[Prompt, torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    cached: int = 0
    empty: int = 0  # steps without a token

    def ask(self, asked: Sequence[Prompt]) -> dict[Prompt, list[int]]:
        """Answer prompts to their ends, and compare the rows with those of our own engine."""
        answers: dict[Prompt, list[int]] = {prompt: [] for prompt in asked}
        first = len(self.draws)
        waiting = list(asked)
        while waiting or any(len(answers[p]) < p.max_tokens for p in asked):
            room = self.engine.room(waiting)
            self.engine.admit(waiting[:room])
            waiting = waiting[room:]
            released = self.engine.step()
            self.empty += not released
            for prompt, token in released:
                answers[prompt].append(token)
            self.engine.leave([p for p, _ in released if len(answers[p]) == p.max_tokens])
        self._compare(answers, self.draws[first:])
        return answers

    def _compare(self, answers: dict[Prompt, list[int]], draws: list[Any]) -> None:
        drawn: dict[Prompt, list[Any]] = {}
        for prompt, *row in draws:
            drawn.setdefault(prompt, []).append(row)
        ensemble = Ensemble.from_pretrained(str(BASE), self.folder)
        for prompt, tokens in answers.items():
            assert [row[2] for row in drawn[prompt]] == tokens  # none is drawn twice
            whole = torch.tensor([[*prompt.tokens, *tokens]])
            private, public = ensemble.logits(whole[:, :-1])
            for place, (heads, base, _) in enumerate(drawn[prompt], len(prompt.tokens) - 1):
                assert float((base - public[0, place]).abs().max()) <= CLOSE
                assert float((heads - private[:, 0, place]).abs().max()) <= CLOSE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("vllm") / "ensemble")


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Return a function that starts an engine; it is closed at the end of the test."""
    runs: list[Run] = []
    rows, draw = Heads.rows, Drawing.draw

    def keeping(self: Heads, hidden: Any, public: Any) -> Any:
        found = rows(self, hidden, public)
        kept = tuple(None if tensor is None else tensor.clone() for tensor in found)
        self.kept = kept  # type: ignore[attr-defined]
        return found

    def drawing(self: Drawing, logits: Any, asked: Sequence[Prompt]) -> Any:
        tokens = draw(self, logits, asked)
        if not runs:  # the engine compares its rows with ours
            return tokens
        (run,) = runs
        private, public, _ = run.engine._heads.kept  # type: ignore[attr-defined]
        for row, prompt in enumerate(asked):
            run.draws.append((prompt, private[:, row], public[row], int(tokens[row])))
        return tokens

    monkeypatch.setattr(Heads, "rows", keeping)
    monkeypatch.setattr(Drawing, "draw", drawing)

    def started(
        mechanism: Any = POOL, accountant: Any = None, *, memory: int = 1 << 28, **settings: Any
    ) -> Run:
        accountant = Accountant(1e-5) if accountant is None else accountant
        ensemble = Ensemble.from_pretrained(str(BASE), folder)
        engine = VllmEngine(
            str(BASE), ensemble, mechanism, accountant,
            memory_bytes=memory, enforce_eager=True, **settings,
        )  # fmt: skip
        runs.append(Run(engine, accountant, folder))
        get = engine._core.get_output

        def counting() -> Any:
            output = get()
            stats = [out.prefill_stats for out in output.outputs if out.prefill_stats is not None]
            runs[0].cached += sum(stat.num_cached_tokens for stat in stats)
            return output

        engine._core.get_output = counting
        return runs[0]

    yield started
    for run in runs:
        run.engine.close()


def test_rows_and_the_cache_of_prefixes(start: Callable[..., Run], tmp_path: Path) -> None:
    """Each client has a cache of its own. Every shape has the rows of our own engine."""
    with Accountant(1e-5, path=tmp_path / "ledger") as accountant:
        run = start(accountant=accountant, block_size=32)
        run.ask(prompts(LONG, 12))
        before = run.cached
        run.ask(prompts(LONG[:1], 5, client="alice"))
        assert run.cached == before
        run.ask(prompts(LONG[:1], 5))
        assert run.cached > before
        shaped = run.ask(prompts(TEXTS[:4], 6, temperature=0.7, top_k=5) + prompts(TEXTS[4:], 6))
        for prompt, _, public, token in run.draws[-48:]:
            assert prompt.top_k is None or int((public > public[token]).sum()) < 5
        assert len(shaped) == 8
        assert accountant.queries == len(run.draws) == 8 * 12 + 2 * 5 + 8 * 6
    assert read_ledger(tmp_path / "ledger").guarantee.queries == len(run.draws)


def test_a_prompt_in_chunks_draws_no_token_before_its_end(start: Callable[..., Run]) -> None:
    run = start(max_num_batched_tokens=32, max_num_seqs=16, enable_chunked_prefill=True)
    run.ask(prompts(LONG, 12))
    assert run.empty > 0 and run.accountant.queries == len(run.draws) == 8 * 12


def test_a_preempted_request_draws_no_token_twice(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt, preempted = Scheduler._preempt_request, Counter[str]()

    def preempting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted[request.request_id] += request.num_output_tokens
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempting)
    run = start(max_num_seqs=16, **FEW)
    run.ask(prompts(TEXTS * 2, 60))
    assert max(preempted.values()) > 0
    assert run.accountant.queries == len(run.draws) == 16 * 60


@pytest.mark.parametrize(
    ("mechanism", "epsilon"),
    [(AdaPMixED(order=3.0, target_leakage=0.05), None), (ClippedLogPool(-1.0, 1.0), 4.0)],
    ids=["a cost of the rows", "budgets of shards"],
)
def test_every_mechanism(start: Callable[..., Run], mechanism: Any, epsilon: float | None) -> None:
    run = start(mechanism, Accountant(1e-5, epsilon=epsilon))
    run.ask(prompts(TEXTS, 4))
    assert run.accountant.queries == 32


def test_rows_without_a_step_are_not_drawn(start: Callable[..., Run]) -> None:
    """Nor those of a step twice, or of another number of rows."""
    run = start()
    sampler = run.engine._core.engine_core.model_executor.runner.sampler
    logits, (prompt,) = torch.zeros(2, 2048), prompts(TEXTS[:1], 1)
    for step in (None, (torch.zeros(1, 96), [0], [prompt])):
        sampler.step = step
        with pytest.raises(RuntimeError, match="rows without a step"):
            sampler(logits, None)
    assert run.accountant.queries == 0


def test_a_sequence_that_left_draws_no_more(start: Callable[..., Run]) -> None:
    run = start()
    gone, stays = prompts(TEXTS[:2], 20)
    run.engine.admit([gone, stays])
    run.engine.step()
    run.engine.leave([gone])
    for _ in range(3):
        assert [prompt for prompt, _ in run.engine.step()] == [stays]
    assert run.accountant.queries == 5
    run.engine.leave([stays])
    assert run.engine.step() == []


def test_the_memory_is_kept(start: Callable[..., Run]) -> None:
    run = start(memory=1 << 25)
    engine = run.engine
    config = engine._core.engine_core.vllm_config
    row = (1 << 25) - config.cache_config.kv_cache_memory_bytes
    assert 1 <= engine._sequences < 256 and 0 < row <= 1 << 24
    waiting = prompts(TEXTS[:1] * (engine._sequences + 3), 2)
    assert engine.room(waiting) == engine._sequences
    assert engine.window == 255
    assert run.ask(prompts(TEXTS[:1], 250))


def test_other_rows_than_our_own_are_not_served(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says that they differ, and not by how much."""
    rows = Heads.rows

    def wrong(self: Any, hidden: Any, public: Any) -> Any:
        found = rows(self, hidden, public)
        found.private[3, :, 5] += 0.03125
        return found

    monkeypatch.setattr(Heads, "rows", wrong)
    with pytest.raises(RuntimeError, match="vLLM must compute the rows of adapmixed's own") as told:
        start()
    assert not any(character.isdigit() for character in str(told.value))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"memory": 1 << 10}, "memory_bytes"), ({"version": "0.31.0"}, "version 0.31.0")],
)
def test_what_it_refuses(
    start: Callable[..., Run], change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "VERSION", change.pop("version", engine_module.VERSION))
    with pytest.raises(ValueError, match=words):
        start(**change)


@pytest.mark.real
def test_a_pretrained_model_answers(tmp_path: Path) -> None:
    base = Path(os.environ.get("ADAPMIXED_REAL_MODELS", "build/models"), "smollm2")
    assert base.is_dir(), f"python scripts/real_models.py --only smollm2 makes {base}"
    folder = write_ensemble(tmp_path / "ensemble", 4, base=base)
    ensemble, accountant = Ensemble.from_pretrained(str(base), folder), Accountant(1e-5)
    mechanism = ClippedLogPool(-0.1, 0.1, queries=100)
    engine = VllmEngine(str(base), ensemble, mechanism, accountant, memory_bytes=1 << 30)
    question = "The capital of Spain is Madrid. The capital of France is"
    prompt = Prompt(tuple(ensemble.tokenizer(question)["input_ids"]), 8, temperature=0.1)
    engine.admit([prompt])
    tokens = [engine.step()[0][1] for _ in range(8)]
    engine.close()
    assert "Paris" in ensemble.tokenizer.decode(tokens) and accountant.queries == 8
