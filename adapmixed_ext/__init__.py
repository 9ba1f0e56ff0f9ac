"""Operators for private next-token prediction from an ensemble, on torch tensors.

projection = adapmixed_ext.project(private_logits, public_logits, order=18, radius=3.6)
loss = adapmixed_ext.leave_one_out(private_logits, public_logits, projection, orders=18)
p = adapmixed_ext.mixture(private_logits, public_logits, projection)
"""

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        "adapmixed_ext has no compiled module (_C): install it with 'pip install -e .', or start "
        "Python outside the repository if adapmixed is installed elsewhere"
    ) from error

from ._types import Clipping, LogPool, Projection, RandomSource, Screening
from .clipping import clip_project
from .divergence import renyi_divergence
from .draws import gaussian, sample
from .ops import leave_one_out, log_prob, loss_error, mixture, project
from .pooling import log_pool
from .screening import screen

__all__ = [
    "Clipping",
    "LogPool",
    "Projection",
    "RandomSource",
    "Screening",
    "build_info",
    "clip_project",
    "gaussian",
    "leave_one_out",
    "log_pool",
    "log_prob",
    "loss_error",
    "mixture",
    "project",
    "renyi_divergence",
    "sample",
    "screen",
]


def build_info() -> dict[str, object]:
    """What was built and what is used.

    ``cuda`` (bool), ``cuda_architectures`` (compute capabilities with kernels; newer ones run what
    PTX there is), ``instruction_set`` of the CPU, ``compiler``.
    """
    return {
        "cuda": _C.with_cuda,
        "cuda_architectures": _C.cuda_architectures,
        "instruction_set": _C.instruction_set(),
        "compiler": _C.compiler,
    }
