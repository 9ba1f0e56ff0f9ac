"""Privacy accounting: events in, (ε, δ) guarantees out. Imports numpy only, never torch."""

from adapmixed.privacy.accountant import Accountant
from adapmixed.privacy.conversions import (
    amplification_rate,
    c_alpha,
    gaussian_rdp,
    published_bound,
    published_target_leakage,
    radius_for_epsilon,
    rdp_to_dp,
    screening_rdp,
    screening_rho,
    sound_bound,
    subsampled_rdp,
    zcdp_to_dp,
)
from adapmixed.privacy.events import (
    ADJACENCIES,
    LOSS_ABSOLUTE_ERROR,
    Event,
    GaussianScreening,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.guarantee import KINDS, RULES, Guarantee
from adapmixed.privacy.ledger import Ledger, LedgerError

__all__ = [
    "ADJACENCIES",
    "KINDS",
    "LOSS_ABSOLUTE_ERROR",
    "RULES",
    "Accountant",
    "Event",
    "GaussianScreening",
    "Guarantee",
    "LeaveOneOutLoss",
    "Ledger",
    "LedgerError",
    "PublicAnswer",
    "RenyiBound",
    "UnprotectedAnswer",
    "amplification_rate",
    "c_alpha",
    "gaussian_rdp",
    "published_bound",
    "published_target_leakage",
    "radius_for_epsilon",
    "rdp_to_dp",
    "screening_rdp",
    "screening_rho",
    "sound_bound",
    "subsampled_rdp",
    "zcdp_to_dp",
]
