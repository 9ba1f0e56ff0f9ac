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
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES
from adapmixed.ensemble.lora import Adapter
from adapmixed.ensemble.output_layer import LogitsRoom
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, Mechanism, PMixED
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom
from adapmixed.text import StopRule

POOL = ClippedLogPool(-0.25, 0.5, queries=10000)
Shape = dict[str, float]
"""Temperature and top-k."""
MECHANISMS: dict[str, tuple[Mechanism, Shape]] = {
    "pmixed": (PMixED(8.0, 1e-5, 10000, 3.0), {}),
    "adapmixed": (AdaPMixED(18.0, 0.2), {}),
    "clipped-log-pool": (POOL, {}),
    "top-k": (POOL, {"top_k": 50}),
    "temperature and top-k": (POOL, {"temperature": 0.8, "top_k": 50}),
    "temperature": (POOL, {"temperature": 0.8}),
    "nearly all tokens": (POOL, {"top_k": 50000}),
    "temperature and nearly all tokens": (POOL, {"temperature": 0.8, "top_k": 50000}),
}
TOKENS = 2


HEAD, BLOCK = ("lm_head", 50257), ("transformer.h.0.attn.c_attn", 24)


def wide(dtype: torch.dtype, *counts: tuple[tuple[str, int], int]) -> Ensemble:
    """Return an ensemble whose memory is almost all logits, with so many members of each layer."""
    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=50257, n_positions=64,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    members = []
    for (layer, size), count in counts:
        members += [Adapter({layer: (torch.randn(8, 2), torch.randn(2, size))})] * count
    return Ensemble(GPT2LMHeadModel(config).to(dtype), members, unverified=())


def capped(dtype: torch.dtype) -> Ensemble:
    """Return an ensemble whose memory is almost all logits, which the model caps."""
    config = Gemma2Config(
        vocab_size=20000, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        final_logit_softcapping=30.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    update = {"lm_head": (torch.randn(8, 2), torch.randn(2, 20000))}
    return Ensemble(Gemma2ForCausalLM(config).to(dtype), [Adapter(update)] * 100, unverified=())


def deep(dtype: torch.dtype, layers: int) -> Ensemble:
    """Return an ensemble whose memory is almost all keys, values and activations."""
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=512, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    update = {
        name: (0.02 * torch.randn(one.in_features, 4), 0.02 * torch.randn(4, one.out_features))
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear) and name != "lm_head"
    }
    return Ensemble(model, [Adapter(update)] * 32, unverified=())


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def first_ends(released: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(released)) == 0


def run(
    ensemble: Ensemble,
    mechanism: Mechanism,
    prompt: torch.Tensor,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    **settings: Any,
) -> None:
    accountant, rng = Accountant(1e-5), SeededRandom(0)
    ensemble.tokenizer = "unused"
    generator = PrivateGenerator(
        ensemble, mechanism, accountant, rng=rng, memory_bytes=memory_bytes
    )
    for _ in generator.stream_tokens(prompt, max_new_tokens=TOKENS, **settings):
        pass


def measure(
    ensemble: Ensemble,
    mechanism: Mechanism,
    prompt: torch.Tensor,
    spare: int,
    stop: StopRule | None,
    shape: Shape,
) -> Any:
    """Return (memory_bytes, peak bytes held) for the least accepted memory plus `spare`."""
    run(ensemble, mechanism, prompt[:1, :2], **shape)  # what libraries keep from their first use
    try:
        run(ensemble, mechanism, prompt, memory_bytes=1, **shape)
    except ValueError as error:
        needed = int(str(error).split(">= ")[1].split()[0]) + spare
    work = partial(run, ensemble, mechanism, prompt, memory_bytes=needed, stop=stop, **shape)
    return needed, held(work)


def held(work: Callable[[], object]) -> int:
    """Return the peak of the memory that the work holds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def measure_reading() -> Any:
    """Measure `iter_logits` as `measure` does: one input in one pass, then one with a cache."""
    config = LlamaConfig(
        vocab_size=2000, hidden_size=256, intermediate_size=256, num_hidden_layers=16,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    update = {"lm_head": (torch.randn(256, 2), torch.randn(2, 2000))}
    ensemble = Ensemble(LlamaForCausalLM(config), [Adapter(update)] * 32, unverified=())
    long = torch.randint(0, 2000, (1, 1024))
    try:
        ensemble.iter_logits(long, memory_bytes=1)
    except ValueError as error:
        memory = int(1.1 * int(str(error).split(">= ")[1].split()[0]))
    short = 1024
    while ensemble.chunk_size(1, short, memory, last_only=False) < short:
        short -= 8

    def read() -> None:
        room = LogitsRoom()
        for ids in (long[:, :short], long):
            for part in ensemble.iter_logits(ids, memory_bytes=memory, room=room):
                del part

    read()  # what libraries keep from their first use
    return memory, held(read)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        ensemble = wide(dtype, (BLOCK, 32))
        prompt = torch.randint(0, 50257, (3, 4))
        cases: list[tuple[str, Ensemble, Mechanism, torch.Tensor, int, StopRule | None, Shape]]
        cases = [
            (name, ensemble, one, prompt, 0, None, shape)
            for name, (one, shape) in MECHANISMS.items()
        ]
        long = torch.randint(0, 500, (2, 48))
        cases.append(("prompt", deep(dtype, 2), POOL, long, 16 << 20, None, {}))
        # Almost all is keys and values, which are copied when a sequence ends.
        longer = torch.randint(0, 500, (3, 160))
        cases.append(("end", deep(dtype, 8), POOL, longer, 4 << 20, first_ends, {}))
        cases.append(("end of few keys", ensemble, POOL, prompt, 0, first_ends, {}))
        head, few = wide(dtype, (HEAD, 100)), wide(dtype, (HEAD, 6), (BLOCK, 42))
        cases.append(("head", head, POOL, prompt, 0, None, {}))
        cases.append(("end of a head", head, POOL, prompt, 0, first_ends, {}))
        cases.append(("head beside blocks", few, POOL, prompt, 0, None, {}))
        cases.append(("cap", capped(dtype), POOL, prompt % 20000, 0, None, {}))
        for name, owner, mechanism, ids, spare, stop, shape in cases:
            tell(name, dtype, *measure(owner, mechanism, ids, spare, stop, shape))
    tell("room", torch.float32, *measure_reading())


def tell(name: str, dtype: torch.dtype, needed: int, held: int) -> None:
    found = {"case": name, "dtype": str(dtype), "needed": needed, "held": held}
    print(json.dumps(found), flush=True)


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
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == 2 * 15 + 1
    for case in found:
        # The bound is not far too large either.
        assert 0.5 * case["needed"] < case["held"] <= 1.15 * case["needed"], case


if __name__ == "__main__":
    main()
