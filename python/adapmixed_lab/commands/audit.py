"""``adapmixed-lab audit``: attack every privacy claim.

Attack every privacy claim, and print the claimed value with the value that the attack showed. Exit
status 1 means that a claim is broken, or that a deliberately broken variant (a control) is not
caught. The page "Audit what is claimed" explains what a pass means.
"""

import argparse

from adapmixed_lab import audit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    listed = "; ".join(f"{name}: {what}" for name, what in audit.AUDITS.items())
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"audits to run (default: all). {listed}"
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="rough seconds of each audit (default: 15)"
    )
    parser.add_argument("--seed", type=int, help="seed that makes attacks and draws repeatable")


def run(arguments: argparse.Namespace) -> int:
    """Run the audits, printing each finding as it comes."""
    if arguments.seed is not None and arguments.seed < 0:
        raise ValueError(f"--seed must be >= 0, got {arguments.seed}")
    findings: list[audit.Finding] = []
    for finding in audit.run(arguments.names, audit.Effort(arguments.seconds, arguments.seed)):
        if not findings or finding.audit != findings[-1].audit:
            print(f"{finding.audit}: {audit.AUDITS[finding.audit]}")
        print("\n".join(audit.lines(finding)), flush=True)
        findings.append(finding)
    print(audit.summary(findings))
    return int(not all(f.ok for f in findings))
