"""``adapmixed serve``: answer OpenAI clients privately over HTTP.

Serve /v1/completions and /v1/chat/completions. Every released token is one query, charged in the
ledger before it is drawn. SIGTERM and SIGINT stop the server gracefully. Other machines can reach
it only with --keys and TLS, or with --keys behind a proxy.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.generate import accounted
from adapmixed.commands.ledger import all_ledgers
from adapmixed.commands.options import (
    MechanismOptions,
    SharedOptions,
    add_options,
    check_alone,
    check_output,
    load_ensemble,
    mechanism_for,
    option,
    take_plan,
)
from adapmixed.errors import missing_extra
from adapmixed.limits import check_count

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism, Origin
    from adapmixed.privacy import Accountant, Guarantee
    from adapmixed.serving.engine import Engine

DEMO_EPSILON, DEMO_TOKENS = 3.0, 4096
DEMO_NAME = "adapmixed-demo"
_CHOSEN_BY_DEMO = ("base", "ensemble", "ledger", "plan", "mechanism", "epsilon")


@dataclass
class ServerOptions:
    """The options for the network, for answers and for weak guarantees."""

    host: str = option("address to listen at", "127.0.0.1")
    port: int = option("port", 8000)
    keys: Path | None = option("keys of the clients, by 'adapmixed keys'")
    tls: Path | None = option("PEM files for TLS", nargs=2, metavar=("CERTIFICATE", "KEY"))
    behind_proxy: bool = option("a proxy encrypts what clients send")
    metrics_port: int | None = option("of 127.0.0.1, for Prometheus (default: none)")
    max_tokens: int = option("largest max_tokens of a request", 1024)
    when_spent: str = option(
        "answer when the plan is spent: status 429, or the public model",
        "error",
        choices=("error", "public"),
    )
    demo: Path | None = option(
        f"serve the built-in ensemble, {DEMO_TOKENS} tokens within epsilon {DEMO_EPSILON:g} "
        "(default: report)",
        nargs="?",
        const=Path("report"),
        metavar="FOLDER",
    )
    name: str | None = option("name of the model (default: that of the ensemble's folder)")
    allow_weak: bool = option(
        "serve without a limit of epsilon, above epsilon 10 or delta 0.001, or without guarantee"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, ServerOptions, "demo")
    add_options(parser, SharedOptions, "base ensemble", required=False)
    add_options(parser, ServerOptions, "name max_tokens when_spent")
    add_options(parser, SharedOptions, "active ledger no_create memory")
    vllm = "vllm: vLLM on the CPU, for members of the output layer"
    add_options(parser, SharedOptions, "device", choices=("cpu", "cuda", "vllm"), help=vllm)
    add_options(parser, SharedOptions, "dtype")
    network = "host port keys tls behind_proxy metrics_port"
    add_options(parser, ServerOptions, network, title="network")
    add_options(parser, MechanismOptions, title="mechanism and guarantee")
    add_options(parser, ServerOptions, "allow_weak")
    parser.set_defaults(operator=False)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal (status 0), or until the engine fails (status 1)."""
    _check_extra(arguments.device)
    _check_network(arguments)
    check_alone("serve")
    check_count("--max-tokens", arguments.max_tokens)
    with ExitStack() as stack:
        return _serve(arguments, stack)


def _check_extra(device: str) -> None:
    """Raise ValueError unless the packages of the extra `serve` and of --device are installed."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra("adapmixed serve", str(error.name), "serve", error) from None
    if device == "vllm" and find_spec("vllm") is None:
        raise ValueError("--device vllm needs vllm, which is not installed here")


def _check_network(arguments: argparse.Namespace) -> None:
    """Raise ValueError unless others can reach the server with keys and encryption alone."""
    import ssl

    from adapmixed.serving.app import is_loopback

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
    check_count("--port", arguments.port, 0, 65_535)
    check_count("--metrics-port", arguments.metrics_port or 0, 0, 65_535)


def _serve(arguments: argparse.Namespace, stack: ExitStack) -> int:
    from adapmixed.mechanisms import Origin
    from adapmixed.privacy import Accountant
    from adapmixed.ranks import SINGLE
    from adapmixed.serving.admission import Admission, Clients, read_keys
    from adapmixed.serving.app import Listener, Service, bound
    from adapmixed.serving.batch import BatchEngine
    from adapmixed.serving.fields import ServedModel
    from adapmixed.serving.metrics import LOOPBACK

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # of connections, too
    with suppress(ValueError, OSError):  # macOS has a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.keys is not None:  # a bad file is found before models are loaded
        read_keys(arguments.keys)
        # Whoever still sends SIGHUP to have the file read again must cut no answer.
        stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN))
    listening = stack.enter_context(bound(arguments.host, arguments.port))
    figures = stack.enter_context(bound(LOOPBACK, arguments.metrics_port or 0))
    mechanism = _demo(arguments) if arguments.demo is not None else _chosen(arguments)
    then_public = arguments.when_spent == "public"
    if then_public and mechanism.planned_queries is None:
        raise ValueError(
            f"--when-spent public needs queries= in --mechanism, got {mechanism}: only a plan can "
            "be spent"
        )
    print(f"Loading {arguments.ensemble} ...", file=sys.stderr, flush=True)
    ensemble = load_ensemble(arguments, SINGLE)
    binding = mechanism, ensemble.num_models, Origin.of(ensemble, arguments.active)
    empty = Accountant(arguments.delta, epsilon=arguments.epsilon, adjacency=arguments.adjacency)
    promise(empty, *binding, allow_weak=arguments.allow_weak)
    accountant = stack.enter_context(accounted(arguments))
    settings = {"memory_bytes": arguments.memory, "active": arguments.active}
    engine: Engine
    if arguments.device == "vllm":
        from adapmixed.vllm.engine import VllmEngine

        engine = VllmEngine(arguments.base, ensemble, mechanism, accountant, **settings)
    else:
        engine = BatchEngine(ensemble, mechanism, accountant, **settings)
    clients = None
    if arguments.keys is not None:
        clients = Clients(arguments.keys, arguments.ledger)
        stack.callback(clients.close)
    admission = Admission(accountant, mechanism, clients)
    name = arguments.name or Path(os.path.abspath(arguments.ensemble)).name
    words = ensemble.tokenizer, ensemble.end_tokens, ensemble.vocab_size
    model = ServedModel(name, *words, engine.window, arguments.max_tokens)
    service = Service(engine, model, admission, then_public=then_public)
    stack.callback(service.scheduler.stop)
    if arguments.metrics_port is not None:
        figures.close()
        stack.callback(service.metrics.serve(arguments.metrics_port))
    planned = admission.left is not None
    left = f" {admission.left} tokens are left of the plan." if planned else ""
    left += " Then the public model answers." if then_public else ""
    host, port = listening.getsockname()[:2]
    url = f"http{'s' * bool(arguments.tls)}://{f'[{host}]' if ':' in host else host}:{port}/v1"
    every = all_ledgers(arguments.ensemble, arguments.ledger)
    if every and accountant.guarantee().kind == "public":  # the first token costs a whole plan
        every = f"Before the first private token of this one: {every}"
    line = f"Serving {model.name} at {url}. {promise(accountant, *binding)}{left} {every}"
    listening.listen()
    print(line.rstrip(), file=sys.stderr, flush=True)
    Listener(service, tls=arguments.tls).run(sockets=[listening])
    return 1 if service.scheduler.failed else 0


def _chosen(arguments: argparse.Namespace) -> Mechanism:
    """Return the mechanism that the options choose; check that nothing is missing."""
    for name in ("base", "ensemble"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name} must be given, or --demo for the built-in ensemble")
    if arguments.device == "vllm" and not os.path.isdir(arguments.base):
        raise ValueError(f"--base must be a folder with --device vllm, got {arguments.base}")
    mechanism = mechanism_for(arguments, None)
    if arguments.ledger is None:
        raise ValueError("--ledger must be given: a server without one forgets what was spent")
    check_output("--ledger", arguments.ledger)
    return mechanism


def _demo(arguments: argparse.Namespace) -> Mechanism:
    """Train what is missing of the built-in ensemble, and return a planned mechanism for it."""
    for name in _CHOSEN_BY_DEMO:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} must not be given with --demo, which chooses it")
    take_plan(arguments)  # the defaults
    from adapmixed.data import demo_base
    from adapmixed.mechanisms import ClippedLogPool, planned
    from adapmixed.privacy.planner import chosen
    from adapmixed.training.demo import NUM_MODELS, train_demo

    arguments.base, arguments.ensemble = str(demo_base()), arguments.demo / "ensemble"
    arguments.ledger = arguments.demo / "serve.ledger"
    arguments.name = arguments.name or DEMO_NAME
    budget = (DEMO_EPSILON, arguments.delta, NUM_MODELS, DEMO_TOKENS, arguments.adjacency)
    (plan,) = (plan for plan in chosen(*budget) if plan.mechanism == ClippedLogPool.name)
    check_output("--demo", arguments.demo, folder=True)
    train_demo(arguments.ensemble)
    return planned(plan)


def promised(
    accountant: Accountant, mechanism: Mechanism, num_models: int, origin: Origin
) -> Guarantee:
    """Return the guarantee of an account's answers together with all answers to come.

    One made-up answer is charged to a copy of the account, which is thrown away. If no plan and no
    budget limits ε, that ε is too small: see `Guarantee.limited`.

    Args:
        accountant: the account that will be charged. It is not changed.
        mechanism: how queries will be answered.
        num_models: N.
        origin: the ensemble that will answer.

    Raises:
        ValueError: the account is bound to another mechanism or ensemble.
    """
    import torch

    from adapmixed.mechanisms import ShapedLogits
    from adapmixed.privacy import Accountant, BudgetSpentError
    from adapmixed.rng import SecureRandom

    past, trial = accountant.guarantee(), Accountant.from_state(accountant.state())
    asking: Any = mechanism
    if hasattr(mechanism, "public_confidence"):  # no rows are unsure enough for one near 0
        asking = replace(asking, public_confidence=None)
    rows = ShapedLogits(torch.zeros(num_models, 1, 2), torch.zeros(1, 2), None, 2)
    ticket = asking.propose_rows(rows, rng=SecureRandom(), origin=origin)
    ticket.mechanism = mechanism
    try:
        trial.charge(ticket)
    except BudgetSpentError:  # no private answer can follow
        return past
    return replace(trial.guarantee(), queries=past.queries, public_queries=past.public_queries)


def promise(
    accountant: Accountant,
    mechanism: Mechanism,
    num_models: int,
    origin: Origin,
    *,
    allow_weak: bool = True,
) -> str:
    """Return what may be published of an account's answers and of all answers to come.

    Arguments and errors are those of :func:`promised`.

    Raises:
        ValueError: the guarantee is weak, without a limit, private or none, and not allowed.
    """
    from adapmixed.privacy.guarantee import weak_warnings

    total = promised(accountant, mechanism, num_models, origin)
    fixed = total.limited and total.kind in ("fixed", "public")
    if not total.limited:
        past = replace(accountant.guarantee(), caveats=total.caveats)
        so_far = [str(past)] if past.queries else replace(total, epsilon=math.inf).warnings
        text = " ".join(["The ε of all answers has no limit and grows with every answer.", *so_far])
    elif total.kind.startswith("data-dependent"):
        words = "The cost of its answers depends on the private data and is for the operator alone."
        text = " ".join([words, *total.warnings])
    else:
        text = str(total) if total.kind != "none" else "Its answers have no privacy guarantee."
    if not allow_weak and (not fixed or weak_warnings(total.epsilon or 0.0, total.delta)):
        raise ValueError(f"--allow-weak must be given to serve this mechanism: {text}")
    return text
