"""vLLM's scheduler, which reserves and charges before a step runs.

Every token is scheduled here, by whatever path its request has come. So no token can be drawn that
was not charged.
"""

from __future__ import annotations

import hmac
import logging
import multiprocessing
import os
import threading
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from adapmixed.privacy import Accountant
from adapmixed.serving.query import ReservedError
from adapmixed.vllm.checking import check_config
from adapmixed.vllm.heads import load
from adapmixed.vllm.mark import new_mark
from adapmixed.vllm.parameters import check_parameters
from adapmixed.vllm.till import Grants, Till

GRANTS = "adapmixed_grants"
"""Name of the attribute of a `SchedulerOutput` with the step's `Grants`."""

_LOG = logging.getLogger(__name__)


class ChargingScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler that owns the ledger."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = check_config(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        loaded = load(vllm_config.model_config.model, options.ensemble, active=options.active)
        self._origin = loaded.origin
        self._accountant = Accountant(
            options.delta, path=options.ledger, adjacency=options.adjacency
        )
        self._till = Till(
            self._accountant, options.mechanism, loaded.num_models, loaded.origin, options.block
        )
        self._accountant.register(options.ensemble)
        self._mark = new_mark(options.ledger) if options.gate else None
        self._refused: list[Any] = []
        self._late: list[Any] = []
        _end_with_parent()

    def add_request(self, request: Any) -> None:
        """Queue a request and reserve its max_tokens, or end it without a token.

        A client that came through the gate never sees such an end: the gate has checked and
        reserved before. The gate may know of an ended answer before this process does. So a request
        whose tokens others have reserved is kept until they are free.
        """
        try:
            if request.request_id in self.requests or request.resumable:
                raise ValueError("request must not be continued by another one")
            if request.pooling_params is not None or request.sampling_params is None:
                raise ValueError("request must ask for a completion")
            self._check_mark(request.cache_salt)
            check_parameters(request.sampling_params)
            self._till.reserve(request.request_id, request.max_tokens)
        except ValueError as error:  # an exception would end the engine
            _LOG.warning("a request was refused: %s", error)
            self._refused.append(request)
            return
        except ReservedError:
            self._late.append(request)
            return
        super().add_request(request)

    def _check_mark(self, salt: str | None) -> None:
        """Raise ValueError unless the request has passed the gate, which begins every salt.

        A salt is in no line that vLLM logs at its usual level; sampling parameters can be.
        """
        if self._mark is None:
            return
        given = (salt or "").encode("utf-8", "surrogatepass")[: len(self._mark)]
        if not hmac.compare_digest(given, self._mark):
            raise ValueError(
                "request must come through adapmixed.vllm.gate.Gate: start the server with "
                "--middleware adapmixed.vllm.gate.Gate"
            )

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests, with those that are refused or kept, and not yet told."""
        others = len(self._refused) + len(self._late)
        return int(super().get_num_unfinished_requests()) + others

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside, such as those of clients that have left."""
        late, self._late = self._late, []
        if request_ids is None:
            self._refused += late
            return super().finish_requests(None, *args, **kwargs)
        ended = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        self._late = [one for one in late if one.request_id not in ended]
        return super().finish_requests(ended, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and charge every token that it draws, durably.

        Raises:
            LedgerError: the charge could not be made durable. The step does not run, and the engine
                ends.
        """
        late, self._late = self._late, []
        for request in late:
            self.add_request(request)
        output = super().schedule(*args, **kwargs)
        drawing = {
            name: self.requests[name].num_output_tokens
            for name in output.num_scheduled_tokens
            if not self.requests[name].is_prefill_chunk
        }
        paid = self._till.pay(drawing) if drawing else 0
        setattr(output, GRANTS, Grants(paid, drawing, self._origin))
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Return the tokens of a step for the clients, and an error for each refused request."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)
        for request in self._refused:
            ended = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        self._refused = []
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._till.close(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Close the ledger."""
        super().shutdown()
        self._accountant.close()


def _end_with_parent() -> None:
    """End this process when the front that started it is gone, so that another may charge.

    vLLM's engine core would go on without a front, and hold the ledger.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
