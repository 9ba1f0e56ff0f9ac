"""The inputs of an experiment, and measurements of mechanisms on them: "ours" of a result's row."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import scipy  # it loads scipy.stats on its first use

from adapmixed.data import Corpus, Document, held_out_documents
from adapmixed.data.corpus import HUB
from adapmixed.evaluation import Evaluation, evaluate, plan_windows
from adapmixed.evaluation.loop import block_of
from adapmixed.evaluation.report import paired_difference
from adapmixed.limits import check_count
from adapmixed.mechanisms import Mechanism, PublicOnly, Unprotected, UnprotectedPool
from adapmixed.rng import SeededRandom
from adapmixed.text import token_stream
from adapmixed.training.demo import NUM_MODELS, train_demo
from adapmixed.training.settings import FinetuneConfig, base_facts
from adapmixed.training.shards import assign_shards, load_key
from adapmixed_lab.dp_sgd import AdapterGuarantee, PrivacyTarget, read_dp_adapter, train_dp
from adapmixed_lab.reproduce.paper import DELTA, DP_SGD, PUBLIC

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed_lab.commands.reproduce import Sources

Ours = dict[str, Any]
Reference = tuple[Any, Mapping[str, object]]
"""What `Sources.load` takes, and the fields of the row that follow from a guarantee of its own."""

UNPROTECTED = "unprotected ensemble"
POOL = "best non-private pool"
WHOLE = "one adapter, all text"
PUBLISHED = "PMixED, published analysis"
PER_MODEL = "AdaPMixED, per-model rule"
"""Names of methods that the paper does not have."""
SCALES_TRIED = (1, 2, 4, 8)
"""κ of the non-private pools of which the best is shown."""
_OTHER = 1024  # tokens to choose κ on
BUILTIN_CONFIG = FinetuneConfig(
    learning_rate=3e-3, epochs=2, batch_size=64, block_size=64, target_modules=("c_attn",)
)
"""For the built-in corpus: a minute of training, which is not DP-SGD at its best."""
EPSILON = 8.0  # the paper's, of PMixED and DP-SGD
SHARD_BLOCKS = 64
"""Blocks of a built-in shard that DP-SGD uses where ε is for the whole shard."""
WHOLE_NAME = f"{DP_SGD}, whole name"


@dataclass(frozen=True)
class Texts:
    """The inputs of an experiment, and how it runs.

    Attributes:
        sources: where they come from.
        ensemble: the models.
        tokens: the evaluation text as one stream, each document followed by the end-of-text token.
        text: name of the text, without a path.
        other: the text after it, on which the best non-private pool is chosen.
        references: single adapters, by the names of their lines.
        seed: of the evaluation's randomness.
        keep: folder of the evaluations' state, from which a killed run goes on; None: nothing is
            kept.
        progress: called with (queries done, queries in all).
    """

    sources: Sources
    ensemble: Ensemble
    tokens: tuple[int, ...]
    text: str
    other: tuple[int, ...] = ()
    references: Mapping[str, Reference] = field(default_factory=dict)
    seed: int = 0
    keep: Path | None = None
    progress: Callable[[int, int], None] | None = None

    @cached_property
    def pool(self) -> float | None:
        """κ of the best non-private pool on `other`; None without such text."""
        if len(self.other) < 2:
            return None
        pools: dict[str, Mechanism] = {repr(k): UnprotectedPool(k) for k in SCALES_TRIED}
        rng, delta = SeededRandom(0), DELTA
        scores = evaluate(self.ensemble, self.other, pools, delta=delta, rng=rng, active=None)
        return float(min(scores, key=lambda score: score.perplexity).name)

    def description(self) -> dict[str, object]:
        """Describe the inputs for a result file, without paths."""
        sources, base = self.sources, self.sources.public_model
        base = Path(base).name if Path(base).is_dir() else base
        return {
            "dataset": sources.dataset,
            "scale": sources.scale,
            "base": "built-in" if sources.scale == "builtin" else base,
            "ensemble": "built-in" if sources.ensemble is None else sources.ensemble.name,
            "num_models": self.ensemble.num_models,
            "vocab_size": self.ensemble.vocab_size,
            "text": self.text,
            "tokens": len(self.tokens),
            "unverified": list(self.ensemble.unverified),
            "device": sources.device,
            "dtype": sources.dtype,
        }

    def notes(self) -> list[str]:
        """Return the notes on the best pool and on what the built-in models stand for."""
        notes = []
        if self.pool is not None:
            notes.append(
                f"The best non-private pool has κ = {self.pool:g}, of {SCALES_TRIED} the best on "
                "text after the evaluation's."
            )
        if self.sources.scale == "builtin":
            notes.append(
                "builtin: a GPT-2 of 1.1 million parameters over Python's documentation stands in "
                f"for GPT-2 small over {self.sources.dataset}. Perplexities and ε are comparable "
                "in their order at best."
            )
        return notes


def load_inputs(sources: Sources, folder: Path, training: int, **run: Any) -> Texts:
    """Load models and text.

    The end of the text is kept to choose the best non-private pool, and is not evaluated.

    Args:
        sources: where they come from.
        folder: parent of the built-in ensemble's folder ``ensemble``, which is trained if missing.
        training: seed of the built-in ensemble's training and division.
        run: how the experiment runs, as in `Texts`.

    Raises:
        ValueError, OSError: as `Ensemble.from_pretrained` and `Corpus`, or if the base has no
            tokenizer.
    """
    documents: Iterable[Document]
    if sources.scale == "builtin":
        name = f"ensemble-{training}" if training else "ensemble"
        adapters = train_demo(folder / name, seed=training)
        documents, name = held_out_documents(), "held-out topics"
    else:
        assert sources.ensemble is not None  # checked by Sources
        corpus = sources.corpus()
        adapters, documents = sources.ensemble, corpus.documents()
        name = corpus.name.removeprefix(HUB).rpartition("/")[2]
    ensemble = sources.load(adapters)
    if ensemble.tokenizer is None:
        raise ValueError(f"base must have a tokenizer, {sources.public_model} has none")
    texts = [document.text for document in documents]
    stream = token_stream(ensemble.tokenizer, texts, ensemble.vocab_size)
    kept = len(stream) - min(_OTHER, len(stream) // 8)
    return Texts(sources, ensemble, tuple(stream[:kept]), name, tuple(stream[kept:]), **run)


def stretches(inputs: Texts, runs: int, queries: int) -> list[tuple[int, ...]]:
    """Return the text of every run, as many whole blocks as its queries need.

    Raises:
        ValueError: if the text is too short.
    """
    window = inputs.ensemble.longest_text
    block = block_of(window, None)
    size = -(-queries // (block - 1)) * block
    starts = range(0, check_count("runs", runs) * size, max(1, size))
    texts = [inputs.tokens[start : start + size] for start in starts]
    for text in texts or [()]:
        plan_windows(len(text), window, None, queries)
    return texts


def compare(
    inputs: Texts,
    mechanisms: Mapping[str, Mechanism],
    queries: int,
    *,
    state: str,
    runs: int = 1,
) -> dict[str, Ours]:
    """Measure the references, then these mechanisms, on the same tokens.

    All of one ensemble run in one forward pass, with members that speak about all tokens. The
    windows and the randomness follow from the text and the seed, and not from the ensemble. An
    ensemble of one is measured without protection, against its public model.

    Args:
        inputs: models and text.
        mechanisms: by name.
        queries: of each run.
        state: beginning of the names of state files.
        runs: stretches of text, each with accountants and randomness of its own.

    Raises:
        ValueError: as `evaluate`.
    """
    texts = stretches(inputs, runs, queries)
    # Loaded before anything is answered, so that a wrong folder raises early.
    loaded = {name: inputs.sources.load(folder) for name, (folder, _) in inputs.references.items()}

    def measured(
        ensemble: Ensemble, group: Mapping[str, Mechanism], suffix: str = ""
    ) -> dict[str, Ours]:
        results = []
        for run, text in enumerate(texts):
            name, rng = f"{state}{suffix}", SeededRandom(inputs.seed)
            if run:
                name, rng = f"{name}-run-{run}", rng.child(f"run {run}")
            kept = None if inputs.keep is None else inputs.keep / f"{name}.state.json"
            results.append(
                evaluate(
                    ensemble, text, group, queries=queries, delta=DELTA, rng=rng, active=None,
                    progress=inputs.progress, result=kept,
                )
            )  # fmt: skip
        same = dict(zip(group, zip(*results, strict=True), strict=True))
        return {name: _ours(scores, same[PUBLIC], group[name]) for name, scores in same.items()}

    references: dict[str, Mechanism] = {PUBLIC: PublicOnly(), UNPROTECTED: Unprotected()}
    if inputs.pool is not None:
        references[POOL] = UnprotectedPool(inputs.pool)
    ours = measured(inputs.ensemble, references | dict(mechanisms))
    lines = {name: ours[name] for name in references}
    for number, (name, adapter) in enumerate(loaded.items()):
        both: dict[str, Mechanism] = {PUBLIC: PublicOnly(), name: Unprotected()}
        lines[name] = measured(adapter, both, f"-alone-{number}")[name]
        lines[name] |= inputs.references[name][1]
    return lines | ours


def average(several: Sequence[Ours]) -> Ours:
    """Return one line for the same method of several runs or trainings: means and deviations.

    The sentence is that of the largest ε.
    """
    line = dict(max(several, key=lambda ours: float(ours["epsilon"] or 0.0)))
    for key in line:
        values = [ours[key] for ours in several]
        if all(isinstance(v, float | int) or v == "inf" for v in values) and len(set(values)) > 1:
            line[key] = statistics.fmean(map(float, values))
    for name, key in (("perplexity", "perplexities"), ("epsilon", "epsilons")):
        line[key] = [ours[name] for ours in several]
        numbers = [math.inf if value is None else float(value) for value in line[key]]
        spread = len(numbers) > 1 and all(map(math.isfinite, numbers))
        line[f"{name}_deviation"] = statistics.stdev(numbers) if spread else None
    return line


def over_trainings(several: Sequence[Ours]) -> Ours:
    """Return the average over trainings; "difference" has Student's 95 % interval of their mean.

    The text is the same, so the interval is about other trainings and divisions.
    """
    line = average(several)
    gaps = [ours["difference"]["mean"] for ours in several if ours.get("difference")]
    if len(gaps) == len(several):
        mean = statistics.fmean(gaps)
        quantile = scipy.stats.t.ppf(0.975, len(gaps) - 1)  # Student's
        reach = float(quantile) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        ends = {"mean": mean, "low": mean - reach, "high": mean + reach}
        line["difference"] = ends | {"trainings": len(gaps)}
    return line


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one result for the same experiment with several trainings, in their order.

    Rows belong together by their place. A row's label names all settings that were chosen.
    """
    first = dict(results[0])
    if len(results) == 1:
        return first
    rows = []
    for same in zip(*(result["rows"] for result in results), strict=True):
        sides = [entry["ours"] for entry in same]
        label = " or ".join(dict.fromkeys(entry["label"] for entry in same))
        ours = None if None in sides else over_trainings(sides)
        rows.append(same[0] | {"label": label, "ours": ours})
    notes = dict.fromkeys(note for result in results for note in result["notes"])
    words = (
        f"Numbers are means over {len(results)} trainings, each with its own division of the text. "
        "± and […] are over trainings, not runs: the standard deviation, Student's 95 % interval."
    )
    return first | {
        "rows": rows,
        "notes": [*notes, words],
        "settings": first["settings"] | {"trainings": len(results)},
    }


def _ours(runs: Sequence[Evaluation], public: Sequence[Evaluation], mechanism: Mechanism) -> Ours:
    """Return the average over the runs of a method; `screened` counts queries of one run."""
    names = ("delta", "kind", "guarantee", "unit", "adjacency")
    lines = [
        {
            "perplexity": run.perplexity,
            "perplexity_deviation": None,
            "perplexities": None,
            "difference": None if runs is public else paired_difference(runs, public),
            "epsilon": run.guarantee.epsilon,
            "epsilon_deviation": None,
            "epsilons": None,
            **{name: value for name, value in run.to_json().items() if name in names},
            "queries": run.queries,
            "screened": run.screened * run.queries,
            "mechanism": repr(mechanism),
            **run.breakdown,
        }
        for run in runs
    ]
    return average(lines)


def dp_line(folder: Path) -> tuple[str, Reference]:
    """Return an adapter's line: its name, the folder, and the fields of its own guarantee.

    Raises:
        ValueError: as `read_dp_adapter`, and for another δ than the tables'.
    """
    stated, _ = read_dp_adapter(folder)
    if stated.delta != DELTA:
        raise ValueError(f"{folder} must have its ε at δ = {DELTA:g}, got one at {stated.delta:g}")
    promise = dict.fromkeys(("epsilon_deviation", "mixing", "screening", "conversion")) | {
        "epsilon": stated.epsilon,
        "delta": stated.delta,
        "kind": "fixed",
        "guarantee": str(stated),
        "unit": stated.protected,
        "adjacency": "add/remove",
        "screened": 0.0,
        "total": stated.epsilon,
        "mechanism": "one adapter trained by DP-SGD",
    }
    name = DP_SGD if stated.blocks_per_identifier is None else WHOLE_NAME
    return name, ([folder], promise)


def builtin_dp_adapter(
    folder: Path,
    base: str,
    *,
    key: Path | None = None,
    config: FinetuneConfig = BUILTIN_CONFIG,
    progress: Callable[[int, int], None] | None = None,
) -> AdapterGuarantee:
    """Train an adapter by DP-SGD on the built-in private text; an existing one is kept.

    ε and δ are the paper's.

    Args:
        folder: of the adapter.
        base: folder of the public model.
        key: file of the key that divides the text; ε is then for a whole shard, of which the first
            `SHARD_BLOCKS` blocks are used. None: for single blocks, as the paper's.
        config: settings of the training.
        progress: called after every step with (steps done, steps in all).

    Raises:
        ValueError: if the folder holds an adapter of other settings.
    """
    blocks = None if key is None else SHARD_BLOCKS
    if not folder.exists():
        corpus = Corpus("builtin")
        documents, unit = list(corpus.documents()), corpus.unit
        if key is not None:
            names = [document.identifier for document in documents]
            shards = assign_shards(names, NUM_MODELS, key=load_key(key))
            documents = [
                replace(document, identifier=str(shard))
                for document, shard in zip(documents, shards, strict=True)
            ]
            unit = "shard"
        target = PrivacyTarget(EPSILON, DELTA, blocks_per_identifier=blocks)
        train_dp(
            base, documents, folder, config, target, unit=unit, base_name=base_facts(base).name,
            progress=progress,
        )  # fmt: skip
    stated, training = read_dp_adapter(folder)
    # For this target ε is at most the target, and lower only by the noise search's tolerance.
    near = 0.95 * EPSILON <= stated.epsilon <= EPSILON and stated.delta == DELTA
    same = training == json.loads(json.dumps(asdict(config)))
    if not (near and same and stated.blocks_per_identifier == blocks):
        raise ValueError(
            f"{folder} must hold the DP-SGD adapter of this experiment, it holds one of other "
            "settings; remove it or give another --out"
        )
    return stated
