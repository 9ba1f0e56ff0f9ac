"""The scheduler: pieces in order, reservations freed, answers that are cancelled, cut or fail."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from adapmixed.errors import BudgetSpentError
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, BoundedRangeAnswer
from adapmixed.serving.admission import Admission
from adapmixed.serving.engine import Piece, Prompt, Query, StoppedError
from adapmixed.serving.errors import RequestError
from adapmixed.serving.scheduler import Scheduler, ServedAnswer

END = 0
PLAN = 1000


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], **settings: Any) -> str:
        return bytes(ids).decode(errors="replace")


class Steps:
    """An engine that counts up from the last token of a prompt, one step for each permit.

    Attributes:
        permits: steps that it may take; None for any number.
        most: number of sequences that it holds at once.
        fails: raised by a step once set.
    """

    def __init__(self, permits: int | None = None, most: int = 4) -> None:
        self.batch: dict[Prompt, int] = {}
        self.permits = None if permits is None else threading.Semaphore(permits)
        self.most, self.fails, self.widest = most, [], 0  # type: ignore[var-annotated]

    def check(self, prompt: Prompt) -> None:
        if prompt.tokens == (9,):
            raise ValueError("prompt must not be 9")

    def room(self, waiting: Sequence[Prompt]) -> int:
        return min(len(waiting), self.most - len(self.batch))

    def admit(self, joining: Sequence[Prompt]) -> None:
        self.batch |= {prompt: prompt.tokens[-1] for prompt in joining}
        self.widest = max(self.widest, len(self.batch))

    def step(self) -> list[tuple[Prompt, int]]:
        if self.permits is not None:
            self.permits.acquire()
        if self.fails:
            raise self.fails[0]
        self.batch = {prompt: token + 1 for prompt, token in self.batch.items()}
        return list(self.batch.items())

    def leave(self, ended: Collection[Prompt]) -> None:
        for prompt in ended:
            del self.batch[prompt]


class Served:
    """A scheduler over `Steps`, and the answers that were submitted to it."""

    def __init__(self, engine: Steps, waiting: int = 8) -> None:
        self.engine = engine
        self.accountant = Accountant(1e-5)
        self.admission = Admission(self.accountant, ClippedLogPool(-1.0, 1.0, queries=PLAN))
        self.scheduler = Scheduler(engine, Letters(), frozenset({END + 127}), waiting=waiting)

    def ask(
        self, *prompts: str, max_tokens: int = 3, stop: tuple[str, ...] = ()
    ) -> tuple[ServedAnswer, queue.Queue[Piece | Exception]]:
        query = Query(tuple(Prompt(tuple(p.encode()), max_tokens) for p in prompts), stop)
        self.scheduler.check(query)
        self.scheduler.check_room(len(prompts))
        pieces: queue.Queue[Piece | Exception] = queue.Queue()
        reservation = self.admission.reserve(len(prompts) * max_tokens)
        return self.scheduler.submit(query, reservation, pieces.put), pieces

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served(Steps())
    yield one
    one.scheduler.stop(0)


def texts(pieces: queue.Queue[Piece | Exception], prompts: int = 1) -> list[tuple[str, str]]:
    """Return the text and finish of every prompt of an answer."""
    found, finish = [""] * prompts, [""] * prompts
    while not all(finish):
        piece = pieces.get(timeout=20)
        assert isinstance(piece, Piece)
        assert not finish[piece.index]
        found[piece.index] += piece.text
        finish[piece.index] = piece.finish or ""
    assert pieces.empty()
    return list(zip(found, finish, strict=True))


def test_answers_of_several_prompts(served: Served) -> None:
    _, pieces = served.ask("a", "k", "za", max_tokens=3)
    assert texts(pieces, 3) == [("bcd", "length"), ("lmn", "length"), ("bcd", "length")]
    served.until(lambda: served.admission.reserved == 0)
    assert served.scheduler.running == served.scheduler.waiting == 0


@pytest.mark.parametrize(
    ("prompt", "stop", "expected"),
    [
        ("|", (), ("}~", "stop")),
        ("a", ("d",), ("bc", "stop")),
        ("a", ("ef", "z"), ("bcde", "length")),
    ],
)
def test_ends(served: Served, prompt: str, stop: tuple[str, ...], expected: Any) -> None:
    """An end token, a stop string, and text that was held back for one."""
    _, pieces = served.ask(prompt, max_tokens=4, stop=stop)
    assert texts(pieces) == [expected]
    served.until(lambda: served.admission.reserved == 0)


def test_answers_join_while_others_run() -> None:
    served = Served(Steps(permits=0, most=2))
    asked = [served.ask("a", max_tokens=n) for n in (4, 2, 1)]
    served.until(lambda: served.scheduler.running == 2)
    assert served.scheduler.waiting == 1
    served.engine.permits.release(10)  # type: ignore[union-attr]
    assert [texts(pieces) for _, pieces in asked] == [
        [("bcde", "length")], [("bc", "length")], [("b", "length")]
    ]  # fmt: skip
    assert served.engine.widest == 2
    served.scheduler.stop(0)


def test_the_queue_is_bounded() -> None:
    served = Served(Steps(permits=0, most=1), waiting=3)
    served.ask("a")
    served.until(lambda: served.scheduler.running == 1)
    served.ask("a", "b")
    with pytest.raises(RequestError, match="too many answers wait already"):
        served.ask("a", "b")
    served.ask("a")
    with pytest.raises(ValueError, match="prompts must be 1 to 3, got 4"):
        served.scheduler.check(Query((Prompt((1,), 1),) * 4))
    with pytest.raises(ValueError, match="prompt must not be 9"):
        served.scheduler.check(Query((Prompt((1,), 1), Prompt((9,), 1))))
    served.engine.permits.release(100)  # type: ignore[union-attr]
    served.scheduler.stop(20)


def test_tokens_are_reserved_until_they_are_charged_or_given_back() -> None:
    served = Served(Steps(permits=0))
    answer, pieces = served.ask("a", "b", max_tokens=400)
    assert (served.admission.reserved, served.admission.left) == (800, PLAN - 800)
    with pytest.raises(RequestError, match="running answers have reserved too many"):
        served.admission.reserve(201)
    with pytest.raises(BudgetSpentError, match="queries must stay within the 1000"):
        served.admission.reserve(1001)
    served.admission.reserve(200).close()
    served.engine.permits.release(5)  # type: ignore[union-attr]
    for _ in range(10):
        pieces.get(timeout=20)
    served.until(lambda: served.admission.reserved == 790)
    answer.cancel()
    served.engine.permits.release(1)  # type: ignore[union-attr]
    served.until(lambda: served.admission.reserved == 0)
    assert pieces.empty() and not served.engine.batch
    assert served.admission.left in (PLAN - 10, PLAN - 12)  # a step may have been under way
    # Without a reservation, the accountant says what is spent.
    served.accountant.add(BoundedRangeAnswer(1.0, -1.0, 1.0, 3, 30, PLAN))
    served.admission.reserve(1).close()
    assert served.admission.left == served.admission.unspent == PLAN - 30
    served.scheduler.stop(0)


def test_a_cancelled_answer_leaves_the_queue() -> None:
    served = Served(Steps(permits=0, most=1))
    _, first = served.ask("a", max_tokens=2)
    served.until(lambda: served.scheduler.running == 1)
    answer, second = served.ask("a")
    answer.cancel()
    served.engine.permits.release(2)  # type: ignore[union-attr]
    assert texts(first) == [("bc", "length")]
    served.until(lambda: served.admission.reserved == 0 and served.scheduler.waiting == 0)
    assert second.empty()
    served.scheduler.stop(0)


def test_a_stop_lets_answers_finish() -> None:
    served = Served(Steps(permits=0, most=1))
    asked = [served.ask("a"), served.ask("k")]
    stopping = threading.Thread(target=served.scheduler.stop, args=(20,))
    stopping.start()
    served.until(lambda: served.scheduler.stopped)
    with pytest.raises(RequestError, match="the server is stopping"):
        served.scheduler.check_room(1)
    served.engine.permits.release(100)  # type: ignore[union-attr]
    assert [texts(pieces)[0][0] for _, pieces in asked] == ["bcd", "lmn"]
    stopping.join(20)
    assert not stopping.is_alive() and served.admission.reserved == 0


def test_a_stop_cuts_answers_at_its_deadline() -> None:
    served = Served(Steps(permits=1))
    _, pieces = served.ask("a", max_tokens=20)
    assert isinstance(pieces.get(timeout=20), Piece)
    stopping = threading.Thread(target=served.scheduler.stop, args=(0,))
    stopping.start()
    served.until(lambda: served.scheduler.stopped)
    served.engine.permits.release(1)  # type: ignore[union-attr]
    stopping.join(20)
    last = [pieces.get(timeout=20) for _ in range(pieces.qsize())][-1]
    assert isinstance(last, StoppedError) and served.admission.reserved == 0
    late: queue.Queue[Piece | Exception] = queue.Queue()
    reservation = served.admission.reserve(5)
    served.scheduler.submit(Query((Prompt((1,), 5),)), reservation, late.put)
    assert isinstance(late.get(timeout=20), StoppedError) and served.admission.reserved == 0


def test_a_failed_engine_ends_all_answers(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(Steps(permits=0, most=1))
    asked = [served.ask("a"), served.ask("k", "l")]
    served.engine.fails.append(ValueError("private_logits[3, 0] must not be NaN"))
    served.engine.permits.release(1)  # type: ignore[union-attr]
    for _, pieces in asked:
        error = pieces.get(timeout=20)
        assert isinstance(error, StoppedError) and str(error) == "the engine has stopped"
        assert pieces.empty()
    served.scheduler.stop(20)
    assert served.admission.reserved == 0 and served.scheduler.stopped and served.scheduler.failed
    assert "ValueError" in caplog.text and "private_logits" not in caplog.text
