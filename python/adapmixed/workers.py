"""The server that worker processes are forked from."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def start_server() -> ForkServerContext:
    """Start the server, or return the context of the running one.

    Forks of this process could hang in its thread pools, and fresh interpreters import for seconds.
    The server only imports what training needs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adapmixed.training.run", "peft"])
    forkserver.ensure_running()
    return context
