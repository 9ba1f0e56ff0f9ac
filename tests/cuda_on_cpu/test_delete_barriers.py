"""The mutants of delete_barriers.py, which is run by hand."""

from __future__ import annotations

import delete_barriers


def test_there_are_barriers_to_delete() -> None:
    found = list(delete_barriers.mutants())
    assert len({mutant.name for mutant in found}) == len(found) >= 10
    files = {m.file.relative_to("csrc").as_posix() for m in found}
    assert {"common/block.cuh", "leave_one_out/cuda_tile.cuh", "sample/cuda.cu"} <= files
    for mutant in found:
        before = (delete_barriers.ROOT / mutant.file).read_text().splitlines()
        after = mutant.text.splitlines()
        differ = [k + 1 for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert differ == [mutant.line], mutant.name
