"""Time the decoding of an ensemble, and the mechanism's share of a generated token.

    python -m benchmarks.forward [--device cuda] [--quick] [--out PREFIX]

Two questions, GPT-2 shapes with random weights, adapters of rank 4 on c_attn, fp32:

- decode: one token through N members and the public model, as one batched pass and as the loop
  over adapters. The loop calls peft's set_adapter and a forward pass N + 1 times, each member with
  a key/value cache of its own. Both read the same tokens. Their logits are compared first.
- step: a whole generated token at N = 100. It times the pass, by torch operation too, and then
  AdaPMixED's two phases on its logits. The wikitext-103 preset is used with and without its
  screening (without it no query is answered from the public model). It also measures memory: of
  the process, or that held by torch on a GPU. On a GPU a call ends when the GPU has done its work.
"""

from __future__ import annotations

import argparse
import copy
import resource
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble import BatchedLoRA, Decoder, Ensemble
from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom
from benchmarks.cuda_timing import Card, awaited
from benchmarks.harness import Call, Neighbours, Report, Timing, headline, interleave, machine
from benchmarks.parts import parts

RANK = 4
_MEMORY = 1 << 32  # keys and values of N = 100 included, so that a prompt is read at once


@dataclass(frozen=True)
class Shape:
    """A GPT-2."""

    name: str
    layers: int
    width: int
    heads: int
    vocab: int
    positions: int = 1024


SMALL = Shape("GPT-2 small", 12, 768, 12, 50257)
DEMO = Shape("the demo's", 4, 128, 4, 2048)
TINY = Shape("tiny", 2, 32, 2, 512)


def make_base(shape: Shape, device: torch.device) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocab, n_positions=shape.positions, n_embd=shape.width,
        n_layer=shape.layers, n_head=shape.heads, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval().to(device)


def member(i: int) -> str:
    """Return a member's name, no bare number: peft takes the name out of weights' names."""
    return f"member-{i:03d}"


def make_peft(base: Any, models: int, folder: Path) -> tuple[Any, list[Path]]:
    """Return a peft model with random adapters, and the same adapters as folders."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=["c_attn"], task_type="CAUSAL_LM",
                        fan_in_fan_out=True)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), config, adapter_name=member(0))
        for i in range(1, models):
            model.add_adapter(member(i), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.02)
        model.save_pretrained(folder)
    return model.eval().to(base.device), [folder / member(i) for i in range(models)]


class Loop:
    """Member after member; the public model last, with adapters switched off."""

    def __init__(self, model: Any, models: int, prompt: Tensor) -> None:
        from transformers import DynamicCache

        self._model = model
        self._caches = [DynamicCache(config=model.config) for _ in range(models + 1)]
        self._pass(prompt)

    @torch.no_grad()
    def _pass(self, ids: Tensor) -> Tensor:
        rows = []
        for i, cache in enumerate(self._caches[:-1]):
            self._model.set_adapter(member(i))
            rows.append(self._one(ids, cache))
        with self._model.disable_adapter():
            rows.append(self._one(ids, self._caches[-1]))
        return torch.stack(rows)

    def _one(self, ids: Tensor, cache: Any) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1]

    def __call__(self, token: Tensor) -> Tensor:
        """Return (N + 1, b, V), the public model last; the caches are left as they were."""
        logits = self._pass(token[:, None])
        for cache in self._caches:
            cache.crop(-1)
        return logits


def batched(decoder: Decoder, token: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next logits after a token; the cache is left as it was."""
    decoder.append(token)
    decoder._cache.crop(-1)
    decoder._ids = decoder._ids[:, :-1]
    return decoder.logits


def make_prompt(shape: Shape, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, shape.vocab, (1, length), generator=generator).to(device)


def tokens_of(shape: Shape, turn: int, device: torch.device) -> Tensor:
    return torch.tensor([(7919 * turn + 11) % shape.vocab], device=device)


def line(report: Report, table: str, name: str, timing: Timing, note: str, **more: object) -> None:
    spread = f"[{1e3 * timing.fastest:.1f}, {1e3 * timing.slowest:.1f}]"
    report.say(f"  {name:34}{1e3 * timing.median:9.1f} ms  {spread:>20}  {note}".rstrip())
    row = {"name": name, "median": timing.median, "fastest": timing.fastest,
           "slowest": timing.slowest, "runs": timing.runs}  # fmt: skip
    report.tables.setdefault(table, []).append(row | more)


def decode(
    report: Report, shape: Shape, models: int, prompt: int, runs: int, device: torch.device
) -> None:
    """Time the batched pass against the loop, one token at a time."""
    report.say(
        f"decode: {shape.name} shape ({shape.layers} layers, {shape.width}, V = {shape.vocab}), "
        f"N = {models}, after {prompt} tokens; ratio to the loop"
    )
    base = make_base(shape, device)
    with tempfile.TemporaryDirectory() as folder:
        peft_model, folders = make_peft(base, models, Path(folder))
        ensemble = Ensemble.from_pretrained(base, folders)
    ids = make_prompt(shape, prompt, device)
    decoder = ensemble.decoder(ids, memory_bytes=_MEMORY, new_tokens=1)
    loop = Loop(peft_model, models, ids)
    for turn in range(2):
        token = tokens_of(shape, turn, device)
        private, public = batched(decoder, token)
        expected = loop(token)
        found = torch.cat([private, public[None]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    contestants: dict[str, Call] = {
        "adapter loop": lambda turn: loop(tokens_of(shape, turn, device)),
        "batched ensemble": lambda turn: batched(decoder, tokens_of(shape, turn, device)),
    }
    timings = interleave(
        awaited(contestants, device), {"adapter loop": runs, "batched ensemble": 4 * runs}
    )
    slowest = timings["adapter loop"].median
    for name, timing in timings.items():
        ratio, rate = slowest / timing.median, 1 / timing.median
        line(
            report, "decode", name, timing, f"{rate:8.2f} tokens/s  {ratio:6.2f}x",
            shape=shape.name, models=models, prompt=prompt, tokens_per_s=rate, ratio=ratio,
        )  # fmt: skip
    report.say()


def step(
    report: Report, shape: Shape, models: int, prompt: int, runs: int, device: torch.device
) -> None:
    """Measure the mechanism's share of a generated token, and memory."""
    report.say(
        f"step: {shape.name} shape, N = {models}, V = {shape.vocab}, after {prompt} tokens; "
        "share of pass and mechanism together"
    )
    before = peak(device)
    base = make_base(shape, device)
    with tempfile.TemporaryDirectory() as folder:
        _, folders = make_peft(base, models, Path(folder))
        ensemble = Ensemble.from_pretrained(base, folders)
    loaded = peak(device)
    ids = make_prompt(shape, prompt, device)
    decoder = ensemble.decoder(ids, memory_bytes=_MEMORY, new_tokens=1)
    filled = peak(device)
    preset = AdaPMixED.preset("wikitext-103")
    unscreened, rng = replace(preset, screen=None), SeededRandom(0)
    accountants = {one: Accountant(1e-5) for one in (preset, unscreened)}

    def answer(mechanism: AdaPMixED) -> None:
        proposal = mechanism.propose(*decoder.logits, rng=rng)
        accountants[mechanism].charge(proposal)
        proposal.release()

    contestants: dict[str, Call] = {
        "pass": lambda turn: batched(decoder, tokens_of(shape, turn, device)),
        "mechanism": lambda turn: answer(preset),
        "mechanism, no screening": lambda turn: answer(unscreened),
    }
    timings = interleave(awaited(contestants, device), dict.fromkeys(contestants, runs))
    forward = timings["pass"].median
    for name, timing in timings.items():
        share = None if name == "pass" else timing.median / (forward + timing.median)
        note = "" if share is None else f"{share:6.1%} of the step"
        line(
            report, "step", name, timing, note, shape=shape.name, models=models, prompt=prompt,
            share=share,
        )  # fmt: skip
    parts(report, "pass", contestants["pass"], device)
    memory = sizes(ensemble, decoder)
    memory |= {"peak: before": before, "peak: loaded": loaded, "peak: prompt read": filled,
               "peak: in all": peak(device)}  # fmt: skip
    report.say("  memory, MB: " + ", ".join(f"{k} {v / 1e6:.0f}" for k, v in memory.items()))
    report.tables["memory"] = [{"name": name, "bytes": size} for name, size in memory.items()]
    report.say()


def sizes(ensemble: Ensemble, decoder: Decoder) -> dict[str, int]:
    """Return the bytes held between two tokens, by part."""
    model = ensemble._forward.model
    adapters = {
        id(buffer): buffer
        for layer in model.modules() if isinstance(layer, BatchedLoRA)
        for buffer in layer.parts.buffers()
    }  # fmt: skip
    cached = [t for layer in decoder._cache.layers for t in (layer.keys, layer.values)]
    held = {"weights": list(model.parameters()), "adapters": list(adapters.values()),
            "logits": list(decoder.logits)}  # fmt: skip
    found = {n: sum(t.numel() * t.element_size() for t in ts) for n, ts in held.items()}
    return found | {"key/value cache": sum(t.untyped_storage().nbytes() for t in cached)}


def peak(device: torch.device) -> int:
    """Return bytes: the largest resident size so far (on Linux), or torch's on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["step", "decode"]  # what is largest in memory is measured first
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="TABLE",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="of the model, the ensemble and the mechanism")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the timed one")
    parser.add_argument("--runs", type=int, default=10, help="of the slowest contestant")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few runs, no meaning")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        Card()  # refuses in words where there is none, or the operators have no kernels for it
    torch.set_num_threads(arguments.threads)
    about, report, neighbours = machine(), Report(), Neighbours()
    about["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report.say(f"{headline(about)}; on {about['device']}\n")
    quick = arguments.quick
    prompt, runs = (8, 2) if quick else (arguments.prompt, arguments.runs)
    if "step" in arguments.only:
        step(report, TINY if quick else SMALL, 4 if quick else 100, prompt, runs, device)
    if "decode" in arguments.only:
        for shape in (TINY,) if quick else (DEMO, SMALL):
            decode(report, shape, 4 if quick else 64, prompt, runs, device)
    others = report.others(neighbours)
    if arguments.out:
        report.write(arguments.out, machine=about, quick=quick, others=others)


if __name__ == "__main__":
    main()
