"""Run every operator on tiny inputs in a fixed order, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python tests/cuda/sanitizer_cases.py

Without torch's cache each tensor is an allocation of its own, so that an access beyond its ends is
noticed. `--device cpu` runs the same calls without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels")]

import cases  # noqa: E402
import workload  # noqa: E402

# N, B, V, top k: one token, tails of vectors and warps, more models than a warp has threads, more
# tokens than a tile, and a sort that needs a workspace.
SHAPES = (
    (1, 1, 1, 1),
    (3, 2, 17, 5),
    (33, 2, 130, 40),
    (130, 1, 70, 3),
    (4, 2, 1_037, 60),
    (3, 1, 2_500, 2_400),
)


def inputs() -> Iterator[tuple[str, workload.Inputs]]:
    """Yield named inputs on the CPU."""
    for dtype in cases.DTYPES:
        for seed, (models, positions, vocab, top_k) in enumerate(SHAPES):
            x = workload.make(seed, models, positions, vocab, dtype, top_k)
            if vocab == 1:
                x.private[:] = 0.0  # the only token must not be masked
            yield f"{(models, positions, vocab)} {dtype}", x
    for case in (*cases.masked(), *cases.identical()):
        models, positions, vocab = case.private.shape
        base = workload.make(1, models, positions, vocab, top_k=min(4, vocab))
        yield case.name, base._replace(private=case.private, public=case.public)


def misaligned(x: workload.Inputs) -> workload.Inputs:
    """Return the logits inside larger arrays, one element off, so that no row is aligned."""

    def shifted(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.new_zeros((*rows.shape[:-1], rows.shape[-1] + 2))
        wide[..., 1:-1] = rows
        return wide[..., 1:-1]

    return x._replace(private=shifted(x.private), public=shifted(x.public))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    calls = 0
    for seed, (_, on_cpu) in enumerate(inputs()):
        x = on_cpu.to(device)
        for given in (x, misaligned(x)):
            for operation in workload.OPERATIONS.values():
                operation(given)
            workload.draws(given, seed)
            calls += len(workload.OPERATIONS) + 1
    if device != "cpu":
        torch.cuda.synchronize()
    print(f"{calls} calls on {device}")


if __name__ == "__main__":
    main()
