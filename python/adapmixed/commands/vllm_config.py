"""``adapmixed vllm-config``: print the command that serves an ensemble inside vLLM."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.mechanisms import add_mechanism_options, check_chosen, mechanism_of
from adapmixed.commands.options import SharedOptions, add_options, quiet_libraries
from adapmixed.commands.plan_file import take_plan
from adapmixed.commands.promise import checked, promise, promised
from adapmixed.commands.serve_options import DEFAULT_TOKENS, NETWORK, ServerOptions, check_network

SHUTDOWN_SECONDS = 30
"""Seconds that running answers have after SIGTERM. With 0, vLLM waits for ever for open streams."""

if TYPE_CHECKING:
    from adapmixed.privacy import Accountant
    from adapmixed.vllm.heads import Loaded
    from adapmixed.vllm.options import Options


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "vllm-config",
        help="print the command that serves an ensemble inside vLLM",
        description="Check an ensemble, a mechanism and a ledger, and print the command that "
        "starts vLLM with them. Members must adapt the output layer alone, and the mechanism must "
        "be clipped-log-pool with queries=. Further options of vLLM may be added to the command; "
        "those that would void the guarantee stop the server with an error.",
    )
    parser.add_argument("--base", required=True, type=Path, help="public model: folder")
    add_options(parser, SharedOptions, "ensemble ledger", required=True, type=Path)
    parser.add_argument("--name", help="name of the model (default: the ensemble folder's name)")
    add_options(parser, ServerOptions, NETWORK, title="network")
    add_options(parser, SharedOptions, "dtype")
    add_options(parser, ServerOptions, "max_tokens")
    parser.add_argument(
        "--default-tokens",
        type=int,
        default=DEFAULT_TOKENS,
        help="largest number of tokens of an answer without max_tokens (default: "
        f"{DEFAULT_TOKENS})",
    )
    add_options(parser, SharedOptions, "active")
    parser.add_argument(
        "--block",
        type=int,
        default=16,
        help="tokens of an answer that are charged together, before they are drawn (default: 16)",
    )
    add_mechanism_options(parser)
    add_options(parser, ServerOptions, "allow_weak")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the command, and on standard error the guarantee of its answers."""
    check_network(arguments)
    take_plan(arguments)
    options = _options(arguments)
    quiet_libraries()
    from adapmixed.vllm.heads import load

    for name in ("base", "ensemble"):
        if not getattr(arguments, name).is_dir():
            raise ValueError(f"--{name} must be a folder, got {getattr(arguments, name)}")
    loaded = load(str(arguments.base.resolve()), options.ensemble, active=options.active)
    if loaded.parts.tokenizer is None:
        raise ValueError("--base must have a tokenizer to be served, but has none")
    asked = _account(options, loaded), options.mechanism, loaded.num_models, loaded.origin
    checked(promised(*asked), options.mechanism, allow_weak=arguments.allow_weak)
    print(promise(*asked), file=sys.stderr)
    print(" \\\n  ".join(_command(arguments, options)))
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    from adapmixed.vllm.options import Options

    text = check_chosen(arguments.mechanism)
    if arguments.epsilon is not None:
        raise ValueError(
            "--epsilon cannot be used inside vLLM: what a shard spends of its own budget depends "
            "on the rows; 'adapmixed serve' can keep it"
        )
    shape = {"delta": arguments.delta, "epsilon": None, "way": arguments.adjacency}
    planned = [mechanism_of(text, queries=queries, **shape) for queries in (1, 2)]
    if planned[0] != planned[1] or planned[0].planned_queries is None:
        raise ValueError(
            "--mechanism must have queries=, the number of tokens of all answers, inside vLLM"
        )
    if planned[0].name != "clipped-log-pool":
        raise ValueError(
            f"--mechanism must be clipped-log-pool inside vLLM, got {planned[0].name}: 'adapmixed "
            "plan --mechanism clipped-log-pool' plans it"
        )
    return Options.of(
        planned[0],
        ensemble=str(arguments.ensemble.resolve()),
        ledger=str(arguments.ledger.resolve()),
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        block=arguments.block,
        tokens=min(arguments.default_tokens, arguments.max_tokens),
        max_tokens=arguments.max_tokens,
        keys=None if arguments.keys is None else str(arguments.keys.resolve()),
        behind_proxy=arguments.behind_proxy,
        active=arguments.active,
    )


def _account(options: Options, loaded: Loaded) -> Accountant:
    """Return a copy of the ledger's account, without making or changing the ledger.

    Raises:
        ValueError: the ledger cannot be charged.
    """
    from adapmixed.privacy import Accountant, read_ledger
    from adapmixed.privacy.account import Account, Settings

    path = Path(options.ledger)
    settings = Settings(options.delta, None, options.adjacency)
    account = Account(settings)
    if path.exists():
        account = read_ledger(path).account
        if account.settings != settings:
            raise ValueError(
                f"--ledger must have been made with {settings}, got {account.settings}"
            )
    elif not path.parent.is_dir():
        raise ValueError(f"--ledger must lie in a folder, but there is no {path.parent}")
    account.bound_to(options.mechanism, loaded.num_models, loaded.origin)
    if options.keys is not None:
        from adapmixed.serving.keys import read_keys

        read_keys(options.keys)
    return Accountant.from_state(account.state())


def _command(arguments: argparse.Namespace, options: Options) -> list[str]:
    from adapmixed.vllm.options import GATE, PARAMS, SCHEDULER, WORKER

    settings: dict[str, object] = {
        "model": arguments.base.resolve(),
        "served-model-name": arguments.name or arguments.ensemble.resolve().name,
        "dtype": arguments.dtype,
        "host": arguments.host,
        "port": arguments.port,
        "generation-config": "vllm",
        "scheduler-cls": SCHEDULER,
        "worker-cls": WORKER,
        "logits-processors": PARAMS,
        "middleware": GATE,
        "shutdown-timeout": SHUTDOWN_SECONDS,
        "additional-config": json.dumps(options.written()),
    }
    if arguments.tls is not None:
        settings |= dict(zip(("ssl-certfile", "ssl-keyfile"), arguments.tls, strict=True))
    given = [f"--{name} {shlex.quote(str(value))}" for name, value in settings.items()]
    return [
        "python -m vllm.entrypoints.openai.api_server",
        *given,
        "--no-async-scheduling",
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",  # it would have the addresses of clients
    ]
