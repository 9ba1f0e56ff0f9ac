"""The options of vLLM's HTTP server under which the gate sees every request, and no log does."""

from __future__ import annotations

import os
from typing import Any

from adapmixed.serving.guard import is_loopback
from adapmixed.vllm.options import GATE, Options


def check_arguments(arguments: Any, options: Options) -> None:
    """Raise ValueError unless the HTTP server can be served; the message names the option.

    Args:
        arguments: vLLM's parsed command line.
        options: the plugin's options.
    """
    for option, wrong, why in _refused(arguments, options):
        if wrong:
            raise ValueError(f"{option} {why}")


def _refused(arguments: Any, options: Options) -> list[tuple[str, bool, str]]:
    """Return options of vLLM, whether each has a refused value, and what it must be."""
    logs = "cannot be used with private answers: it logs what clients ask, and the gate's secret"
    times = "cannot be used with private answers: it tells clients the engine's times"
    keys = "cannot be used with private answers: 'adapmixed vllm-config --keys' has keys"
    variables = {name for name, value in os.environ.items() if value.lower() not in ("", "false")}
    encrypted = bool(arguments.ssl_certfile and arguments.ssl_keyfile) or options.behind_proxy
    return [
        ("--enable-log-requests", arguments.enable_log_requests, logs),
        ("--enable-log-outputs", arguments.enable_log_outputs, logs),
        ("--log-error-stack", arguments.log_error_stack, logs),
        (
            "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
            "VLLM_DEBUG_LOG_API_SERVER_RESPONSE" in variables,
            logs,
        ),
        ("--uvicorn-log-level", arguments.uvicorn_log_level in ("debug", "trace"), logs),
        (
            "--disable-uvicorn-access-log",
            not arguments.disable_uvicorn_access_log,
            "must be given with private answers: the log would have the addresses of clients",
        ),
        ("--enable-per-request-metrics", arguments.enable_per_request_metrics, times),
        ("--api-key", bool(arguments.api_key), keys),
        ("VLLM_API_KEY", "VLLM_API_KEY" in variables, keys),
        (
            "--middleware",
            list(arguments.middleware) != [GATE],
            f"must be {GATE} alone: another one would see requests before it",
        ),
        ("--uds", bool(arguments.uds), "cannot be used with private answers: use --host"),
        (
            f"--host {arguments.host or '0.0.0.0'}",
            not is_loopback(arguments.host or "") and (options.keys is None or not encrypted),
            "needs keys, and TLS or a proxy: give --host, --keys and --tls-cert with --tls-key or "
            "--behind-proxy to 'adapmixed vllm-config'",
        ),
    ]
