"""A build with CUDA on a machine without a GPU: it imports, and a call says what is missing.

The CUDA runtime is linked statically, so that a module with kernels loads without a driver.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import adapmixed_ext
from adapmixed_ext import _C

pytestmark = [
    pytest.mark.skipif(
        not adapmixed_ext.build_info()["cuda"], reason="adapmixed_ext was built without CUDA"
    ),
    # On a GPU these null pointers would really be read.
    pytest.mark.skipif(
        torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*")),
        reason="there is a GPU",
    ),
]

KEY = torch.zeros(32, dtype=torch.uint8)  # read on the CPU, before the call of the runtime
SHAPE, LOGITS, NOWHERE = (1, 1, 1), (0, 0, 1, 0), (0, 0, 0)
ROWS = (SHAPE, LOGITS, LOGITS)
ENSEMBLE = (*ROWS, 0, 0)
WEIGHTS = (0, 0, 0.0, 0.0, 0)
ORDERS = array("d", [2.0])
CALLS: dict[str, tuple[object, ...]] = {
    "log_sum_exp": (LOGITS, *SHAPE, 0, 0),
    "project": (ROWS, 18.0, 3.6, (0,) * 5),
    "clip_project": ((*ROWS, 0), (0.5, 2.0, *ORDERS.buffer_info(), 1), (0,) * 5),
    "leave_one_out": (ENSEMBLE, WEIGHTS, (*ORDERS.buffer_info(), False, 1), 0, 0),
    "mixture": (ENSEMBLE, WEIGHTS, 0),
    "log_prob": (ENSEMBLE, WEIGHTS, 0, 0),
    "log_pool": ((*ROWS, 0), (-0.25, 1.0, 2.0, 1, 0), (0,) * 7),
    "add_low_rank": ((SHAPE, 0, 0, 0, 0, 0, 0, 0, 1, 1), (0, 0, 0)),
    "renyi_divergence": (ENSEMBLE, *ORDERS.buffer_info(), 0, 0),
    "screen": (ENSEMBLE, (0.1, 2.0, 1.0, 1, 1, 0, 0, 0, 0), 0, 0),
    "gaussian": (KEY.data_ptr(), 1, 0.5, 1, 0),
    "sample": (0, LOGITS, 1, 1, KEY.data_ptr(), 1, 0, 0),
}


def operators(module: object) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


# The CPU may have operators that the GPU lacks.
CALLS = {name: call for name, call in CALLS.items() if name in operators(getattr(_C, "cuda", None))}


def test_every_operator_is_called() -> None:
    sized = (
        *("clip_project", "leave_one_out", "log_pool", "log_sum_exp", "mixture", "project"),
        "sample",
    )
    workspaces = {f"{name}_workspace" for name in sized}
    assert operators(_C.cuda) == set(CALLS) | workspaces
    assert set(CALLS) <= operators(_C.cpu)


def test_what_was_built_is_told() -> None:
    info = adapmixed_ext.build_info()
    assert info["cuda"] is True
    assert str(info["cuda_architectures"]).split()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_that_there_is_no_gpu(name: str) -> None:
    operator: Callable[..., object] = getattr(_C.cuda, name)
    for _ in range(2):  # the runtime keeps its last error
        with pytest.raises(RuntimeError, match="found no GPU, or a driver older"):
            operator(*CALLS[name], NOWHERE)


def test_the_sizes_of_workspaces_need_no_gpu() -> None:
    least = 8 * 100 * 3  # the sums of one chunk
    assert least <= _C.cuda.leave_one_out_workspace((100, 1, 50_257), 1) < 2**28
    # For each position 25 parts of each row, the sums of 8 warps for each of 197 tiles, a counter.
    assert _C.cuda.log_pool_workspace((100, 2, 50_257)) == 2 * (101 * 25 * 32 + 197 * 8 * 16 + 4)
    assert 0 < _C.cuda.project_workspace((100, 1, 50_257)) < 100 * 50_257 / 5
    single, batch = (_C.cuda.leave_one_out_workspace((100, b, 50_257), 8) for b in (1, 64))
    assert single < batch < 64 * single  # the batch is processed in groups


def shared_sections() -> Iterator[tuple[str, int]]:
    """Yield (kernel, bytes of static shared memory) of all machine code in the module.

    The module is an ELF file that contains ELF files. From sm_90 on, the 1024 bytes that the
    hardware takes are counted.
    """
    data = Path(_C.__file__).read_bytes()
    for match in re.finditer(b"\x7fELF\x02", data):
        image = data[match.start() :]
        if struct.unpack_from("<H", image, 18)[0] != 190:  # CUDA
            continue
        (first,) = struct.unpack_from("<Q", image, 40)
        size, count, names = struct.unpack_from("<HHH", image, 58)
        headers = [struct.unpack_from("<IIQQQQ", image, first + k * size) for k in range(count)]
        for header in headers:
            at = headers[names][4] + header[0]
            name = image[at : image.index(0, at)].decode()
            if name.startswith(".nv.shared._Z"):
                yield name, header[5]


def test_static_shared_memory_is_what_the_simulation_takes_it_for() -> None:
    """The simulation cannot measure it, so simt.h states a bound."""
    simt = Path(__file__).parents[1] / "cuda_on_cpu" / "simt.h"
    stated = re.search(r"kStaticShared = (\d+);", simt.read_text())
    assert stated
    sizes = {size for name, size in shared_sections() if "chunk_sums_kernel" in name}
    assert sizes and 0 < max(sizes) <= int(stated[1]), sizes


def test_the_cpu_is_served_as_ever() -> None:
    public = torch.tensor([[0.0, 1.0, 2.0]])
    projection = adapmixed_ext.project(public[None] + 0.0, public, order=2, radius=1.0)
    assert projection.weight.tolist() == [[1.0]]
