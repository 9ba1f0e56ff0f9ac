"""vLLM's worker on a CPU, whose sampler draws private tokens."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from adapmixed.vllm.checking import check_config
from adapmixed.vllm.heads import load
from adapmixed.vllm.parameters import shape_of
from adapmixed.vllm.sampler import PrivateSampler, Step
from adapmixed.vllm.scheduler import GRANTS
from adapmixed.vllm.self_test import check_same_rows
from adapmixed.vllm.till import Grants


class PrivateWorker(CPUWorker):  # type: ignore[misc]
    """A worker that runs the public model, and draws what the scheduler has charged.

    With several tensor parallel processes the first one holds all members and draws; the others
    get its tokens.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._options = check_config(vllm_config)
        self._grants: Grants | None = None
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the public model and the members, and replace the sampler."""
        super().load_model(*args, **kwargs)
        model, group = self.model_config, get_tp_group()
        options = self._options
        loaded = load(model.model, options.ensemble, model.dtype, active=options.active)
        draws = group.rank_in_group == 0
        self._loaded = loaded if draws else None
        self._heads = loaded.heads(self.device) if draws else None
        self._sampler = PrivateSampler(
            self.model_runner.sampler,
            self._heads,
            self._options.mechanism,
            loaded.num_models,
            loaded.origin,
            group if group.world_size > 1 else None,
        )
        self.model_runner.sampler = self._sampler

    def compile_or_warm_up_model(self) -> Any:
        """Warm up; then compare vLLM's rows with our own engine's, and refuse to serve others."""
        times = super().compile_or_warm_up_model()
        check_same_rows(self.model_runner, self._loaded, self._heads)
        self._loaded = None
        self._sampler.start()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the public model, and keep the step's grants for the sampler."""
        self._grants = getattr(scheduler_output, GRANTS, None)
        self._sampler.forget(scheduler_output.finished_req_ids)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw one token for each granted row."""
        runner = self.model_runner
        if grammar_output is not None:
            raise RuntimeError("structured output was not refused before")
        state = runner.execute_model_state
        if state is not None:
            self._sampler.expect(self._step(state))
        return super().sample_tokens(grammar_output)

    def _step(self, state: Any) -> Step:
        if self._grants is None:
            raise RuntimeError("a step has no grants")
        runner = self.model_runner
        names = list(runner.input_batch.req_ids)
        requests = [runner.requests[name] for name in names]
        dropped = runner.discard_request_mask.np[: len(names)]
        grants, self._grants = self._grants, None
        return Step(
            state.sample_hidden_states,
            names,
            [len(one.output_token_ids) for one in requests],
            [not dropped for dropped in dropped.tolist()],
            [shape_of(one.sampling_params) for one in requests],
            grants,
        )
