"""A plan's tokens are reserved while an answer waits or runs; the answers are in `test_app.py`."""

from __future__ import annotations

import queue

import pytest
from serving_cases import served, until
from stub_engine import StubEngine

from adapmixed.errors import BudgetSpentError
from adapmixed.serving.engine import Piece, Prompt, Query
from adapmixed.serving.errors import RequestError

PLAN = 1000


def test_tokens_are_reserved_until_they_are_charged_or_given_back() -> None:
    engine, pieces = StubEngine(queries=PLAN, seconds=0.01), queue.Queue[Piece | Exception]()
    engine.go.clear()
    with served(engine) as server:
        admission = server.admission
        query = Query((Prompt((1,), 400), Prompt((2,), 400)))
        answer = server.scheduler.submit(query, admission.reserve(800), pieces.put)
        assert (admission.reserved, admission.left) == (800, PLAN - 800)
        with pytest.raises(RequestError, match="reserved too many"):
            admission.reserve(201)
        with pytest.raises(BudgetSpentError, match="queries must stay within the 1000"):
            admission.reserve(1001)
        admission.reserve(200).close()
        engine.go.set()
        until(lambda: engine.released >= 10)
        engine.go.clear()
        until(lambda: admission.reserved == 800 - engine.released)
        assert admission.left == PLAN - 800
        answer.cancel()
        engine.go.set()
        until(lambda: admission.reserved == 0)
        assert not engine._running and pieces.qsize() <= engine.released
        assert admission.left == admission.unspent == PLAN - engine.accountant.queries
