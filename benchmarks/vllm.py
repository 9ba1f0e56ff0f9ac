"""Time private tokens inside vLLM against vLLM's own tokens of the public model, on the CPU.

    python -m benchmarks.vllm [--rounds 3] [--out PREFIX]

The base is the built-in one, with 64 members of random output layers of rank 8, fp32, one thread.
Every round starts vLLM twice, first with the public model alone and then with the plugin, so that
both meet the same neighbours. A start with the plugin compares all rows with our own engine's first
and ends if they differ. The ledger lies in the folder of temporary files. Tokens a second of the
process's own processor time are shown as well: other programs disturb them less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 32)
MODELS, RANK, TOKENS, REPEATS = 64, 8, 100, 5
TEXT = "Every class has one or more base classes, and"


def write_members(folder: Path, base: Path) -> None:
    """Write an ensemble of random output layers."""
    import torch
    from safetensors.torch import save_file

    from adapmixed.ensemble import Manifest, base_files, write_manifest

    shape = json.loads((base / "config.json").read_text())
    generator = torch.Generator().manual_seed(1)
    names: list[str | None] = []
    for number in range(MODELS):
        member = folder / f"member-{number:03d}"
        member.mkdir(parents=True)
        down = torch.randn(RANK, shape["n_embd"], generator=generator) / shape["n_embd"] ** 0.5
        up = torch.randn(shape["vocab_size"], RANK, generator=generator) / RANK**0.5
        weights = {"lora_A": down, "lora_B": up}
        prefix = "base_model.model.lm_head"
        save_file(
            {f"{prefix}.{name}.weight": value for name, value in weights.items()},
            member / "adapter_model.safetensors",
        )
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
            "target_modules": ["lm_head"], "bias": "none", "base_model_name_or_path": str(base),
        }  # fmt: skip
        (member / "adapter_config.json").write_text(json.dumps(config))
        names.append(member.name)
    manifest = Manifest(str(base), tuple(names), {"lm_head": (RANK,)}, base_files=base_files(base))
    write_manifest(folder, manifest)


def child(kind: str, folder: Path) -> None:
    """Time one kind of server, and print tokens a second for every batch as JSON."""
    from vllm import LLM, SamplingParams

    from adapmixed.data.demo import demo_base
    from adapmixed.mechanisms import ClippedLogPool
    from adapmixed.vllm.options import PARAMS, SCHEDULER, WORKER, Options

    settings: dict[str, Any] = {
        "model": str(demo_base()), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 64,
        "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "disable_log_stats": True,
    }  # fmt: skip
    if kind == "private":
        mechanism = ClippedLogPool(-0.25, 1.0, 2.0, queries=10**7)
        options = Options.of(
            mechanism,
            ensemble=str(folder / "ensemble"),
            ledger=str(folder / f"ledger-{os.getpid()}"),
            gate=False,
        )
        settings |= {
            "async_scheduling": False, "scheduler_cls": SCHEDULER, "worker_cls": WORKER,
            "logits_processors": [PARAMS], "additional_config": options.written(),
        }  # fmt: skip
    server = LLM(**settings)
    found: dict[int, list[tuple[float, float]]] = {}
    for batch in BATCHES:
        params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
        server.generate([TEXT] * batch, params, use_tqdm=False)
        for _ in range(REPEATS):
            start = time.perf_counter(), time.process_time()
            server.generate([TEXT] * batch, params, use_tqdm=False)
            tokens = batch * TOKENS
            wall, own = time.perf_counter() - start[0], time.process_time() - start[1]
            found.setdefault(batch, []).append((tokens / wall, tokens / own))
    print("RESULT " + json.dumps(found), flush=True)


def started(kind: str, folder: Path) -> dict[int, list[tuple[float, float]]]:
    """Run `child` in a process of its own."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.vllm", "--child", kind, "--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    line = next(one for one in done.stdout.splitlines() if one.startswith("RESULT "))
    return {int(batch): list(map(tuple, rates)) for batch, rates in json.loads(line[7:]).items()}


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server (default: 3)")
    parser.add_argument("--out", type=Path, help="write PREFIX.json and PREFIX.txt")
    parser.add_argument("--child", choices=("public", "private"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.folder)
        return
    from adapmixed.data.demo import demo_base
    from benchmarks.harness import Neighbours, Report, headline, machine

    about, report, neighbours = machine(), Report(), Neighbours()
    report.say(headline(about))
    report.say(
        f"vLLM on the CPU, the built-in base, N = {MODELS} output layers of rank {RANK}, fp32, "
        f"one thread; medians of {arguments.rounds} starts with {REPEATS} runs of {TOKENS} tokens"
    )
    rates: dict[str, dict[int, list[tuple[float, float]]]] = {"public": {}, "private": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_members(folder / "ensemble", demo_base())
        for _ in range(arguments.rounds):
            for kind, kept in rates.items():
                for batch, values in started(kind, folder).items():
                    kept.setdefault(batch, []).extend(values)
    report.say(f"  {'queries':>9}{'tokens per':>30}{'public':>9}{'private':>9}{'ratio':>7}")
    for batch in BATCHES:
        for place, unit in enumerate(("second", "second of own processor time")):
            both = {kind: [one[place] for one in rates[kind][batch]] for kind in rates}
            public, private = map(statistics.median, both.values())
            ratio = private / public
            report.say(f"  {batch:9}{unit:>30}{public:9.0f}{private:9.0f}{ratio:7.2f}")
            row: dict[str, object] = {"queries": batch, "per": unit, "ratio": ratio, **both}
            report.tables.setdefault("tokens", []).append(row)
    share = report.others(neighbours)
    if arguments.out is not None:
        report.write(arguments.out, machine=about, others=share)


if __name__ == "__main__":
    main()
