"""Time private tokens against the public model's own, and against a loop over peft's adapters.

    python -m benchmarks.generation [--device cuda] [--quick] [--out PREFIX]

GPT-2 shapes with random weights, fp32. Members adapt the output layer alone (head), the last block,
or c_attn of all blocks (deep).

- token: the pass, ClippedLogPool, charge and draw of one token, for 1 and 8 queries at a time. N is
  100, the rank 8. Ratios are to the public model's own token of the same queries. The bytes of keys
  and values are shown, too;
- loop: one token through 64 deep members of rank 4 and the public model, as one batched pass and
  as the loop over adapters. The loop calls peft's set_adapter and a forward pass N + 1 times, each
  member with a key/value cache of its own.

The logits of every ensemble are compared with peft's own before the timing. All contestants of a
table take turns in one run and read the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import gc
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble import Decoder, Ensemble
from adapmixed.ensemble.cache import key_value_cache
from adapmixed.ensemble.member import Adapter
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from benchmarks.cuda_timing import Card, awaited
from benchmarks.harness import Call, Neighbours, Report, headline, interleave, machine

RANK, LOOP_RANK = 8, 4
MEMORY = 16 << 30
POOL = ClippedLogPool(-0.25, 1.0, 2.0)
CHECKED = 2  # members of table token that are compared with peft
KINDS = ("head", "last:1", "deep (c_attn)")


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
    """Return a public model with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocab, n_positions=shape.positions, n_embd=shape.width,
        n_layer=shape.layers, n_head=shape.heads, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval().to(device)


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


def make_adapters(base: Any, kind: str, models: int, rank: int) -> list[Adapter]:
    """Return random adapters of a kind."""
    generator = torch.Generator().manual_seed(2)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * deviation).to(base.device)

    layers = layers_of(kind, base)
    return [
        Adapter(
            {
                name: (normal(size_in, rank, size_in**-0.5), normal(rank, size_out, 0.02))
                for name, (size_in, size_out) in layers.items()
            }
        )
        for _ in range(models)
    ]


def peft_model(base: Any, adapters: list[Adapter]) -> Any:
    """Return peft's model with these adapters, named by `member`."""
    from peft import LoraConfig, get_peft_model

    rank = next(iter(adapters[0].updates.values()))[0].shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(adapters[0].updates))
        model = get_peft_model(copy.deepcopy(base), config, adapter_name=member(0))
        for i in range(1, len(adapters)):
            model.add_adapter(member(i), config)
    for i, adapter in enumerate(adapters):
        for name, (down, up) in adapter.updates.items():
            layer = model.get_submodule(f"base_model.model.{name}")
            layer.lora_A[member(i)].weight.data = down.T.contiguous()
            layer.lora_B[member(i)].weight.data = up.T.contiguous()
    return model.eval().to(base.device)


def member(i: int) -> str:
    """Return a member's name, no bare number: peft takes the name out of weights' names."""
    return f"member-{i:03d}"


class Loop:
    """Member after member; the public model last, with adapters switched off."""

    def __init__(self, base: Any, adapters: list[Adapter], prompt: Tensor) -> None:
        from transformers import DynamicCache

        self._model = peft_model(base, adapters)
        self._caches = [DynamicCache(config=base.config) for _ in range(len(adapters) + 1)]
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


def check(decoder: Decoder, loop: Loop, queries: int, device: torch.device) -> None:
    """Compare the logits of a batched pass and of the loop after two tokens."""
    for turn in range(2):
        token = tokens_of(turn, queries, device)
        private, public = batched(decoder, token)
        found = torch.cat([private, public[None]])
        torch.testing.assert_close(found, loop(token), rtol=0, atol=1e-4)


def make_ensemble(base: Any, kind: str, models: int) -> Ensemble:
    """Make random members; those of N = `CHECKED` are first compared with peft's own."""
    adapters = make_adapters(base, kind, models, RANK)
    few, ids = adapters[:CHECKED], make_prompt(base, 2, 5)
    decoder = Ensemble(copy.deepcopy(base), few).decoder(ids, memory_bytes=MEMORY, new_tokens=1)
    check(decoder, Loop(base, few, ids), len(ids), base.device)
    return Ensemble(copy.deepcopy(base), adapters)


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

    def __init__(self, ensemble: Ensemble, ids: Tensor) -> None:
        self._decoder = ensemble.decoder(ids, memory_bytes=MEMORY, new_tokens=1)
        self._rng, self._accountant = SecureRandom(), Accountant(1e-5)
        self._ids = ids

    def __call__(self, turn: int) -> None:
        token = tokens_of(turn, len(self._ids), self._ids.device)
        proposal = POOL.propose(*batched(self._decoder, token), rng=self._rng)
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
    report: Report, base: Any, ensembles: dict[str, Ensemble], queries: int, prompt: int, runs: int
) -> None:
    """Time a whole token of every kind of members, and of the public model alone."""
    ids = make_prompt(base, queries, prompt)
    contestants: dict[str, Public | Private] = {"public model": Public(base, ids)}
    contestants |= {kind: Private(ensemble, ids) for kind, ensemble in ensembles.items()}
    timings = interleave(
        awaited(dict(contestants), base.device),
        {name: runs if "deep" not in name else min(runs, 5) for name in contestants},
    )
    report.say(f"token: {queries} queries at a time, after {prompt} tokens; ratio to the public")
    one, least = timings["public model"].median, contestants["public model"].cache_bytes()
    for name, timing in timings.items():
        held = contestants[name].cache_bytes()
        ratio, cache = timing.median / one, held / least
        report.say(
            f"  {name:16}{1e3 * timing.median:9.1f} ms  [{1e3 * timing.fastest:.1f}, "
            f"{1e3 * timing.slowest:.1f}]  {ratio:6.2f}x   cache {held / 1e6:8.1f} MB "
            f"{cache:6.1f}x"
        )
        row = {"name": name, "queries": queries, "ratio": ratio, **asdict(timing)}
        row |= {"cache_bytes": held, "cache_ratio": cache}
        report.tables.setdefault("token", []).append(row)
    report.say()


def against_the_loop(
    report: Report, base: Any, name: str, models: int, prompt: int, runs: int
) -> None:
    """Time the batched pass against the loop over adapters, one token at a time."""
    adapters = make_adapters(base, "deep (c_attn)", models, LOOP_RANK)
    ids, device = make_prompt(base, 1, prompt), base.device
    ensemble = Ensemble(copy.deepcopy(base), adapters)
    decoder = ensemble.decoder(ids, memory_bytes=MEMORY, new_tokens=1)
    loop = Loop(base, adapters, ids)
    check(decoder, loop, 1, device)
    contestants: dict[str, Call] = {
        "adapter loop": lambda turn: loop(tokens_of(turn, 1, device)),
        "batched ensemble": lambda turn: batched(decoder, tokens_of(turn, 1, device)),
    }
    timings = interleave(
        awaited(contestants, device), {"adapter loop": runs, "batched ensemble": 4 * runs}
    )
    report.say(
        f"loop: {name} shape, N = {models}, r = {LOOP_RANK}, after {prompt} tokens; ratio to the "
        "loop over adapters"
    )
    slowest = timings["adapter loop"].median
    for contestant, timing in timings.items():
        ratio = slowest / timing.median
        report.say(
            f"  {contestant:16}{1e3 * timing.median:9.1f} ms  [{1e3 * timing.fastest:.1f}, "
            f"{1e3 * timing.slowest:.1f}]  {ratio:6.2f}x"
        )
        row = {"name": contestant, "shape": name, "models": models, "prompt": prompt}
        report.tables.setdefault("loop", []).append(row | {"ratio": ratio, **asdict(timing)})
    report.say()


def main() -> None:
    """Measure and print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["token", "loop"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="TABLE",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="of the models and the mechanism")  # fmt: skip
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few runs, no meaning")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    quick, device = arguments.quick, torch.device(arguments.device)
    if device.type == "cuda":
        Card()  # stops where there is none, or where the operators have no kernels for it
    torch.set_num_threads(2)
    about, report, neighbours = machine(), Report(), Neighbours()
    about["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report.say(f"{headline(about)}; on {about['device']}\n")
    if "token" in arguments.only:
        shape = TINY if quick else SMALL
        models, prompt, runs = (4, 8, 2) if quick else (100, 128, arguments.runs)
        report.say(f"{shape.name} shape, N = {models}, r = {RANK}, fp32\n")
        base = make_base(shape, device)
        ensembles = {kind: make_ensemble(base, kind, models) for kind in KINDS}
        for queries, length in ((1, prompt), (8, prompt // 4)):
            tokens(report, base, ensembles, queries, length, runs)
            gc.collect()
        del ensembles
    if "loop" in arguments.only:
        models, prompt, runs = (4, 8, 2) if quick else (64, 128, 10)
        for shape in (TINY,) if quick else (DEMO, SMALL):
            base = make_base(shape, device)
            against_the_loop(report, base, shape.name, models, prompt, runs)
    others = report.others(neighbours)
    if arguments.out:
        report.write(arguments.out, machine=about, quick=quick, others=others)


if __name__ == "__main__":
    main()
