"""Every operator in plain float64 torch: slow, and readable as the paper's equations.

The functions take the arguments of the public operators and return plain tensors or tuples. They
state what the kernels must compute; they do not validate their arguments.
"""

from ._clip import clip_charge, clip_project
from ._leave_one_out import leave_one_out
from ._log_pool import log_pool
from ._low_rank import add_low_rank, cross_entropy
from ._mixture import log_prob, mixture
from ._project import project
from ._renyi import renyi_divergence
from ._sample import sampling_weights
from ._screen import screen

__all__ = [
    "add_low_rank",
    "clip_charge",
    "clip_project",
    "cross_entropy",
    "leave_one_out",
    "log_pool",
    "log_prob",
    "mixture",
    "project",
    "renyi_divergence",
    "sampling_weights",
    "screen",
]
