"""Operators for private next-token prediction from an ensemble, on torch tensors.

projection = adapmixed_ext.project(private_logits, public_logits, order=18, radius=3.6)
loss = adapmixed_ext.leave_one_out(private_logits, public_logits, projection, orders=18)
p = adapmixed_ext.mixture(private_logits, public_logits, projection)

Notation: N models, B positions, V tokens, K Rényi orders; q and p_i the softmax of the public and
private logits; p̄_i = λ_i p_i + (1−λ_i) q. Logits are float32, bfloat16 or float16 with any row
stride (one copy is made if the last stride is not 1). Results that carry privacy are float64.
Bad arguments and bad rows raise ValueError. There are no gradients. CUDA calls only queue work, and
can raise for arguments alone: bad rows, and rows that are not those of a projection, have weight 0,
losses and divergences of +inf, probabilities of NaN and the token -1; ``check()`` of a result with
a status raises what the CPU raises at once.
Memory is stated in bytes beyond inputs, that copy and results; on the CPU, threads keep theirs for
their next call. None of it grows with N·V. On CUDA ``project`` takes 18 536·N for each position of
those that share it, as many as fit 64 MiB or one; ``leave_one_out`` at most 64 MiB, or 8·N·
(2K + 1) where that is more, 4096·K, and 16·N + V/4 + 128 for each position of those that share it:
at most 2^26 / (8·N·(2K + 1)) of them, or one; ``step`` the larger of the two.
"""

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        "adapmixed_ext has no compiled module (_C): install it with 'pip install -e .', or start "
        "Python outside the repository if adapmixed is installed elsewhere"
    ) from error

from ._clip import clip_project
from ._leave_one_out import leave_one_out, loss_error
from ._log_pool import log_pool
from ._mixture import log_prob, mixture
from ._project import project
from ._renyi import renyi_divergence
from ._sample import gaussian, sample
from ._screen import screen
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
    "loss_error",
    "mixture",
    "project",
    "renyi_divergence",
    "sample",
    "screen",
]


def build_info() -> dict[str, object]:
    """Return what was built and what is used.

    ``cuda`` (bool), ``cuda_architectures`` (compute capabilities with kernels; newer ones run what
    PTX there is), ``instruction_set`` of the CPU, ``compiler``.
    """
    return {
        "cuda": _C.with_cuda,
        "cuda_architectures": _C.cuda_architectures,
        "instruction_set": _C.instruction_set(),
        "compiler": _C.compiler,
    }
