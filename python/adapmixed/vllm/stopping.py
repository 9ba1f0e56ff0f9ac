"""Ends a server of vLLM that stops, whatever its clients do."""

from __future__ import annotations

import logging
from typing import Any

CUT_SECONDS = 5
"""Time that answers have after the engine has ended, until they are cut."""

_LOG = logging.getLogger(__name__)


class Stopping:
    """Knows when vLLM begins to stop, and bounds how long it takes.

    vLLM stops its engine before its HTTP server. A request that comes between waits for an engine
    that has ended, and the HTTP server waits for the request. So the gate must refuse new requests
    from the beginning, and the HTTP server must cut what is left in the end.

    Args:
        state: the state of vLLM's application.
    """

    def __init__(self, state: Any) -> None:
        self._begun = False
        self._server, engine = getattr(state, "server", None), getattr(state, "engine_client", None)
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = CUT_SECONDS
        if engine is not None:
            end = engine.shutdown

            def shutdown(*args: Any, **kwargs: Any) -> Any:
                self._begun = True
                return end(*args, **kwargs)

            engine.shutdown = shutdown

    def fail(self, why: str) -> None:
        """End the server after a fault, as vLLM does if its engine fails."""
        _LOG.error("the server ends: %s", why)
        self._begun = True
        if self._server is not None:
            self._server.should_exit = True

    @property
    def begun(self) -> bool:
        """Whether the server ends, so that no new answer can begin."""
        return self._begun
