"""The engine over vLLM, in this process, for members that adapt the output layer alone.

It draws private tokens in the place of vLLM's sampler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adapmixed.ensemble.lora import Logits
from adapmixed.limits import DEFAULT_ACTIVE
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant
from adapmixed.serving.engine import Drawing, Prompt
from adapmixed.vllm.heads import Heads

os.environ |= {  # read when vLLM is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process that has the ledger draws
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # another one has no sampler that could be replaced
    "VLLM_LOGGING_LEVEL": "ERROR",  # other lines can hold what clients ask
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.core_client import InprocClient  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402
from vllm.v1.outputs import SamplerOutput  # noqa: E402

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

VERSION = "0.32.0"
"""The version of vLLM that the engine is tested with."""

_SEQUENCES = 256
"""Largest number of sequences in the batch."""

ReadRows = Callable[[Tensor, Tensor], Logits]
"""From hidden states and public logits to the logits of all members, as `Heads.rows`."""


class PrivateExecutor(UniProcExecutor):  # type: ignore[misc]
    """Charges every token that a step draws while the public model computes.

    vLLM's own sampler answers its warm-up from public logits. `begin` ends that.
    """

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self.driver_worker.worker.model_runner

    def begin(
        self, scheduler: Any, rows: ReadRows, drawing: Drawing, prompts: Mapping[str, Prompt]
    ) -> None:
        """Draw private tokens from here on.

        Args:
            scheduler: vLLM's scheduler.
            rows: the members' rows.
            drawing: draws, and charges.
            prompts: the running prompts by the names of their requests.
        """
        self._scheduler, self._drawing, self._prompts = scheduler, drawing, prompts
        self._sampler = self.runner.sampler = PrivateSampler(self.runner.sampler, rows, drawing)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run the public model, and charge the tokens that the step will draw."""
        requests = self._scheduler.requests
        drawing = [
            self._prompts[name]
            for name in scheduler_output.num_scheduled_tokens
            if not requests[name].is_prefill_chunk
        ]
        with self._drawing.ahead(sum(not prompt.public for prompt in drawing)):
            return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Draw one token for every row whose prompt is read to its end."""
        runner = self.runner
        names = runner.input_batch.req_ids
        reading = runner.discard_request_mask.np[: len(names)].tolist()
        rows = [row for row, unread in enumerate(reading) if not unread]
        prompts = [self._prompts[names[row]] for row in rows]
        self._sampler.step = runner.execute_model_state.sample_hidden_states, rows, prompts
        return super().sample_tokens(grammar_output, non_block)


class PrivateSampler(nn.Module):
    """Stands in the place of vLLM's `Sampler`.

    Args:
        public: vLLM's sampler.
        rows: the members' rows.
        drawing: draws, and charges.

    Attributes:
        step: hidden states (B, d), the rows that draw a token, and their prompts. One call takes
            it.
    """

    def __init__(self, public: Any, rows: ReadRows, drawing: Drawing) -> None:
        super().__init__()
        self.logprobs_mode = public.logprobs_mode
        self._rows, self._drawing = rows, drawing
        self.step: tuple[Tensor, list[int], list[Prompt]] | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """Return one token for each row, as vLLM's `Sampler` does.

        Rows of prompts that are not read to their end get token 0, which vLLM drops.

        Raises:
            RuntimeError: there is no step for these rows.
        """
        step, self.step = self.step, None
        if step is None or len(step[0]) != len(logits):
            raise RuntimeError("rows without a step")
        hidden, rows, prompts = step
        # Torch counts no changes of inference tensors, so the mechanism would copy them.
        with torch.inference_mode(False), torch.no_grad():
            tokens = torch.zeros(len(logits), dtype=torch.int64)
            if rows:
                if len(rows) < len(logits):
                    hidden, logits = hidden[rows], logits[rows]
                tokens[rows] = self._drawing.draw(self._rows(hidden, logits), prompts)
        return SamplerOutput(tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)


class VllmEngine:
    """Answers with vLLM's public model, batching and cache of prefixes, and our members.

    Half of the memory, or less, is for the members' rows, the rest for keys and values. If the
    cache is full, vLLM computes a sequence's keys and values again later; it draws no token twice.
    The cache of prefixes is apart for every client.

    Args:
        base: folder of the public model.
        ensemble: the models that answer, on the CPU. Its trunk is given up: vLLM has its own.
        mechanism: how a query is answered.
        accountant: charged for every token before it is drawn.
        memory_bytes: limit for logits, keys and values of all sequences, in bytes.
        active: as in `PrivateGenerator`.
        others: arguments of vLLM's `EngineArgs`.

    Raises:
        ValueError: an argument is not valid, the version of vLLM or its device is not the tested
            one, or as `Heads` and `Drawing`.
        RuntimeError: vLLM computes other rows than the ensemble.
    """

    def __init__(
        self,
        base: str,
        ensemble: Ensemble,
        mechanism: Mechanism,
        accountant: Accountant,
        *,
        memory_bytes: int,
        active: int | None = DEFAULT_ACTIVE,
        **others: object,
    ) -> None:
        if vllm.__version__.split("+")[0] != VERSION or not current_platform.is_cpu():
            raise ValueError(
                f"vllm must have the version {VERSION} for the CPU, which is tested, got "
                f"{vllm.__version__} for {current_platform.device_type}"
            )
        self._heads = heads = Heads(ensemble, active)
        self._drawing = drawing = Drawing(ensemble, mechanism, accountant, active)
        row = ensemble.sequence_bytes(1, answer_bytes=drawing.answer_bytes, active=active)
        self._sequences = max(1, min(_SEQUENCES, memory_bytes // 2 // row))
        cache = memory_bytes - self._sequences * row
        if cache <= 0:
            raise ValueError(
                f"memory_bytes must be > {row}, which the rows of one sequence take, got "
                f"{memory_bytes}"
            )
        arguments: dict[str, object] = {
            "model": base,
            "dtype": str(ensemble.dtype).removeprefix("torch."),
            "max_model_len": -1,  # as much as fits the cache
            "max_num_seqs": self._sequences,
            "kv_cache_memory_bytes": cache,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
        }
        config = EngineArgs(**(arguments | others)).create_engine_config()
        self._core = InprocClient(config, PrivateExecutor, False)
        self.window = int(config.model_config.max_model_len) - 1
        self._running: dict[str, Prompt] = {}
        self._names: dict[Prompt, str] = {}
        self._numbers = count()
        core = self._core.engine_core
        executor: PrivateExecutor = core.model_executor
        tokens = [(7 * place + 3) % ensemble.vocab_size for place in range(min(16, self.window))]
        rows = partial(heads.checked_rows, tokens=tokens)
        executor.begin(core.scheduler, rows, drawing, self._running)
        first = Prompt(tuple(tokens), 1, public=True)
        self.admit([first])
        while not self.step():
            pass
        self.leave([first])
        ensemble.give_up_trunk()
        executor.begin(core.scheduler, heads.rows, drawing, self._running)

    def close(self) -> None:
        """Free vLLM's memory, so that this process can have another one."""
        self._core.shutdown()

    def room(self, waiting: Sequence[Prompt]) -> int:
        """Return how many of the waiting prompts, from the first, should join now."""
        return min(len(waiting), self._sequences - len(self._running))

    def admit(self, joining: Sequence[Prompt]) -> None:
        """Give prompts to vLLM's scheduler."""
        for prompt in joining:
            name = str(next(self._numbers))
            params = SamplingParams(max_tokens=prompt.max_tokens, ignore_eos=True, detokenize=False)
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=list(prompt.tokens),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=prompt.client or None,
                data_parallel_rank=None,
            )
            self._running[name], self._names[prompt] = prompt, name
            self._core.add_request(request)

    def step(self) -> list[tuple[Prompt, int]]:
        """Return the next token of every sequence that vLLM's scheduler has chosen, all charged.

        Raises:
            BudgetSpentError: the plan is spent, although the server reserves its tokens.
            LedgerError: the charge could not be made durable. No token was released.
            RuntimeError: more was charged than released, which could pay for a later step.
        """
        torch.get_num_threads()  # OpenMP learns torch's number in each thread, before vLLM asks it
        outputs = self._core.get_output().outputs
        self._drawing.check_all_drawn()
        return [(self._running[out.request_id], t) for out in outputs for t in out.new_token_ids]

    def leave(self, ended: Collection[Prompt]) -> None:
        """Remove sequences; vLLM has removed those with all of their tokens already."""
        names = [self._names.pop(prompt) for prompt in ended]
        self._core.abort_requests(names)
        for name in names:
            del self._running[name]
