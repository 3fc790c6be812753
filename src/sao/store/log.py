"""The durable rollout log: one writer with group commit, any number of readers.

    append(record) -> queue -> writer thread: up to 64 records -> one write, one fsync -> receipts
                               starts at 64 records, after 50 ms, or as soon as somebody waits for a receipt

A record counts once its receipt says that it is durable. Nothing is ever changed or removed.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from sao.store.frames import SEGMENT_BYTES, Frame, FrameReader, SegmentWriter, encode
from sao.store.records import Record, from_frame, to_frame

GROUP_RECORDS = 64
GROUP_SECONDS = 0.05


class LogWriteError(RuntimeError):
    """The log cannot be written any more: the disk is full or gone, or a record has no encoding."""


class Receipt:
    """A promise that a record, and all before it, will be on the disk."""

    __slots__ = ("_future", "_write_now")

    def __init__(self, future: "Future[None]", write_now: Callable[[], None]) -> None:
        self._future = future
        self._write_now = write_now

    @property
    def done(self) -> bool:
        """Whether the record is durable, or was lost to an error."""
        return self._future.done()

    async def durable(self) -> None:
        """Return once the record is on the disk. Raises LogWriteError."""
        if self._future.done():
            self._future.result()
        else:
            self._write_now()
            await asyncio.wrap_future(self._future)

    def wait(self, timeout_s: float | None = None) -> None:
        """As `durable`, blocking. Raises LogWriteError, or TimeoutError."""
        self._write_now()
        self._future.result(timeout_s)


class RolloutLogWriter:
    """Appends records to segments of its own. Safe to call from any thread; one writer per run folder.

    A thread writes and syncs up to 64 records at once; a record waits at most 50 ms for company, and for none when its
    receipt is awaited: company gathers while the disk is busy. inline, for virtual time: written within `append`, which
    outlives the process though not the machine; synced by `close`.

    After the first error every append and every receipt raises it; what was durable before stays readable.
    """

    def __init__(self, folder: Path, *, inline: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._inline = inline
        self._segments = SegmentWriter(folder, segment_bytes=segment_bytes)
        self._condition = threading.Condition()
        self._queue: list[tuple[Frame, Future[None]]] = []
        self._urgent = False
        self._closing = False
        self._error: BaseException | None = None
        self._last = Receipt(_fulfilled(), self._write_now)
        self._thread: threading.Thread | None = None
        if not inline:
            self._thread = threading.Thread(target=self._write_groups, name="rollout-log", daemon=True)
            self._thread.start()

    def append(self, record: Record) -> Receipt:
        """Take a record in. Raises LogWriteError when the log has failed, ValueError when it is closed."""
        frame = to_frame(record)
        future: Future[None] = Future()
        # A running future cannot be cancelled: a caller who stops waiting must not take the record with him.
        future.set_running_or_notify_cancel()
        receipt = Receipt(future, self._write_now)
        with self._condition:
            if self._error is not None:
                raise self._failure()
            if self._closing:
                raise ValueError(f"the log in {self._folder} is closed; nothing can be appended to it")
            self._queue.append((frame, future))
            self._last = receipt
            if self._inline:
                self._commit(self._take())
                if self._error is not None:
                    raise self._failure()
            elif len(self._queue) in (1, GROUP_RECORDS):
                self._condition.notify()
        return receipt

    async def durable(self) -> None:
        """Return once everything appended so far is on the disk. Raises LogWriteError."""
        await self._last.durable()

    def close(self) -> None:
        """Write what waits, and stop. Raises LogWriteError if anything was lost. Safe to call twice."""
        with self._condition:
            first = not self._closing
            self._closing = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
        if not first:
            return
        try:
            self._segments.close()
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise self._failure()

    def _write_now(self) -> None:
        with self._condition:
            if self._queue:
                self._urgent = True
                self._condition.notify()

    def _take(self) -> list[tuple[Frame, "Future[None]"]]:
        group, self._queue = self._queue[:GROUP_RECORDS], self._queue[GROUP_RECORDS:]
        self._urgent = self._urgent and bool(self._queue)
        return group

    def _write_groups(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                deadline = time.monotonic() + GROUP_SECONDS
                self._condition.wait_for(
                    lambda: len(self._queue) >= GROUP_RECORDS or self._urgent or self._closing,
                    timeout=deadline - time.monotonic(),
                )
                group = self._take()
            self._commit(group)

    def _commit(self, group: list[tuple[Frame, "Future[None]"]]) -> None:
        """Write a group at once; then every receipt of the group is fulfilled, or all of them raise."""
        if self._error is None:
            try:
                self._segments.write(b"".join(encode(frame) for frame, _ in group))
                if not self._inline:
                    self._segments.sync()
            except BaseException as error:
                self._error = error
        for _, future in group:
            if self._error is None:
                future.set_result(None)
            else:
                future.set_exception(self._failure())

    def _failure(self) -> LogWriteError:
        reason, advice = repr(self._error), ""
        if isinstance(self._error, OSError):
            reason = self._error.strerror or reason
            advice = "; free space on that disk, then go on with `sao resume`"
        failure = LogWriteError(
            f"cannot write the rollout log in {self._folder}: {reason}. What was logged before is safe{advice}."
        )
        failure.__cause__ = self._error
        return failure


def _fulfilled() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


class LogContents:
    """Iterates the records of a log, read-only; damage is skipped and counted.

    Iterating again gives what was written since: with `follow`, the live view of a run that goes on.
    """

    def __init__(self, folder: Path, *, follow: bool = False) -> None:
        self._frames = FrameReader(folder, follow=follow)
        self._unreadable = 0

    def __iter__(self) -> Iterator[Record]:
        for frame in self._frames:
            record = self.decode(frame)
            if record is not None:
                yield record

    def frames(self) -> Iterator[Frame]:
        """The records undecoded: arrays are unpacked where they are looked at. Shares its place with iterating."""
        return iter(self._frames)

    def decode(self, frame: Frame) -> Record | None:
        """The frame's record; None, and counted, where there is none in it."""
        try:
            return from_frame(frame)
        except (ValueError, KeyError, TypeError, AttributeError):
            self._unreadable += 1
            return None

    @property
    def quarantined(self) -> int:
        """Records lost to damage, of what was read so far: bad frames, torn tails, frames that are no record."""
        return self._frames.bad + self._frames.torn + self._unreadable


def read(folder: Path, *, follow: bool = False) -> LogContents:
    """The records of a log in the order of writing. With `follow`, a record under way is read by a later pass."""
    return LogContents(folder, follow=follow)
