"""Runs vLLM's model in this process, and draws private tokens in the place of its sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import SamplerOutput

from adapmixed.ensemble.lora import Logits
from adapmixed.serving.engine import Drawing, Prompt

Rows = Callable[[Tensor, Tensor], Logits]
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
        self, scheduler: Any, rows: Rows, drawing: Drawing, prompts: Mapping[str, Prompt]
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

    def __init__(self, public: Any, rows: Rows, drawing: Drawing) -> None:
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
