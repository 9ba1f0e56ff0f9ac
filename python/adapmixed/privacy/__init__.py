"""Privacy accounting: from events to (ε, δ) guarantees.

The package never imports torch. It imports numpy at once, and dp-accounting with the first
guarantee that needs it.
"""

from adapmixed.errors import BudgetSpentError, LedgerError
from adapmixed.privacy.accountant import Accountant
from adapmixed.privacy.events import (
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.ledger import read_ledger
from adapmixed.privacy.planner import plan

__all__ = [
    "Accountant",
    "BoundedRangeAnswer",
    "BudgetSpentError",
    "Caveat",
    "ClippedAnswer",
    "Event",
    "GaussianScreening",
    "Guarantee",
    "IndividualCharge",
    "LeaveOneOutLoss",
    "LedgerError",
    "PublicAnswer",
    "RenyiBound",
    "UnprotectedAnswer",
    "plan",
    "read_ledger",
]
