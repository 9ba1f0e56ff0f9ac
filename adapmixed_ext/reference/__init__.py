"""Every operator in plain float64 torch: slow, and readable as the paper's equations.

The functions take the arguments of the public operators and return plain tensors or tuples. They
state what the kernels must compute; they do not validate their arguments.
"""

from .answers import log_pool, log_prob, mixture, sampling_weights
from .losses import leave_one_out
from .projections import clip_charge, clip_project, project
from .renyi import renyi_divergence
from .screening import screen

__all__ = [
    "clip_charge",
    "clip_project",
    "leave_one_out",
    "log_pool",
    "log_prob",
    "mixture",
    "project",
    "renyi_divergence",
    "sampling_weights",
    "screen",
]
