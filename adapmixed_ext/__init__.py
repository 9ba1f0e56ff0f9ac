"""Operators for private next-token prediction from an ensemble, on torch tensors.

Example::

    projection = adapmixed_ext.project(private_logits, public_logits, order=18, radius=3.6)
    loss = adapmixed_ext.leave_one_out(private_logits, public_logits, projection, orders=18)
    p = adapmixed_ext.mixture(private_logits, public_logits, projection)

Notation: N models, B positions, V tokens, K Rényi orders. q and p_i are the softmax of the public
and the private logits, and p̄_i = λ_i p_i + (1−λ_i) q.

Inputs: logits are float32, bfloat16 or float16 with any row stride. One copy is made if the last
stride is not 1. Results that carry privacy are float64. There are no gradients.

Errors: bad arguments and bad rows raise ValueError. CUDA calls only queue work, so they raise for
arguments alone. There, bad rows, and rows that do not belong to a given projection, get weight 0,
losses and divergences of +inf, probabilities of NaN and the token -1. ``check()`` of a result with
a status then raises what the CPU raises at once.

Memory is stated in bytes beyond inputs, that copy and results. On the CPU, threads keep theirs for
their next call, and none of it grows with N·V. On CUDA:

- ``project`` takes 288·(N + 1) for every 2 048 tokens of each position, or fewer of them.
- ``clip_project``, and every operator that is given rows without their log-sum-exps, takes 32 for
  every 2 048 tokens of each row, or fewer of them.
- ``leave_one_out`` takes at most 64 MiB, or 8·N·(6K + 19) + 48 if that is more. Positions share it.
"""

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        "adapmixed_ext has no compiled module (_C): install it with 'pip install -e .', or start "
        "Python outside the repository if adapmixed is installed elsewhere"
    ) from error

from .operators import (
    clip_project,
    gaussian,
    leave_one_out,
    log_pool,
    log_prob,
    mixture,
    project,
    renyi_divergence,
    sample,
    screen,
)
from .types import Clipping, LogPool, Projection, Screening

__all__ = [
    "Clipping",
    "LogPool",
    "Projection",
    "Screening",
    "build_info",
    "clip_project",
    "gaussian",
    "leave_one_out",
    "log_pool",
    "log_prob",
    "mixture",
    "project",
    "renyi_divergence",
    "sample",
    "screen",
]


def build_info() -> dict[str, object]:
    """Return what was built and what is used.

    Returns:
        ``cuda`` (bool), ``cuda_architectures`` (compute capabilities with kernels; newer ones run
        the PTX, if there is any), ``instruction_set`` of the CPU, and ``compiler``.
    """
    return {
        "cuda": _C.with_cuda,
        "cuda_architectures": _C.cuda_architectures,
        "instruction_set": _C.instruction_set(),
        "compiler": _C.compiler,
    }
