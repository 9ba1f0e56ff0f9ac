"""Run vLLM in one process, record every drawn row, and print what happened as JSON.

    python engine_scenario.py NAME FOLDER

One process holds front, engine core and worker, so that a scenario can see the rows.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch  # noqa: E402
from vllm_cases import BASE, POOL, TEXTS, arguments, options, write_ensemble  # noqa: E402

from adapmixed import ClippedLogPool  # noqa: E402

LONG = [f"{'The function returns a new list of the names in the module. ' * 6}{t}" for t in TEXTS]
ROWS: list[tuple[str, int, torch.Tensor, torch.Tensor, int]] = []
PREEMPTED: list[int] = []
DEALT: list[int] = []


def watch() -> None:
    """Record requests, positions, rows and tokens of every draw, and every preemption."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from adapmixed.vllm.sampler import PrivateSampler

    expect, draw, preempt = (
        PrivateSampler.expect, PrivateSampler._draw, Scheduler._preempt_request,
    )  # fmt: skip

    def expecting(self: Any, step: Any) -> None:
        expect(self, step)
        self.seen = step
        DEALT.append(len(step.names) - sum(step.drawing))

    def drawing(self: Any, tokens: Any, rows: Any, logits: Any, hidden: Any, shape: Any) -> None:
        draw(self, tokens, rows, logits, hidden, shape)
        at = torch.tensor(rows)
        private, public, _ = self._heads.rows(hidden[at].clone(), logits[at].clone())
        for place, row in enumerate(rows):
            name, position = self.seen.names[row], self.seen.positions[row]
            kept = private[:, place].clone(), public[place].clone()
            ROWS.append((name, position, *kept, int(tokens[row])))

    def preempting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        PREEMPTED.append(request.num_output_tokens)
        return preempt(self, request, *args, **kwargs)

    PrivateSampler.expect, PrivateSampler._draw = expecting, drawing
    Scheduler._preempt_request = preempting


class Run:
    """An engine with its options, and the answers that it gave."""

    def __init__(self, folder: Path, changes: dict[str, Any], **engine: Any) -> None:
        from vllm import LLM

        self.ensemble = folder / "ensemble"
        if not self.ensemble.exists():
            write_ensemble(self.ensemble)
        self.options = options(folder, self.ensemble, **changes)
        self.llm = LLM(**arguments(self.options, **engine))

    def ask(self, prompts: list[str], tokens: int, **settings: Any) -> list[Any]:
        from vllm import SamplingParams

        given = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True} | settings
        return list(self.llm.generate(prompts, SamplingParams(**given), use_tqdm=False))

    def charged(self) -> int:
        from adapmixed.vllm.reserved import charged_so_far

        return charged_so_far(self.options.ledger)

    def compared(self, answers: list[Any]) -> dict[str, Any]:
        """Compare the rows of these answers with those of our own engine."""
        from adapmixed.ensemble import Ensemble

        own = Ensemble.from_pretrained(str(BASE), self.ensemble)
        rows = {(name.rsplit("-", 1)[0], at): found for name, at, *found in ROWS}
        worst = [0.0, 0.0]
        same = total = 0
        for answer in answers:
            tokens = list(answer.outputs[0].token_ids)
            prompt = list(answer.prompt_token_ids)
            private, public = own.logits(torch.tensor([prompt + tokens]))
            for at, token in enumerate(tokens):
                found = rows[answer.request_id.rsplit("-", 1)[0], at]
                place = len(prompt) - 1 + at
                worst[0] = max(worst[0], float((found[1] - public[0, place]).abs().max()))
                worst[1] = max(worst[1], float((found[0] - private[:, 0, place]).abs().max()))
                same += token == found[2]
                total += 1
        return {"public": worst[0], "private": worst[1], "ours": same, "tokens": total}

    def told(self, answers: list[Any]) -> dict[str, Any]:
        drawn = Counter((name, at) for name, at, *_ in ROWS)
        return {
            "released": sum(len(one.outputs[0].token_ids) for one in answers),
            "drawn": len(ROWS),
            "twice": sum(count > 1 for count in drawn.values()),
            "partial": sum(DEALT),
            "preempted": len(PREEMPTED),
            "charged": self.charged(),
            "finish": sorted({one.outputs[0].finish_reason for one in answers}),
        }


def plain(folder: Path) -> dict[str, Any]:
    run = Run(folder, {}, enable_prefix_caching=True, block_size=32)
    warm = len(ROWS)
    first = run.ask(LONG, 12)
    again = run.ask(LONG, 5)
    shaped = run.ask(TEXTS, 6, temperature=0.7, top_k=5)
    result = {"warm": warm, "cached": sum(one.num_cached_tokens or 0 for one in again)}
    result |= {"rows": run.compared(first + again), **run.told(first + again + shaped)}
    likeliest = [bool((public > public[token]).sum() < 5) for *_, public, token in ROWS[-48:]]
    return result | {"within_top_5": all(likeliest)}


def chunked(folder: Path) -> dict[str, Any]:
    run = Run(folder, {}, max_num_batched_tokens=32, max_num_seqs=16, enable_chunked_prefill=True)
    answers = run.ask(LONG, 12)
    return {"rows": run.compared(answers), **run.told(answers)}


def preempted(folder: Path) -> dict[str, Any]:
    cache = {"num_gpu_blocks_override": 12, "block_size": 32, "enable_prefix_caching": False}
    run = Run(folder, {}, max_num_seqs=16, **cache)
    answers = run.ask(TEXTS * 2, 60)
    return {"rows": run.compared(answers), **run.told(answers)}


def spent(folder: Path) -> dict[str, Any]:
    from dataclasses import replace

    run = Run(folder, {"mechanism": replace(POOL, queries=40)})
    first = run.ask(TEXTS[:2], 15, ignore_eos=False, stop_token_ids=list(range(0, 2048, 8)))
    result: dict[str, Any] = {"first": run.told(first)}
    end = []
    for tokens in (41, 40, 5, 5, 5, 5, 5, 5, 5, 5):
        try:
            (answer,) = run.ask(TEXTS[:1], tokens)
            end.append((tokens, len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason))
        except Exception as error:
            end.append((tokens, 0, type(error).__name__))
    return result | {"end": end, "drawn": len(ROWS), "charged": run.charged()}


def refused(folder: Path) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    run = Run(folder, {})
    found: dict[str, str] = {}
    for name, value in {
        "n": 2, "temperature": 0, "top_p": 0.9, "min_p": 0.1, "seed": 1, "logprobs": 1,
        "prompt_logprobs": 1, "presence_penalty": 1.0, "frequency_penalty": 1.0,
        "repetition_penalty": 1.1, "min_tokens": 2, "logit_bias": {3: 5.0},
        "allowed_token_ids": [1, 2], "bad_words": ["the"],
        "structured_outputs": StructuredOutputsParams(regex="a+"), "extra_args": {"x": 1},
        "max_tokens": None,
    }.items():  # fmt: skip
        try:
            run.ask(TEXTS[:1], 2, **{name: value})
            found[name] = "ACCEPTED"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {"found": found, "charged": run.charged(), "drawn": len(ROWS)}


def parallel(folder: Path) -> dict[str, Any]:
    run = Run(folder, {}, tensor_parallel_size=2)
    answers = run.ask(TEXTS, 10) + run.ask(LONG, 10, temperature=0.8, top_k=20)
    told = run.told(answers)
    run.llm.llm_engine.engine_core.shutdown()
    return told


def differing(folder: Path) -> dict[str, Any]:
    from adapmixed.vllm.heads import Heads

    rows = Heads.rows

    def wrong(self: Any, hidden: Any, public: Any) -> Any:
        found = rows(self, hidden, public)
        found.private[3, :, 5] += 0.03125
        return found

    Heads.rows = wrong
    try:
        Run(folder, {})
        return {"error": None}
    except RuntimeError as error:
        return {"error": str(error)}


def real(folder: Path) -> dict[str, Any]:
    base = Path(os.environ.get("ADAPMIXED_REAL_MODELS", "build/models"), "smollm2")
    assert base.is_dir(), f"python scripts/real_models.py --only smollm2 makes {base}"
    write_ensemble(folder / "ensemble", 4, base=base)
    run = Run(folder, {"mechanism": ClippedLogPool(-0.1, 0.1, queries=100)}, model=str(base))
    question = "The capital of Spain is Madrid. The capital of France is"
    (answer,) = run.ask([question], 8, temperature=0.1)
    return {"text": answer.outputs[0].text, "charged": run.charged()}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    watch()
    result = globals()[name](folder)
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
