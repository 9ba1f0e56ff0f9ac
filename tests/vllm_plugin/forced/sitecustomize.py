"""Forces the tokens of a server of vLLM: each one follows from the public row alone.

A folder on PYTHONPATH with this file changes every process of a server, also those that it spawns.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "adapmixed.mechanisms.mechanism"


class _Forcing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module of distributions, and replaces the draw."""

    def __init__(self) -> None:
        self._spec: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _NAME or self._spec is not None:
            return None
        self._spec = importlib.machinery.PathFinder.find_spec(name, path)
        return importlib.util.spec_from_loader(name, self, origin=self._spec.origin)

    def create_module(self, spec: Any) -> ModuleType:
        return importlib.util.module_from_spec(self._spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader.exec_module(module)

        def sample(self: Any, rng: Any) -> Any:
            public = self.rows.public
            assert (self.rows.private != public).any()  # the members are not the public model
            tokens = (7 * public.argmax(-1) + 3) % self.rows.width
            return self.rows.released(tokens, rng)

        module.NextToken.sample = sample  # type: ignore[attr-defined]


sys.meta_path.insert(0, _Forcing())
