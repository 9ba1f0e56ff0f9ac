"""A change that breaks a promise, with its place and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of one source file.

    Attributes:
        promise: name of the promise that it breaks.
        what: description in a few words.
        file: path from the root of the repository.
        old: text that occurs in the file exactly once.
        new: text that replaces it.
        tests: files or single tests of which at least one must fail.
    """

    promise: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        """True if the compiled module must be built again."""
        return self.file.startswith("csrc/")
