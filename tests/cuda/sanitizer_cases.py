"""Run every operator on tiny inputs in a fixed order, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python tests/cuda/sanitizer_cases.py

Without torch's cache each tensor is an allocation of its own, so that an access beyond its ends is
noticed. `--device cpu` runs the same calls without a GPU. `--few` takes three shapes in two dtypes.
`--ours-alone` is for initcheck, which watches our kernels alone: whatever they read was written by
one of them or copied from the CPU, never computed by a kernel of torch.
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
import plans  # noqa: E402
import workload  # noqa: E402

import adapmixed_ext  # noqa: E402
from adapmixed_ext.low_rank import BLOCK, add_low_rank, blocks_of  # noqa: E402

# N, B, V, top k: few tokens, tails of vectors and warps, more models than a warp has threads, more
# tokens than a tile, and a sort that needs a workspace.
SHAPES = (
    (1, 1, 2, 1),
    (3, 2, 17, 5),
    (33, 2, 130, 40),
    (130, 1, 70, 3),
    (4, 2, 1_037, 60),
    (3, 1, 2_500, 2_400),
)


FEW = SHAPES[1:4]


def inputs(few: bool = False) -> Iterator[tuple[str, workload.Batch]]:
    """Yield named inputs on the CPU."""
    for dtype in (torch.bfloat16, torch.float32) if few else plans.DTYPES:
        for seed, (models, positions, vocab, top_k) in enumerate(FEW if few else SHAPES):
            x = workload.make(seed, models, positions, vocab, dtype, top_k)
            yield f"{(models, positions, vocab)} {dtype}", x
    if few:
        return
    for case in (*cases.masked(), *cases.identical()):
        models, positions, vocab = case.private.shape
        base = workload.make(1, models, positions, vocab, top_k=min(4, vocab))
        yield case.name, base._replace(private=case.private, public=case.public)


def misaligned(x: workload.Batch) -> workload.Batch:
    """Return the logits inside larger arrays, one element off, so that no row is aligned."""

    def shifted(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.new_zeros((*rows.shape[:-1], rows.shape[-1] + 2))
        wide[..., 1:-1] = rows
        return wide[..., 1:-1]

    return x._replace(private=shifted(x.private), public=shifted(x.public))


def low_rank(x: workload.Batch, device: str) -> None:
    """Run add_low_rank on copies from the CPU, on all tokens and on half of them in reverse."""
    models, positions, vocab = x.private.shape
    codes = torch.ones((positions, blocks_of(models), 2, BLOCK))
    factors = torch.ones((vocab, *codes.shape[1:])).to(x.private.dtype)
    if factors.dtype == torch.float16:
        factors = factors.bfloat16()
    order = torch.arange(vocab).flip(0).expand(positions, -1)
    for columns in (vocab, max(1, vocab // 2)):
        tokens = None if columns == vocab else order[:, :columns].contiguous().to(device)
        operands = x.public.float()[:, :columns].contiguous(), codes, factors
        result = torch.empty((models, positions, columns)).to(device)
        add_low_rank(*(tensor.to(device) for tensor in operands), result, tokens)


def ours_alone(x: workload.Batch, seed: int, device: str) -> int:
    """Run the operators on copies from the CPU and on each other's results; return their number.

    The mixture of a projection is left out: torch checks the weights, and mixes the result.
    """
    private, public = x.private.to(device), x.public.to(device)
    rng = workload.Source(seed)
    calls = 1
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (2.5, 0.4)):
        projection = adapmixed_ext.project(private, public, order=order, radius=radius)
        for adjacency in ("add_remove", "zero_out"):
            adapmixed_ext.leave_one_out(
                private, public, projection, orders=[2.0, 18.0], adjacency=adjacency
            )
        calls += 3
    pool = adapmixed_ext.log_pool(private, public, lower=-0.25, upper=1.0, scale=2.0)
    adapmixed_ext.mixture(private, public, pool)
    probabilities = x.public.double().softmax(-1).to(device)
    adapmixed_ext.sample(probabilities, public, rng=rng)
    adapmixed_ext.gaussian((3, 7), sigma=0.7, rng=rng, device=torch.device(device))
    low_rank(x, device)
    return calls + 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--few", action="store_true", help="three shapes, two dtypes")
    parser.add_argument("--ours-alone", action="store_true", help="nothing computed by torch")
    options = parser.parse_args()
    device, calls = options.device, 0
    for seed, (_, on_cpu) in enumerate(inputs(options.few)):
        if options.ours_alone:
            for batch in (on_cpu, misaligned(on_cpu)):
                calls += ours_alone(batch, seed, device)
            continue
        x = on_cpu.to(device)
        for batch in (x, misaligned(x)):
            for operation in workload.OPERATIONS.values():
                operation(batch)
            workload.draws(batch, seed)
            calls += len(workload.OPERATIONS) + 1
        low_rank(on_cpu, device)
        calls += 2
    if device != "cpu":
        torch.cuda.synchronize()
    print(f"{calls} calls on {device}")


if __name__ == "__main__":
    main()
