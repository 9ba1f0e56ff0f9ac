"""What commands share: progress; errors before the work are in `test_refusals.py`."""

from __future__ import annotations

import pytest

from adapmixed.commands import options


def test_the_time_left_is_that_of_the_work_since_a_resumption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 100.0, 140.0])
    monkeypatch.setattr(options.time, "monotonic", lambda: next(clock))
    update, close = options.progress_bar(1000, "token")
    update(900, 1000)  # read from a file
    update(920, 1000)
    close()
    assert capsys.readouterr().err == "920 of 1,000 tokens, 02:40 left\n"
