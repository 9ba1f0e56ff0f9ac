"""Privacy accounting: events in, (ε, δ) guarantees out. Never imports torch.

numpy is imported at once, dp-accounting with the first guarantee that needs it.
"""

from adapmixed.privacy.accountant import Accountant
from adapmixed.privacy.ball_bounds import amplification_rate, radius_for_epsilon, sound_bound
from adapmixed.privacy.bounded_range import RANGE_ERROR, bounded_range_rho, individual_rho
from adapmixed.privacy.checks import ADJACENCIES, MEASURES, QUESTIONS
from adapmixed.privacy.composition import clipped_mixing_epsilon, composed_epsilon
from adapmixed.privacy.conversions import (
    c_alpha,
    gaussian_rdp,
    rdp_to_dp,
    screening_rdp,
    screening_rho,
    subsampled_rdp,
    zcdp_to_dp,
)
from adapmixed.privacy.dominating import (
    BOX_ERROR,
    DominatingPair,
    accounted_box,
    clipped_mixing_pair,
)
from adapmixed.privacy.events import (
    CAVEATS,
    LOSS_ABSOLUTE_ERROR,
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
from adapmixed.privacy.filter import PerModelFilter
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.guarantee import KINDS, RULES, Guarantee
from adapmixed.privacy.ledger import Ledger, LedgerError
from adapmixed.privacy.published_bound import published_bound, published_target_leakage
from adapmixed.privacy.released_count import ReleasedCount

__all__ = [
    "ADJACENCIES",
    "BOX_ERROR",
    "CAVEATS",
    "KINDS",
    "LOSS_ABSOLUTE_ERROR",
    "MEASURES",
    "QUESTIONS",
    "RANGE_ERROR",
    "RULES",
    "Accountant",
    "BoundedRangeAnswer",
    "Caveat",
    "ClippedAnswer",
    "DominatingPair",
    "Event",
    "FilterBudget",
    "GaussianScreening",
    "Guarantee",
    "IndividualCharge",
    "LeaveOneOutLoss",
    "Ledger",
    "LedgerError",
    "PerModelFilter",
    "PublicAnswer",
    "ReleasedCount",
    "RenyiBound",
    "UnprotectedAnswer",
    "accounted_box",
    "amplification_rate",
    "bounded_range_rho",
    "c_alpha",
    "clipped_mixing_epsilon",
    "clipped_mixing_pair",
    "composed_epsilon",
    "individual_rho",
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
