"""Time private tokens of members that share the public trunk, against the public model's.

    python -m benchmarks.trunk [--quick] [--out PREFIX]
    python -m benchmarks.trunk --only token prompt evaluation training   # half an hour

GPT-2 shapes with random weights and adapters of rank 8, fp32, on the CPU. Members adapt the output
layer alone (head), the last block, or all blocks (c_attn). All ratios are to the public model's own
time for the same queries, taken in turns in one run:

- token: the pass, ClippedLogPool, charge and draw of one token, for 1 and 8 queries at a time;
- cache: bytes of keys and values;
- prompt: reading a prompt until its first logits are there;
- evaluation: every token of a stream, scored by `evaluate` with ClippedLogPool. Head members
  answer 99 840 queries, the others one block of 512 tokens, since every block costs the same;
- training: seconds, as `benchmarks.training`.

The logits of every kind are compared with peft's own for a few members before the timing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.cache import key_value_cache
from adapmixed.ensemble.decoder import Decoder
from adapmixed.ensemble.member import Adapter
from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from benchmarks.forward import SMALL, TINY, Shape, make_base
from benchmarks.harness import Call, Neighbours, Report, headline, interleave, machine
from benchmarks.training import training

RANK = 8
MEMORY = 16 << 30
POOL = ClippedLogPool(-0.25, 1.0, 2.0)
CHECKED = 2  # members that are compared with peft


def layers_of(kind: str, base: Any) -> dict[str, tuple[int, int]]:
    """Return the adapted layers with their (in, out)."""
    blocks = base.config.n_layer
    chosen = {
        "head": lambda name: name == "lm_head",
        "last:1": lambda name: f"h.{blocks - 1}." in name,
        "deep (c_attn)": lambda name: name.endswith("c_attn"),
    }[kind]
    width = base.config.n_embd
    sizes = {"c_attn": (width, 3 * width), "c_fc": (width, 4 * width),
             "mlp.c_proj": (4 * width, width), "attn.c_proj": (width, width),
             "lm_head": (width, base.config.vocab_size)}  # fmt: skip
    found = {}
    for name, _ in base.named_modules():
        size = next((size for end, size in sizes.items() if name.endswith(end)), None)
        if size is not None and chosen(name):
            found[name] = size
    return found


def make_ensemble(base: Any, kind: str, models: int) -> Ensemble:
    """Make random members; those of N = `CHECKED` are first compared with peft's own."""
    layers = layers_of(kind, base)
    generator = torch.Generator().manual_seed(2)
    adapters = [
        Adapter(
            {
                name: (
                    torch.randn(size_in, RANK, generator=generator) * size_in**-0.5,
                    torch.randn(RANK, size_out, generator=generator) * 0.02,
                )
                for name, (size_in, size_out) in layers.items()
            }
        )
        for _ in range(models)
    ]
    check(base, Ensemble(copy.deepcopy(base), adapters[:CHECKED]), adapters[:CHECKED], list(layers))
    return Ensemble(copy.deepcopy(base), adapters)


def check(base: Any, ensemble: Ensemble, adapters: list[Adapter], targets: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    ids = make_prompt(ensemble.vocab_size, 2, 5)
    private, _ = ensemble.logits(ids)
    for adapter, found in zip(adapters, private, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets)
            model = get_peft_model(copy.deepcopy(base), config).eval()
        for name, (down, up) in adapter.updates.items():
            layer = model.get_submodule(f"base_model.model.{name}")
            layer.lora_A["default"].weight.data = down.T.contiguous()
            layer.lora_B["default"].weight.data = up.T.contiguous()
        with torch.no_grad():
            expected = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def make_prompt(vocab: int, queries: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (queries, length), generator=generator)


class Private:
    """A decoder that answers the same position again and again."""

    def __init__(self, ensemble: Ensemble, ids: Tensor) -> None:
        self._decoder: Decoder = ensemble.decoder(ids, memory_bytes=MEMORY, new_tokens=1)
        self._rng, self._accountant = SecureRandom(), Accountant(1e-5)
        self._ids = ids

    def __call__(self, turn: int) -> None:
        decoder = self._decoder
        decoder.append(torch.full((len(self._ids),), 7 + turn))
        decoder._cache.crop(-1)
        decoder._ids = decoder._ids[:, :-1]
        proposal = POOL.propose(*decoder.logits, rng=self._rng)
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
        token = torch.full((len(self._ids), 1), 7 + turn)
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
    report: Report, base: Any, ensembles: dict[str, Ensemble], queries: int, prompt: int, runs: int
) -> None:
    ids = make_prompt(base.config.vocab_size, queries, prompt)
    public = Public(base, ids)
    private = {kind: Private(ensemble, ids) for kind, ensemble in ensembles.items()}
    calls: dict[str, Call] = {"public model": public, **private}
    timings = interleave(calls, {name: runs if "deep" not in name else 5 for name in calls})
    one = timings["public model"].median
    report.say(f"token: {queries} queries at a time, after {prompt} tokens; ratio to the public")
    for name, timing in timings.items():
        held = calls[name].cache_bytes()  # type: ignore[attr-defined]
        ratio, cache = timing.median / one, held / public.cache_bytes()
        report.say(
            f"  {name:16}{1e3 * timing.median:9.1f} ms  [{1e3 * timing.fastest:.1f}, "
            f"{1e3 * timing.slowest:.1f}]  {ratio:6.2f}x   cache {held / 1e6:8.1f} MB "
            f"{cache:6.1f}x"
        )
        report.tables.setdefault("token", []).append(
            {"name": name, "queries": queries, "median": timing.median, "fastest": timing.fastest,
             "slowest": timing.slowest, "runs": timing.runs, "ratio": ratio, "cache_bytes": held,
             "cache_ratio": cache}
        )  # fmt: skip
    report.say()


def prompts(
    report: Report, base: Any, ensembles: dict[str, Ensemble], length: int, runs: int
) -> None:
    ids = make_prompt(base.config.vocab_size, 1, length)

    def read(ensemble: Ensemble) -> Call:
        def call(turn: int) -> None:
            ensemble.decoder(ids, memory_bytes=MEMORY)

        return call

    calls: dict[str, Call] = {"public model": lambda turn: Public(base, ids)}
    calls |= {kind: read(ensemble) for kind, ensemble in ensembles.items()}
    timings = interleave(calls, {name: runs if "deep" not in name else 1 for name in calls})
    one = timings["public model"].median
    report.say(f"prompt: {length} tokens; ratio to the public model")
    for name, timing in timings.items():
        ratio = timing.median / one
        report.say(f"  {name:16}{timing.median:9.2f} s  {ratio:6.2f}x")
        report.tables.setdefault("prompt", []).append(
            {"name": name, "length": length, "median": timing.median, "fastest": timing.fastest,
             "slowest": timing.slowest, "runs": timing.runs, "ratio": ratio}
        )  # fmt: skip
    report.say()


def evaluations(
    report: Report, base: Any, ensembles: dict[str, Ensemble], block: int, queries: int
) -> None:
    """Time all queries of head members, and one block of the public model and other members."""
    in_block = block - 1
    tokens = make_prompt(base.config.vocab_size, 1, block * -(-queries // in_block))[0].tolist()

    @torch.no_grad()
    def public() -> None:
        ids = torch.tensor([tokens[:block]])
        found = base(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
        found.gather(1, ids[0, 1:, None]).mean()

    def private(ensemble: Ensemble, queries: int, memory: int) -> float:
        started = time.perf_counter()
        evaluate(
            ensemble, tokens, {"pool": POOL}, delta=1e-5, rng=SecureRandom(), block=block,
            queries=queries, memory_bytes=memory, progress=tell,
        )  # fmt: skip
        return time.perf_counter() - started

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"  {done} of {total}", end="\r", file=sys.stderr)

    report.say(f"evaluation: blocks of {block} tokens; ms a query, ratio to the public model")
    public()
    public_seconds = []
    for _ in range(5):
        started = time.perf_counter()
        public()
        public_seconds.append(time.perf_counter() - started)
    one = statistics.median(public_seconds) / in_block
    rows = [("public model", in_block, one)]
    for name, ensemble in ensembles.items():
        # The caches of the others do not fit into what is usual.
        count, memory = (queries, 1 << 30) if name == "head" else (in_block, MEMORY)
        rows.append((name, count, private(ensemble, count, memory) / count))
    for name, count, seconds in rows:
        ratio = seconds / one
        report.say(
            f"  {name:16}{1e3 * seconds:9.2f} ms  {ratio:7.2f}x   {count:6} queries in "
            f"{seconds * count:.0f} s"
        )
        report.tables.setdefault("evaluation", []).append(
            {"name": name, "block": block, "queries": count, "seconds": seconds * count,
             "seconds_per_query": seconds, "ratio": ratio}
        )  # fmt: skip
    report.say()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["token", "prompt", "evaluation", "training"]
    parser.add_argument("--only", nargs="+", choices=names, default=names[:2], metavar="TABLE",
                        help=f"of {', '.join(names)}; token and prompt")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few runs, no meaning")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(2)
    about, report, neighbours = machine(), Report(), Neighbours()
    shape: Shape = TINY if quick else SMALL
    models, prompt, long_prompt, runs = (4, 8, 16, 2) if quick else (100, 128, 512, arguments.runs)
    report.say(f"{headline(about)}\n{shape.name} shape, N = {models}, r = {RANK}, fp32\n")
    base = make_base(shape, torch.device("cpu"))
    kinds = ("head", "last:1", "deep (c_attn)")
    ensembles = {kind: make_ensemble(base, kind, models) for kind in kinds}
    if "token" in arguments.only:
        for queries, length in ((1, prompt), (8, prompt // 4)):
            tokens(report, base, ensembles, queries, length, runs)
            gc.collect()
    if "prompt" in arguments.only:
        prompts(report, base, ensembles, long_prompt, 3)
    if "evaluation" in arguments.only:
        evaluations(report, base, ensembles, *((8, 14) if quick else (512, 99_840)))
    others = report.others(neighbours)  # before processes of our own are started
    if "training" in arguments.only:
        training(report, quick=quick)
    if arguments.out:
        report.write(arguments.out, machine=about, quick=quick, others=others)


if __name__ == "__main__":
    main()
