"""``adapmixed-lab audit``: programs that try to break what is claimed."""

import argparse
import json
from pathlib import Path
from typing import Any

from adapmixed.commands.options import check_output, quiet_libraries
from adapmixed_lab.audit import AUDITS, Effort
from adapmixed_lab.audit import run as run_audits
from adapmixed_lab.audit.table import as_json, lines, outcome, summary

STATUS = {"holds": 0, "broken": 1, "no power": 3}
"""Exit status; 2 if the arguments are not allowed."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    listed = "; ".join(f"{name}: {what}" for name, what in AUDITS.items())
    parser = commands.add_parser(
        "audit",
        help="attacks on every claim",
        description="Attacks what is claimed and prints what was claimed beside what the attack "
        "showed. Exit status 1 if a claim is broken or a deliberately broken variant (a control) "
        "is not caught, 3 if none is and a claim was attacked without power. docs/audits.md says "
        "what a pass means.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {listed}; without: all")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="roughly, of work for each audit (15)"
    )
    parser.add_argument("--seed", type=int, help="repeatable attacks and draws")
    parser.add_argument("--json", type=Path, help="write the findings there as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the audits, printing each finding as it comes."""
    check_output(arguments.json)
    if arguments.seed is not None and arguments.seed < 0:
        raise ValueError(f"--seed must be >= 0, got {arguments.seed}")
    if "canaries" in (arguments.names or AUDITS):  # which trains models
        quiet_libraries()
    effort, findings, audit = Effort(arguments.seconds, arguments.seed), [], ""
    for finding in run_audits(arguments.names, effort):
        if finding.audit != audit:
            audit = finding.audit
            print(f"{audit}: {AUDITS[audit]}")
        print("\n".join(lines(finding)), flush=True)
        findings.append(finding)
    print(summary(findings))
    if arguments.json is not None:
        text = json.dumps(as_json(findings, effort), indent=2, ensure_ascii=False, allow_nan=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return STATUS[outcome(findings)]
