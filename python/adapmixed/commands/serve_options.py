"""The options of servers for the network, for answers and for weak guarantees; their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_TOKENS = 256
"""Largest number of tokens of an answer without max_tokens."""


def add_network_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --host, --port, --keys, --tls and --behind-proxy; return their group."""
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)"
    )
    group.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    group.add_argument("--keys", type=Path, metavar="FILE", help="file of keys ('adapmixed keys')")
    group.add_argument(
        "--tls", type=Path, nargs=2, metavar=("CERTIFICATE", "KEY"), help="files for TLS (PEM)"
    )
    group.add_argument(
        "--behind-proxy",
        action="store_true",
        help="a proxy on the way to this address encrypts what clients send",
    )
    return group


def add_max_tokens(parser: argparse.ArgumentParser) -> None:
    """Add --max-tokens."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=1024,
        help="largest max_tokens of a request (default: 1024)",
    )


def add_allow_weak(parser: argparse.ArgumentParser) -> None:
    """Add --allow-weak."""
    parser.add_argument(
        "--allow-weak",
        action="store_true",
        help="serve although the guarantee is weak (epsilon above 10, delta above 0.001), its "
        "epsilon has no limit, it depends on the private data, or there is none",
    )


def check_extra() -> None:
    """Raise ValueError unless the packages of the extra `serve` are installed."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"adapmixed serve needs {error.name}: pip install 'adapmixed[serve]'"
        ) from None


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
