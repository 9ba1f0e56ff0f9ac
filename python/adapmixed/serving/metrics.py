"""The operator's figures in Prometheus form, on the loopback interface alone.

They count requests, sequences and released tokens. Charges, realised losses, spent budgets of
shards, and times, which can depend on private rows, are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from adapmixed.serving.admission import Admission

if TYPE_CHECKING:
    from adapmixed.serving.answers import Scheduler

LOOPBACK = "127.0.0.1"


class Metrics:
    """The figures of one server, in a registry of their own.

    Args:
        scheduler: knows the sequences in the batch and in the queue.
        admission: knows the tokens left of a plan.

    Attributes:
        requests: counts requests; a path is one of the server's, or "other".
        released: counts the tokens that are released to answers.
    """

    def __init__(self, scheduler: Scheduler, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        settings: dict[str, Any] = {"namespace": "adapmixed", "registry": self.registry}
        self.requests = Counter(
            "requests", "HTTP requests by path and status.", ("path", "status"), **settings
        )
        self.released = Counter("released_tokens", "Tokens released to answers.", **settings)
        Gauge("running_sequences", "Sequences in the batch.", **settings).set_function(
            lambda: scheduler.running
        )
        Gauge("waiting_sequences", "Sequences in the queue.", **settings).set_function(
            lambda: scheduler.waiting
        )
        if admission.left is not None:
            text = "Tokens of the plan that are neither charged nor reserved."
            Gauge("plan_tokens_left", text, **settings).set_function(lambda: admission.left or 0)

    def serve(self, port: int) -> Callable[[], None]:
        """Serve the figures at http://127.0.0.1:port/metrics from a thread.

        Returns:
            A function that ends the thread.

        Raises:
            OSError: the port is taken.
        """
        server, thread = start_http_server(port, LOOPBACK, self.registry)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close
