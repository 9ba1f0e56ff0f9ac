"""Time private tokens against the public model's own.

    python -m benchmarks.generation [--device cuda] [--quick] [--out PREFIX]

GPT-2 small's shape with random weights, fp32, and members of rank 8, whose B is bfloat16. They
adapt the output layer alone (head), the last block, or c_attn of all blocks (deep), and speak
about K tokens. A token is the pass, ClippedLogPool, charge and draw, for 1 and 8 queries at a time.
With AdaPMixED in its place, the proposal, charge and draw are timed alone, too.
Ratios are to the public model's own token of the same queries. The bytes of keys and values are
shown, too. All contestants of a table take turns in one run and read the same tokens.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.decoder import Decoder, key_value_cache
from adapmixed.ensemble.lora import Adapter, Logits
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, Mechanism, ShapedLogits, shaped
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from benchmarks.harness import Neighbours, Report, headline, machine
from benchmarks.timing import Call, Contestant, Device, interleave

RANK = 8
MEMORY = 16 << 30
POOL, ADAPTIVE = ClippedLogPool(-0.25, 1.0, 2.0), AdaPMixED.preset("wikitext-103")
# Layers that members adapt, N, K, and the mechanism
MEMBERS: tuple[tuple[str, int, int | None, Mechanism], ...] = (
    ("head", 100, None, POOL), ("head", 100, 8192, POOL), ("head", 100, 8192, ADAPTIVE),
    ("head", 100, 1024, POOL), ("head", 1000, 32768, POOL), ("head", 1000, 8192, POOL),
    ("head", 1000, 8192, ADAPTIVE), ("head", 1000, 1024, POOL), ("last:1", 100, 8192, POOL),
    ("deep (c_attn)", 100, 8192, POOL),
)  # fmt: skip
SMALL = (12, 768, 12, 50257)  # layers, width, heads, vocabulary
TINY = (2, 32, 2, 512)


def called(kind: str, models: int, active: int | None) -> str:
    """Return the name of a contestant."""
    return f"{kind}, N = {models}, K = {active or 'V'}"


def make_base(layers: int, width: int, heads: int, vocab: int, device: torch.device) -> Any:
    """Return a public model with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab, n_positions=1024, n_embd=width, n_layer=layers, n_head=heads,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval().to(device)


def layers_of(kind: str, base: Any) -> dict[str, tuple[int, int]]:
    """Return the adapted layers with their (in, out)."""
    block = f"h.{base.config.n_layer - 1}."
    chosen = {
        "head": lambda name: name == "lm_head",
        "last:1": lambda name: block in name,
        "deep (c_attn)": lambda name: name.endswith("c_attn"),
    }[kind]
    weights = {name: layer.weight for name, layer in base.named_modules() if hasattr(layer, "nf")}
    weights["lm_head"] = base.lm_head.weight.T
    return {name: tuple(weight.shape) for name, weight in weights.items() if chosen(name)}


def make_adapters(base: Any, kind: str, models: int) -> list[Adapter]:
    """Return random adapters of a kind."""
    generator = torch.Generator().manual_seed(2)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        factor = torch.randn(rows, columns, generator=generator) * deviation
        return factor.bfloat16().float().to(base.device)

    layers = layers_of(kind, base)
    return [
        Adapter(
            {
                name: (normal(size_in, RANK, size_in**-0.5), normal(RANK, size_out, 0.02))
                for name, (size_in, size_out) in layers.items()
            }
        )
        for _ in range(models)
    ]


def batched(decoder: Decoder, token: Tensor) -> Logits:
    """Return the next logits after a token; the cache is left as it was."""
    decoder.append(token)
    decoder._cache.crop(-1)
    decoder.length -= 1
    return decoder.logits


def make_prompt(base: Any, queries: int, length: int) -> Tensor:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(1)
    size = queries, length
    return torch.randint(0, base.config.vocab_size, size, generator=generator).to(base.device)


def tokens_of(turn: int, queries: int, device: torch.device) -> Tensor:
    """Return the tokens that all contestants read in a turn."""
    return torch.full((queries,), 7 + turn, device=device)


class Private:
    """A decoder that answers the same position again and again."""

    def __init__(
        self, ensemble: Ensemble, active: int | None, ids: Tensor, mechanism: Mechanism
    ) -> None:
        self._active, self._mechanism = active, mechanism
        self._decoder = ensemble.decoder(ids, memory_bytes=MEMORY, new_tokens=1, active=active)
        self._rng, self._accountant = SecureRandom(), Accountant(1e-5)
        self._ids = ids

    def __call__(self, turn: int) -> None:
        self.answer(self.rows(turn))

    def rows(self, turn: int) -> ShapedLogits:
        token = tokens_of(turn, len(self._ids), self._ids.device)
        private, public, chosen = batched(self._decoder, token)
        return shaped(private, public, active=self._active, tokens=chosen)

    def answer(self, rows: ShapedLogits) -> None:
        proposal = self._mechanism.propose_rows(rows.answerable(), rng=self._rng)
        self._accountant.charge(proposal)
        proposal.release()

    def cache_bytes(self) -> int:
        return cache_bytes(self._decoder._cache)


class Public:
    """The public model's own token: forward pass, softmax and draw."""

    @torch.no_grad()
    def __init__(self, base: Any, ids: Tensor) -> None:
        self._base, self._ids = base, ids
        self._cache = key_value_cache(base.config, ids.shape[1] + 1)
        base(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def __call__(self, turn: int) -> None:
        token = tokens_of(turn, len(self._ids), self._ids.device)[:, None]
        logits = self._base(
            input_ids=token, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        ).logits
        torch.multinomial(logits[:, -1].softmax(-1), 1)
        self._cache.crop(-1)

    def cache_bytes(self) -> int:
        return cache_bytes(self._cache)


def cache_bytes(cache: Any) -> int:
    return sum(t.numel() * t.element_size() for c in cache.layers for t in (c.keys, c.values))


def tokens(
    report: Report, base: Any, ensembles: dict[tuple[str, int], Ensemble], device: Device,
    queries: int, prompt: int, runs: int,
) -> None:  # fmt: skip
    """Time a whole token of every kind of members, and of the public model alone."""
    ids = make_prompt(base, queries, prompt)
    public = Public(base, ids)
    calls: dict[str, Call] = {"public model": public}
    caches = {"public model": public.cache_bytes()}
    for kind, models, active, mechanism in MEMBERS:
        if (kind, models) in ensembles:
            name = called(kind, models, active)
            private = Private(ensembles[kind, models], active, ids, mechanism)
            if mechanism is not POOL:
                name += ", AdaPMixED"
                rows = private.rows(0)
                calls[f"{name} alone"] = lambda _, private=private, rows=rows: private.answer(rows)
            calls[name], caches[name] = private, private.cache_bytes()
    timings = interleave(
        device,
        {name: Contestant(call, 1) for name, call in calls.items()},
        {name: runs if "deep" not in name else min(runs, 5) for name in calls},
        lambda name, error: None,  # nothing is captured
    )
    report.say(f"token: {queries} queries at a time, after {prompt} tokens; ratio to the public")
    for name, timing in timings.items():
        ratio = timing.median / timings["public model"].median
        row = {"name": name, "queries": queries, "ratio": ratio, **asdict(timing)}
        words = ""
        if name in caches:
            row["cache_bytes"] = caches[name]
            row["cache_ratio"] = caches[name] / caches["public model"]
            words = f"cache {caches[name] / 1e6:8.1f} MB {row['cache_ratio']:6.1f}x"
        report.say(
            f"  {name:42}{1e3 * timing.median:9.1f} ms  [{1e3 * timing.fastest:.1f}, "
            f"{1e3 * timing.slowest:.1f}]  {ratio:6.2f}x   {words}"
        )
        report.tables.setdefault("token", []).append(row)
    report.say()


def main() -> None:
    """Measure and print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="of the models and the mechanism")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few runs, no meaning")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    quick, device = arguments.quick, Device(arguments.device)
    torch.set_num_threads(2)
    about, report, neighbours = machine(), Report(), Neighbours()
    about["device"] = device.about()["name"] if device.gpu else "cpu"
    report.say(f"{headline(about)}; on {about['device']}\n")
    layers, width, heads, vocab = TINY if quick else SMALL
    prompt, runs = (8, 2) if quick else (128, 45)
    report.say(f"{layers} layers of width {width}, r = {RANK}, fp32\n")
    base = make_base(layers, width, heads, vocab, device.device)
    ensembles = {
        (kind, models): Ensemble(copy.deepcopy(base), make_adapters(base, kind, models))
        for kind, models in dict.fromkeys(members[:2] for members in MEMBERS)
        if not quick or models < 1000
    }
    sizes = ((64, prompt // 8),) if device.gpu else ()
    for queries, length in ((1, prompt), (8, prompt // 4), *sizes):
        tokens(report, base, ensembles, device, queries, length, runs)
    others = report.others(neighbours)
    if arguments.out:
        report.write(arguments.out, machine=about, quick=quick, others=others)


if __name__ == "__main__":
    main()
