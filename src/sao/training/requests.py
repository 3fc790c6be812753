"""The trainer elsewhere: its methods become requests to one or several ranks, whose answers become one.

A request is done when all ranks have replied; rank 0's result counts, and any rank's error. Whoever carries requests
and answers tells of a rank that died or could not start; that fails every wait at once, now and later, and ends the
other ranks: they would wait for it. The loop that asks never blocks: answers may come on any thread.
"""

import asyncio
import contextlib
import itertools
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from sao.observe.metrics import Metric
from sao.store.files import describe_error
from sao.training.optimiser import Progress
from sao.training.protocol import ActorUpdate, StepReport, TrainerError, TrainerLostError
from sao.training.service import TrainerService
from sao.types import Batch, Rollout, Snapshot

START_TIMEOUT_S = 600.0
"""Importing torch and reading a large model may take minutes on a slow disk."""
STOP_TIMEOUT_S = 10.0
"""How long the ranks may take to end on request before they are ended."""
ERROR_GRACE_S = 10.0
"""How long the other ranks may take to reply after one has failed: an error of all comes at once, and a rank that waits
for the failed one never replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception in a rank, as text."""

    text: str
    """What went wrong, with a traceback where nobody foresaw it."""
    kind: type[Exception]
    """ValueError (bad input), TrainerError (it must not go on), or TrainerLostError (something broke)."""

    def error(self) -> Exception:
        """The exception for the caller."""
        return self.kind(self.text)


def failure_of(error: Exception) -> Failure:
    """What a rank answers instead of a result."""
    if isinstance(error, ValueError):
        return Failure(text=str(error), kind=ValueError)
    if isinstance(error, TrainerError):
        return Failure(text=str(error), kind=type(error))
    if isinstance(error, OSError):  # A disk that is full stays so.
        return Failure(text=describe_error(error), kind=TrainerError)
    detail = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__} in the trainer process: {error}\n{detail}"
    return Failure(text=text, kind=TrainerLostError)


def answer(service: TrainerService, method: str, inputs: Sequence[object], *, first: bool) -> object:
    """One request to a rank: the result, which only the first rank's caller needs, or the failure."""
    try:
        result = getattr(service, method)(*inputs)
    except Exception as error:
        return failure_of(error)
    return result if first else None


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """What has been replied to one request."""

    future: Future[Any]
    answers: dict[int, object] = field(default_factory=dict)


class RankTrainer(ABC):
    """Implements `Trainer` over ranks elsewhere; how they are reached is a subclass's."""

    def __init__(self, num_ranks: int, *, timeout_s: float, progress: Progress | None) -> None:
        """`timeout_s` bounds a wait for a reply, or for the next progress; `progress` is called on value pretraining's
        updates, on the loop that waits for it.
        """
        self._num_ranks, self._timeout_s, self._progress = num_ranks, timeout_s, progress
        self._heard = 0.0
        """When the latest progress came, by the loop's time."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Request] = {}
        self._to_start = num_ranks
        self._end: Exception | None = None

    @abstractmethod
    def _send(self, number: int, method: str, inputs: tuple[object, ...]) -> None:
        """Give a request to every rank, in order, without blocking."""

    @abstractmethod
    def _end_ranks(self) -> None:
        """End the ranks that are left, without blocking."""

    @abstractmethod
    def _name(self, rank: int) -> str:
        """A rank for people."""

    async def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        """Write the current actor as a snapshot without an update."""
        return await self._ask("publish_initial", f"the trainer to write version {version}", version, parent)

    async def update_actor(self, batch: Batch, *, version: int, parent: int) -> ActorUpdate:
        """Fix values and targets, update the actor, write it as `version`."""
        what = f"the actor's update of step {batch.step}"
        return await self._ask("update_actor", what, batch, version, parent)

    async def update_critic(self) -> StepReport:
        """Update the critic K times and report the step."""
        return await self._ask("update_critic", "the critic's updates")

    async def fit_values(self, rollouts: Sequence[Rollout]) -> Mapping[str, Metric]:
        """Pre-train the critic; nothing without one."""
        return await self._ask("fit_values", "value pretraining", tuple(rollouts))

    async def save(self, folder: str) -> None:
        """Write a checkpoint into an existing folder."""
        await self._ask("save", f"the trainer to save into {folder}", folder)

    async def load(self, folder: str) -> None:
        """Read a checkpoint. Raises ValueError naming the missing or corrupt file."""
        await self._ask("load", f"the trainer to load {folder}", folder)

    async def _ask(self, method: str, what: str, *inputs: object) -> Any:
        """Send a request and wait for its reply. Raises ValueError for bad input, else TrainerError."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._end is not None:
                raise type(self._end)(str(self._end))
            self._waiting[number] = _Request(future=future)
        self._loop = asyncio.get_running_loop()
        self._send(number, method, inputs)
        limit = self._timeout_s + (START_TIMEOUT_S if self._to_start else 0)
        return await unless_silent(asyncio.wrap_future(future), limit, what, heard=lambda: self._heard)

    def _started(self) -> None:
        """A rank is ready."""
        with self._lock:
            self._to_start -= 1

    def _progressed(self, done: int, total: int, metrics: dict[str, Metric]) -> None:
        """An update of value pretraining is done."""
        with contextlib.suppress(RuntimeError):  # The loop that asked may have ended.
            assert self._loop is not None, "progress without a request"
            self._loop.call_soon_threadsafe(self._note, done, total, metrics)

    def _note(self, done: int, total: int, metrics: dict[str, Metric]) -> None:
        self._heard = asyncio.get_running_loop().time()
        if self._progress is not None:
            self._progress(done, total, metrics)

    def _answered(self, number: int, rank: int, answer: object) -> None:
        """A rank has replied."""
        if self._num_ranks > 1 and isinstance(answer, Failure) and answer.kind is not ValueError:
            answer = replace(answer, text=f"{self._name(rank)} failed: {answer.text}")
        with self._lock:
            request = self._waiting.get(number)
            if request is None:
                return
            request.answers[rank] = answer
            answers = [request.answers[each] for each in sorted(request.answers)]
        failures = [found for found in answers if isinstance(found, Failure)]
        if len(answers) == self._num_ranks:
            self._deliver(number, failures[0] if failures else answers[0])
        elif len(failures) == 1 and failures[0] is answer:
            timer = threading.Timer(ERROR_GRACE_S, self._give_up, (number, failures[0]))
            timer.daemon = True
            timer.start()

    def _give_up(self, number: int, failure: Failure) -> None:
        """End all ranks if the request still waits: some rank waits for the one that failed."""
        with self._lock:
            waits = number in self._waiting
        if waits:
            self._fail(failure.error())

    def _fail(self, error: Exception) -> None:
        """Fail all requests, now and later, with the first such error, and end the ranks that are left."""
        with self._lock:
            self._end = self._end or error
            end, numbers = self._end, list(self._waiting)
        if self._num_ranks > 1:
            self._end_ranks()
        for number in numbers:
            self._deliver(number, Failure(text=str(end), kind=type(end)))

    def _deliver(self, number: int, answer: object) -> None:
        """Give the caller what became of a request."""
        with self._lock:
            request = self._waiting.pop(number, None)
        if request is None or not request.future.set_running_or_notify_cancel():
            return  # Whoever asked was cancelled. The reply is dropped, and the next request is unharmed.
        if isinstance(answer, Failure):
            request.future.set_exception(answer.error())
        else:
            request.future.set_result(answer)


async def unless_silent(reply: asyncio.Future[Any], limit: float, what: str, *, heard: Callable[[], float]) -> Any:
    """A reply. Raises TrainerError after `limit` seconds without it since the call, or since `heard()` (loop time)."""
    now = asyncio.get_running_loop().time
    asked = now()
    try:
        while not reply.done():
            left = max(asked, heard()) + limit - now()
            if left <= 0:
                raise TrainerLostError(
                    f"waited {limit:g} s for {what}; if it is only slow, raise trainer.step_timeout_s"
                )
            await asyncio.wait({reply}, timeout=left)
        return reply.result()
    finally:
        reply.cancel()
