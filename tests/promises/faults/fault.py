"""A change that breaks a promise: where, what is changed, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of one source file.

    Attributes:
        promise: the one that it breaks.
        what: the fault, in a few words.
        file: path from the root of the repository.
        old: text that occurs there exactly once.
        new: what is put in its place.
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
        """Whether the compiled module must be built again."""
        return self.file.startswith("csrc/")
