"""Shared fixtures: every kernel test runs on each device the build and the machine have."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        import adapmixed_ext

        if not adapmixed_ext.build_info()["cuda"]:
            pytest.skip("adapmixed_ext was built without CUDA")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device is reachable")
    return torch.device(request.param)
