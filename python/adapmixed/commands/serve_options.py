"""The options of servers for the network, for answers and for weak guarantees; their checks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from adapmixed.commands.options import option

DEFAULT_TOKENS = 256
"""Largest number of tokens of an answer without max_tokens."""


@dataclass
class ServerOptions:
    """The options of servers."""

    host: str = option("address to listen at", "127.0.0.1")
    port: int = option("port", 8000)
    keys: Path | None = option("file of keys ('adapmixed keys')", metavar="FILE")
    tls: Path | None = option("files for TLS (PEM)", nargs=2, metavar=("CERTIFICATE", "KEY"))
    behind_proxy: bool = option("a proxy on the way to this address encrypts what clients send")
    metrics_port: int | None = option(
        "serve figures for Prometheus at this port of 127.0.0.1 (default: not)"
    )
    max_tokens: int = option("largest max_tokens of a request", 1024)
    allow_weak: bool = option(
        "serve although the guarantee is weak (epsilon above 10, delta above 0.001), its epsilon "
        "has no limit, it depends on the private data, or there is none"
    )


NETWORK = "host port keys tls behind_proxy"


def check_extra(device: str) -> None:
    """Raise ValueError unless the packages of the extra `serve` and of --device are installed."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"adapmixed serve needs {error.name}: pip install 'adapmixed[serve]'"
        ) from None
    if device == "vllm" and find_spec("vllm") is None:
        raise ValueError("--device vllm needs vllm, which is not installed here")


def check_network(arguments: argparse.Namespace) -> None:
    """Raise ValueError unless others can reach the server with keys and encryption alone."""
    import ssl

    from adapmixed.serving.guard import is_loopback

    if arguments.tls is not None:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*arguments.tls)
    if arguments.behind_proxy and arguments.keys is None:
        raise ValueError("--behind-proxy needs --keys: a proxy passes on requests of anyone")
    encrypted = arguments.tls is not None or arguments.behind_proxy
    if not is_loopback(arguments.host) and (arguments.keys is None or not encrypted):
        raise ValueError(
            f"--host {arguments.host} needs --keys, and --tls or --behind-proxy: without them, "
            "--host must be an address of this machine alone, such as 127.0.0.1"
        )
    for name in ("port", "metrics_port"):
        value = getattr(arguments, name, None)
        if value is not None and not 0 <= value <= 65535:
            raise ValueError(f"--{name.replace('_', '-')} must be in [0, 65535], got {value}")
