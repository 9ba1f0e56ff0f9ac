"""CUDA graphs: a replay gives the results of the calls, and drawing in a graph raises an error."""

from __future__ import annotations

import plans
import pytest
import torch
import workload
from test_low_rank import operands, packed, rows

import adapmixed_ext
from adapmixed_ext.low_rank import add_low_rank, pack_factors


def capture(operation: workload.Operation, static: workload.Batch) -> tuple:
    """Return a graph of the operation on these tensors, and the tensors with its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        operation(static)  # loads the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = operation(static)
    return graph, results


@pytest.mark.parametrize("dtype", plans.DTYPES)
@pytest.mark.parametrize("name", workload.OPERATIONS)
def test_a_replay_answers_what_the_calls_answer(
    name: str, dtype: torch.dtype, gpu: torch.device
) -> None:
    operation = workload.OPERATIONS[name]
    static = workload.make(1, dtype=dtype).to(gpu)
    graph, results = capture(operation, static)
    for seed in (2, 3, 2):
        fresh = workload.make(seed, dtype=dtype).to(gpu)
        static.take(fresh)
        graph.replay()
        assert workload.same(results, operation(fresh)), seed


def test_graphs_with_a_workspace_in_groups(gpu: torch.device) -> None:
    """The sums of a batch may not fit the workspace at once, and a sort may need one."""
    shape = 20, 20, 50_257
    assert workload.in_groups(*shape)
    static = workload.make(1, *shape, top_k=3_000).to(gpu)
    for operation in (workload.many_orders, workload.OPERATIONS["screen"]):
        graph, results = capture(operation, static)
        graph.replay()
        assert workload.same(results, operation(static)), operation


def test_several_graphs_share_one_memory(gpu: torch.device) -> None:
    """Graphs replay in any order, one after another, as in benchmarks and servers."""
    pool, captured = torch.cuda.graph_pool_handle(), {}
    static = workload.make(4).to(gpu)
    for operation in workload.OPERATIONS.values():
        operation(static)
    torch.cuda.synchronize()
    for name, operation in workload.OPERATIONS.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = operation(static)
        captured[name] = graph, results
    for name in reversed(captured):
        graph, results = captured[name]
        graph.replay()
        assert workload.same(results, workload.OPERATIONS[name](static)), name


def test_draws_are_not_captured(gpu: torch.device) -> None:
    x = workload.make(5).to(gpu)
    probabilities = x.public.double().softmax(-1)
    workload.draws(x, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            adapmixed_ext.gaussian(5, sigma=1.0, rng=workload.Source(1), device=gpu)
        with pytest.raises(RuntimeError, match="cannot be captured"):
            adapmixed_ext.sample(probabilities, x.public, rng=workload.Source(1))
        kept = probabilities + 1.0
    graph.replay()
    assert torch.equal(kept, probabilities + 1.0)
    assert workload.same(workload.draws(x, 1), workload.draws(x, 1))


def test_members_of_the_output_layer(gpu: torch.device) -> None:
    """Whoever captures a pass cannot wait for the tokens to be looked at."""
    start, coefficients, factors, tokens = operands(37, 4, 8, 300, 700)
    packed_factors = pack_factors(list(factors), 8, 700).to(gpu)
    static = [tensor.to(gpu) for tensor in (start, packed(coefficients), tokens)]
    results = torch.empty(37, 4, 300, device=gpu)
    add_low_rank(static[0], static[1], packed_factors, results, static[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_low_rank(static[0], static[1], packed_factors, results, static[2])
    static[2].copy_(tokens.flip(-1))
    graph.replay()
    assert torch.equal(results.cpu(), rows(start, coefficients, factors, tokens.flip(-1)))
