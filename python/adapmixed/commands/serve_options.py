"""The options of servers for the network, for limits and for weak guarantees; their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

from adapmixed.limits import check_count, check_number

DEFAULT_TOKENS, DEMO_DEFAULT_TOKENS = 256, 64


def add_network_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --host, --port, --keys and what belongs to them; return their group."""
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)"
    )
    group.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    group.add_argument("--keys", type=Path, metavar="FILE", help="file of keys ('adapmixed keys')")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="TLS certificate (PEM)")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    group.add_argument(
        "--behind-proxy",
        action="store_true",
        help="a proxy on the way to this address encrypts what clients send",
    )
    return group


def add_limit_options(parser: argparse.ArgumentParser, *, waiting: int, also: str = "") -> None:
    """Add the limits of one answer and of the queue.

    Args:
        parser: gets the options.
        waiting: default of --waiting.
        also: what to add to the default of --default-tokens.
    """
    parser.add_argument(
        "--default-tokens",
        type=int,
        help="largest number of tokens of an answer without max_tokens (default: "
        f"{DEFAULT_TOKENS}{also})",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=1024,
        help="largest max_tokens of a request (default: 1024)",
    )
    parser.add_argument(
        "--waiting",
        type=int,
        default=waiting,
        help=f"largest number of sequences that wait; more requests get 503 (default: {waiting})",
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

    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ValueError("--tls-cert and --tls-key must be given together")
    if arguments.tls_cert is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(arguments.tls_cert, arguments.tls_key)
    if arguments.behind_proxy and arguments.keys is None:
        raise ValueError("--behind-proxy needs --keys: a proxy passes on requests of anyone")
    encrypted = arguments.tls_cert is not None or arguments.behind_proxy
    if not is_loopback(arguments.host) and (arguments.keys is None or not encrypted):
        raise ValueError(
            f"--host {arguments.host} needs --keys, and --tls-cert with --tls-key or "
            "--behind-proxy: without them, --host must be an address of this machine alone, such "
            "as 127.0.0.1"
        )
    for name in ("port", "metrics_port"):
        value = getattr(arguments, name, None)
        if value is not None and not 0 <= value <= 65535:
            raise ValueError(f"--{name.replace('_', '-')} must be in [0, 65535], got {value}")


def check_limits(arguments: argparse.Namespace) -> None:
    """Choose the default number of tokens, and raise ValueError for a limit that is not valid."""
    from adapmixed.mechanisms.rows import check_shape
    from adapmixed.ranks import Place

    if Place.from_environment().world > 1:
        raise ValueError("serve must run in one process, so that one queue is answered")
    if arguments.default_tokens is None:
        most = DEFAULT_TOKENS if arguments.demo is None else DEMO_DEFAULT_TOKENS
        arguments.default_tokens = min(most, max(arguments.max_tokens, 1))
    for name in ("default_tokens", "max_tokens", "waiting"):
        check_count(f"--{name.replace('_', '-')}", getattr(arguments, name))
    if arguments.default_tokens > arguments.max_tokens:
        raise ValueError(
            f"--default-tokens must be <= --max-tokens {arguments.max_tokens}, got "
            f"{arguments.default_tokens}"
        )
    check_number("--stop-seconds", arguments.stop_seconds, least=0.0)
    check_shape(arguments.temperature, arguments.top_k)
