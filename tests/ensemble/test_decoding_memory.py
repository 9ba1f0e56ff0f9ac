"""--memory bounds the memory in use, measured as resident memory of a separate process.

As a program this file measures the memory of decoding at its least `memory_bytes`, and prints one
line of JSON per case. It returns freed blocks at once (`MALLOC_MMAP_THRESHOLD_`), so that its
resident memory is what it holds.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES
from adapmixed.ensemble.lora import Adapter, LogitsRoom, layer_shape
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, Mechanism, PMixED
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

POOL = ClippedLogPool(-0.25, 0.5, queries=10000)
# Temperature, top-k and what ends sequences.
CASES: dict[str, tuple[Mechanism, dict[str, Any]]] = {
    "pmixed": (PMixED(8.0, 1e-5, 10000, 3.0), {}),
    "adapmixed": (AdaPMixED(18.0, 0.2), {}),
    "clipped-log-pool": (POOL, {}),
    "top-k": (POOL, {"top_k": 50}),
    "temperature and top-k": (POOL, {"temperature": 0.8, "top_k": 50}),
    "temperature": (POOL, {"temperature": 0.8}),
    "nearly all tokens": (POOL, {"top_k": 50000}),
    "temperature and nearly all tokens": (POOL, {"temperature": 0.8, "top_k": 50000}),
}
END = {"stop": lambda prompt: torch.arange(len(prompt)) == 0}  # of the first sequence
HEAD, BLOCK = ("lm_head",), ("transformer.h.0.attn.c_attn",)


def ensemble(
    family: str, dtype: torch.dtype, *groups: tuple[tuple[str, ...], int], **config: Any
) -> Ensemble:
    """Return an ensemble with so many members of each group of layers; of all without a name."""
    architecture = AutoConfig.for_model(family, bos_token_id=None, eos_token_id=None, **config)
    model = AutoModelForCausalLM.from_config(architecture).to(dtype)
    linear = [n for n, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    members = []
    for names, count in groups:
        shapes = {
            name: layer_shape(model.get_submodule(name))
            for name in names or [name for name in linear if name != "lm_head"]
        }
        update = {
            name: (0.02 * torch.randn(size_in, 4), 0.02 * torch.randn(4, size_out))
            for name, (size_in, size_out) in shapes.items()
        }
        members += [Adapter(update)] * count
    return Ensemble(model, members, unverified=())


# Almost all of the memory is logits, logits that the model caps, or keys, values and activations.
wide = partial(ensemble, "gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=50257, n_positions=64)
capped = partial(
    ensemble, "gemma2", vocab_size=20000, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    final_logit_softcapping=30.0,
)  # fmt: skip
deep = partial(
    ensemble, "llama", vocab_size=500, hidden_size=128, intermediate_size=512,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
)  # fmt: skip


def status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def needed(asks: Callable[..., object]) -> int:
    """Return the least memory that is accepted."""
    with pytest.raises(ValueError, match="memory_bytes must be >= ") as error:
        asks(memory_bytes=1)
    return int(str(error.value).split(">= ")[1].split()[0])


def tell(name: str, dtype: torch.dtype, memory: int, work: Callable[[], object]) -> None:
    """Print the peak of the memory that the work holds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    work()
    case = {"case": name, "dtype": str(dtype), "needed": memory, "held": status("VmHWM") - before}
    print(json.dumps(case), flush=True)


def decode(ensemble: Ensemble, mechanism: Mechanism, prompt: torch.Tensor, **settings: Any) -> None:
    ensemble.tokenizer = "unused"
    memory, stop = settings.pop("memory_bytes", DEFAULT_MEMORY_BYTES), settings.get("stop")
    options: Any = {"rng": SeededRandom(0), "memory_bytes": memory}
    generator = PrivateGenerator(ensemble, mechanism, Accountant(1e-5), **options)
    settings["stop"] = stop and partial(stop, prompt)
    for _ in generator.stream_tokens(prompt, max_new_tokens=2, **settings):
        pass


def read() -> None:
    """Measure `iter_logits`: one input in one pass, then one with a cache."""
    config: dict[str, Any] = dict(vocab_size=2000, hidden_size=256, intermediate_size=256)
    config |= dict(num_hidden_layers=16, num_key_value_heads=2, max_position_embeddings=1024)
    model = deep(torch.float32, (HEAD, 32), **config)
    long = torch.randint(0, 2000, (1, 1024))
    memory = int(1.1 * needed(partial(model.iter_logits, long)))
    short = 1024
    while model.chunk_size(1, short, memory, last_only=False) < short:
        short -= 8

    def both() -> None:
        room = LogitsRoom()
        for ids in (long[:, :short], long):
            for part in model.iter_logits(ids, memory_bytes=memory, room=room):
                del part

    both()  # what libraries keep from their first use
    tell("room", torch.float32, memory, both)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    prompt, *longer = torch.randint(0, 50257, (3, 4)), (2, 48), (3, 160)
    two, three = (torch.randint(0, 500, size) for size in longer)
    for dtype in (torch.float32, torch.bfloat16):
        block, head = wide(dtype, (BLOCK, 32)), wide(dtype, (HEAD, 100))
        for name, owner, ids, spare, mechanism, more in [
            *((name, block, prompt, 0, method, more) for name, (method, more) in CASES.items()),
            ("prompt", deep(dtype, ((), 32), num_hidden_layers=2), two, 16 << 20, POOL, {}),
            # Almost all is keys and values, which are copied when a sequence ends.
            ("end", deep(dtype, ((), 32), num_hidden_layers=8), three, 4 << 20, POOL, END),
            ("end of few keys", block, prompt, 0, POOL, END),
            ("head", head, prompt, 0, POOL, {}),
            ("end of a head", head, prompt, 0, POOL, END),
            ("head beside blocks", wide(dtype, (HEAD, 6), (BLOCK, 42)), prompt, 0, POOL, {}),
            ("cap", capped(dtype, (HEAD, 100)), prompt % 20000, 0, POOL, {}),
        ]:
            work = partial(decode, owner, mechanism, **more)
            work(ids[:1, :2])  # what libraries keep from their first use
            memory = spare + needed(partial(work, ids))
            tell(name, dtype, memory, partial(work, ids, memory_bytes=memory))
    read()


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="the peak of the resident memory cannot be begun anew (/proc/self/clear_refs)",
)
@pytest.mark.slow
def test_what_decoding_holds_stays_within_memory_bytes() -> None:
    """oneDNN's own memory in bfloat16 depends on the processor and is not counted.

    So the test makes oneDNN use the same kernels on all processors.
    """
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2",
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(cases) == 2 * 15 + 1
    for case in cases:
        # The bound is not far too large either.
        assert 0.5 * case["needed"] < case["held"] <= 1.15 * case["needed"], case


if __name__ == "__main__":
    main()
