"""Build and write the content of report.json from evaluations."""

import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from adapmixed.files import write_file
from adapmixed.privacy.guarantee import KINDS
from adapmixed.report.diagnostics import diagnostics_entry
from adapmixed.report.verdict import kept_entries
from adapmixed.report.view import FORMAT_VERSION

if TYPE_CHECKING:
    from adapmixed.evaluation import Evaluation


_CURVE_POINTS = 200
_Point = TypeVar("_Point")


def build_report(
    evaluations: Sequence["Evaluation"],
    *,
    config: Mapping[str, object],
    environment: Mapping[str, object],
    sample: Mapping[str, str] | None = None,
    training: Sequence[Mapping[str, object]] = (),
) -> dict[str, object]:
    """Return the content of report.json for these evaluations, in strict JSON values.

    JSON has no infinities, so an infinite perplexity, ε or Rényi order becomes the string "inf".

    Args:
        evaluations: one per method, with distinct names.
        config: settings of the run, as nested JSON values.
        environment: the result of :func:`environment`.
        sample: a generated text, or None. It has "text" and "guarantee", the sentence that covers
            it. It may have "prompt" (public text), "method", "kind" and further strings.
        training: the result of :func:`adapmixed.report.training.training_losses`.

    Returns:
        {"format_version": 2, "methods": [...], "sample", "environment", "config"}, and "training"
        unless it is empty. Each method has "name", "perplexity", "change", "difference", "kept",
        "queries", "planned" (the queries that a planned ε covers), "epsilon" (nats; null without a
        guarantee), "delta", "kind", "guarantee" (a sentence), "unit", "adjacency", "method",
        "order", "screened" (a share of the queries), "tokens_per_second", "breakdown" (nats),
        "curve" and "perplexities". "change" is the
        relative change of perplexity against the first method whose guarantee is of kind "public".
        It is null without such a method, or if neither perplexity is finite. "difference" is that
        of log-perplexity per token, see :func:`adapmixed.evaluation.result.paired_difference`; it
        is null for the public method, too. "kept" is an entry of
        :func:`adapmixed.report.verdict.kept_entries`. "curve" is [[queries, ε or null], ...]
        and "perplexities" [[queries, perplexity so far], ...], each with at most 200 points and
        always the last. With diagnostics there is also "diagnostics", see
        :class:`adapmixed.evaluation.Diagnosis`.

    Raises:
        ValueError: if there are no evaluations or a name is repeated.
        ValueError: if a value is NaN or none that JSON can hold.
        ValueError: if a sample lacks its text or guarantee.
    """
    if not evaluations:
        raise ValueError("evaluations must hold at least one method, got none")
    names = [evaluation.name for evaluation in evaluations]
    if len(set(names)) < len(names):
        raise ValueError(f"evaluations must have distinct names, got {names!r}")
    public = next((e for e in evaluations if e.guarantee.kind == "public"), None)
    kept = kept_entries([[one] for one in evaluations])
    return {
        "format_version": FORMAT_VERSION,
        "methods": [_method(*one, public) for one in zip(evaluations, kept, strict=True)],
        "sample": None if sample is None else _sample(sample),
        "environment": plain(environment, "environment"),
        "config": plain(config, "config"),
        **({"training": plain(training, "training")} if training else {}),
    }


def environment() -> dict[str, object]:
    """Return the versions and hardware that the numbers depend on, without host names or paths.

    The version of a package is None if it is not installed as a distribution.
    """
    import torch

    import adapmixed
    import adapmixed_ext

    return {
        "adapmixed": adapmixed.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "peft": _version("peft"),
        "numpy": _version("numpy"),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "build": adapmixed_ext.build_info(),
    }


def _method(
    evaluation: "Evaluation", kept: dict[str, object] | None, public: "Evaluation | None"
) -> dict[str, object]:
    from adapmixed.evaluation.result import paired_difference

    guarantee = evaluation.guarantee
    entry: dict[str, object] = {
        "name": evaluation.name,
        "perplexity": evaluation.perplexity,
        "change": _change(evaluation.perplexity, None if public is None else public.perplexity),
        "difference": None
        if public is None or guarantee.kind == "public"
        else paired_difference([evaluation], [public]),
        "kept": kept,
        "queries": evaluation.queries,
        "planned": guarantee.budget,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "kind": guarantee.kind,
        "guarantee": str(guarantee),
        "unit": guarantee.unit,
        "adjacency": guarantee.adjacency,
        "method": guarantee.method,
        "order": guarantee.order,
        "screened": evaluation.screened,
        "tokens_per_second": evaluation.tokens_per_second,
        "breakdown": evaluation.breakdown,
        "curve": _thin(evaluation.curve),
        "perplexities": _thin(evaluation.perplexities),
    }
    if evaluation.diagnosis is not None:
        entry["diagnostics"] = diagnostics_entry(evaluation.diagnosis)
    return {key: plain(value, f"{evaluation.name}.{key}") for key, value in entry.items()}


def _change(perplexity: float, public: float | None) -> float | None:
    if public is None or math.isinf(public):
        return None
    return perplexity / public - 1.0


def _thin(curve: Sequence[_Point]) -> list[_Point]:
    """Return evenly spaced points, always with the first and the last."""
    last = len(curve) - 1
    if last < _CURVE_POINTS:
        return list(curve)
    return [curve[round(i * last / (_CURVE_POINTS - 1))] for i in range(_CURVE_POINTS)]


def _sample(sample: Mapping[str, str]) -> dict[str, object]:
    for key in ("text", "guarantee"):
        if not isinstance(sample.get(key), str):
            raise ValueError(f"sample must have the string {key!r}, got keys {sorted(sample)}")
    if not sample["guarantee"].strip():
        raise ValueError("sample's 'guarantee' must be a sentence, got an empty string")
    if "kind" in sample and sample["kind"] not in KINDS:
        raise ValueError(f"sample's 'kind' must be one of {KINDS}, got {sample['kind']!r}")
    return {key: plain(value, f"sample.{key}") for key, value in sample.items()}


def plain(value: object, where: str) -> object:
    """Return the value in JSON's own types, with infinities as strings.

    Args:
        value: the value, possibly nested.
        where: its name in errors.

    Raises:
        ValueError: if JSON cannot hold the value, for instance NaN.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # Lone surrogates (undecodable file names) have no UTF-8 form.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isnan(number):
            raise ValueError(f"{where} must not be NaN")
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ValueError(f"{where} must be a JSON value, got {type(value).__name__}")


def _processor() -> str | None:
    """Return the processor's name if the system tells it, else None."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.*)$", facts, re.MULTILINE)
    return found[1] if found else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def report_json(report: Mapping[str, object]) -> str:
    """Return a report as strict JSON text.

    Raises:
        ValueError: if JSON cannot hold a value.
    """
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_report(report: Mapping[str, object], folder: Path | str) -> Path:
    """Write report.json atomically and return its path.

    Args:
        report: the result of :func:`build_report`.
        folder: the folder, which is created if it is missing.

    Raises:
        ValueError: if JSON cannot hold a value.
    """
    path = Path(folder) / "report.json"
    text = report_json(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode("utf-8"))
    return path
