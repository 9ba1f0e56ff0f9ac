"""A server of vLLM in a process of its own, as `adapmixed vllm-config` prints it, and a client."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from vllm_cases import write_base, write_ensemble

from adapmixed.serving.usage import read_usage
from adapmixed.vllm.reserved import charged_so_far

START_SECONDS = 240.0


@dataclass
class Reply:
    """What a client got: the status, the headers, the JSON body or the events of a stream."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """A server that starts at once and is waited for."""

    def __init__(
        self,
        folder: Path,
        *,
        queries: int,
        keys: Path | None = None,
        port: int | None = None,
        path: Path | None = None,  # put before PYTHONPATH
        others: tuple[str, ...] = (),  # further options of vLLM
    ) -> None:
        base, ensemble = folder / "base", folder / "ensemble"
        if not base.exists():
            write_base(base)
            write_ensemble(ensemble, base=base)
        self.ledger = folder / "ledger"
        self.port = free_port() if port is None else port
        mechanism = f"clipped-log-pool lower=-1 upper=1 scale=4 queries={queries}"
        options = ["--base", base, "--ensemble", ensemble, "--ledger", self.ledger, "--name", "m"]
        options += [
            "--port",
            self.port,
            "--default-tokens",
            16,
            "--max-tokens",
            200,
            "--allow-weak",
        ]
        options += ["--mechanism", mechanism, *(() if keys is None else ("--keys", keys))]
        config = [sys.executable, "-m", "adapmixed", "vllm-config", *map(str, options)]
        printed = subprocess.run(config, capture_output=True, text=True, check=True).stdout
        command = shlex.split(printed.replace("\\\n", " "))
        command[0] = sys.executable
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28), *others]
        environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        if path is not None:
            environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        self.log = folder / "server.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._wait()
        self.engine = self._engine()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(self.log.read_text()[-4000:])
            try:
                if self.get("/health").status == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"no start within {START_SECONDS} seconds")

    def _engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(
            one for one in children if "EngineCore" in " ".join([one.name(), *one.cmdline()])
        )

    def charged(self) -> int:
        return charged_so_far(str(self.ledger))

    def used(self, name: str) -> int:
        """Return the tokens that a key has used."""
        return read_usage(f"{self.ledger}.usage").get(name, 0)

    def get(self, path: str, key: str | None = None, method: str = "GET") -> Reply:
        return self.send(method, path, None, key)

    def ask(self, key: str | None = None, path: str = "completions", **fields: Any) -> Reply:
        body = {"model": "m", **({"prompt": "The"} if path == "completions" else {}), **fields}
        return self.send("POST", f"/v1/{path}", body, key)

    def send(self, method: str, path: str, body: Any, key: str | None = None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read().decode())
        finally:
            connection.close()

    def kill(self, *, engine: bool) -> None:
        """Kill the engine core or the front, and wait until the other ends by itself."""
        (self.engine if engine else self.process).send_signal(signal.SIGKILL)
        try:
            self.process.wait(60)
            self.engine.wait(60)
        finally:
            self.clear()

    def stop(self) -> int:
        """Stop gracefully; return the exit status of the front."""
        self.process.terminate()
        try:
            status = self.process.wait(60)
            self.engine.wait(60)
            return status
        finally:
            self.clear()

    def clear(self) -> None:
        """Kill what is left of both processes."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        if self.engine.is_running():
            self.engine.kill()


@dataclass
class Load:
    """Clients that read streams and count the pieces they get, each of which has a token."""

    server: Server
    clients: int
    counted: int = 0
    statuses: set[int] = field(default_factory=set)
    going: bool = True

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._read) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        body = {"model": "m", "prompt": "The function", "max_tokens": 150, "stream": True}
        try:
            while self.going:
                connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
                connection.request("POST", "/v1/completions", json.dumps(body))
                response = connection.getresponse()
                with self._lock:
                    self.statuses.add(response.status)
                if response.status != 200:
                    return
                while line := response.readline():
                    if b'"choices":[{' in line:
                        with self._lock:
                            self.counted += 1
        except (OSError, http.client.HTTPException):
            return

    def wait_for(self, tokens: int) -> None:
        end = time.monotonic() + 120
        while self.counted < tokens and time.monotonic() < end:
            time.sleep(0.05)

    def join(self) -> int:
        """Wait for all clients; return the number of pieces that they got."""
        for thread in self._threads:
            thread.join(120)
        return self.counted
