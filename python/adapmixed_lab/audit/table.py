"""Findings as printed lines and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from adapmixed_lab.audit.finding import Effort, Finding

FORMAT_VERSION = 1
"""Format version of `as_json`."""


def number(value: float) -> str:
    """Return a value with five digits, so that 1 + SLACK is shown as 1."""
    return f"{value:.5g}"


def lines(finding: Finding) -> list[str]:
    """Return a finding in two lines: what was attacked, and the two numbers."""
    ratio = "" if finding.ratio is None or finding.control else f", ratio {finding.ratio:.3f}"
    power = "" if finding.power is None else f", unprotected {number(finding.power)}"
    sure = "" if finding.confidence == 1 else f" ({100 * finding.confidence:g} %)"
    prefix = "control: " if finding.control else ""
    return [
        f"  {finding.verdict:<10}  {prefix}{finding.name}",
        f"              {finding.claim}: claimed {number(finding.claimed)}, measured "
        f"{number(finding.measured)}{sure}{ratio}{power}",
    ]


def summary(findings: Sequence[Finding]) -> str:
    """Return one line that counts the claims that hold or lack power, and the caught controls."""
    claims = [finding for finding in findings if not finding.control]
    controls = [finding for finding in findings if finding.control]
    powerless = sum(f.verdict == "no power" for f in claims)
    return (
        f"{sum(f.verdict == 'holds' for f in claims)} of {len(claims)} claims hold, "
        + (f"{powerless} were attacked without power, " if powerless else "")
        + f"{sum(f.ok for f in controls)} of {len(controls)} controls are caught"
    )


def outcome(findings: Sequence[Finding]) -> str:
    """Return one word for all findings.

    It is "broken" if a claim is broken or a control was not caught, else "no power" if a claim was
    attacked without power, else "holds".
    """
    verdicts = {finding.verdict for finding in findings}
    if verdicts & {"BROKEN", "NOT CAUGHT"}:
        return "broken"
    return "no power" if "no power" in verdicts else "holds"


def as_json(findings: Sequence[Finding], effort: Effort) -> dict[str, object]:
    """Return all findings as JSON values; a number that is not finite becomes a string."""
    entries = []
    for finding in findings:
        entry = asdict(finding) | {"verdict": finding.verdict, "ok": finding.ok}
        for name in ("claimed", "measured", "power"):
            if entry[name] is not None and not math.isfinite(entry[name]):
                entry[name] = str(entry[name])
        entries.append(entry)
    return {
        "format_version": FORMAT_VERSION,
        "kind": "audit",
        "seconds": effort.seconds,
        "seed": effort.seed,
        "ok": all(finding.ok for finding in findings),
        "outcome": outcome(findings),
        "findings": entries,
    }
