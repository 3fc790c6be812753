"""One writer with group commit: what a receipt promised is on the disk, and an error reaches everybody."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from store_examples import make_rollout

from sao.clock import run_virtual
from sao.store.frames import Frame, SegmentWriter, encode, segments
from sao.store.log import LogWriteError, RolloutLogWriter, read
from sao.store.records import Dropped, Finished


def dropped(number: int) -> Dropped:
    return Dropped(rollout_id=str(number), reason="over_age")


def ids(folder: Path) -> list[str]:
    return [record.rollout_id for record in read(folder) if isinstance(record, Dropped)]


@pytest.mark.parametrize("inline", [False, True])
def test_a_durable_record_can_be_read_at_once(tmp_path: Path, inline: bool) -> None:
    """Would catch a receipt that comes before the write."""

    async def main() -> None:
        writer = RolloutLogWriter(tmp_path, inline=inline)
        for number in range(150):
            receipt = writer.append(dropped(number))
        await receipt.durable()
        assert ids(tmp_path) == [str(number) for number in range(150)]
        writer.append(Finished(rollout=make_rollout("t"), position=0))
        await writer.durable()
        assert len(list(read(tmp_path))) == 151
        writer.close()

    asyncio.run(main())


def test_inline_logging_works_in_virtual_time(tmp_path: Path) -> None:
    """Would catch a writer that waits for a thread, which virtual time refuses."""

    async def main() -> None:
        writer = RolloutLogWriter(tmp_path, inline=True)
        await writer.append(dropped(1)).durable()
        await writer.durable()
        writer.close()

    run_virtual(main())
    assert ids(tmp_path) == ["1"]


def test_records_of_many_threads_are_all_written(tmp_path: Path) -> None:
    """Would catch a race that loses a record or tears a frame."""
    writer = RolloutLogWriter(tmp_path, segment_bytes=2000)
    threads = [
        threading.Thread(target=lambda base=base: [writer.append(dropped(base + i)) for i in range(100)])
        for base in range(0, 400, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    found = read(tmp_path)
    assert sorted(int(record.rollout_id) for record in found if isinstance(record, Dropped)) == list(range(400))
    assert found.quarantined == 0
    for base in range(0, 400, 100):
        mine = [int(name) for name in ids(tmp_path) if base <= int(name) < base + 100]
        assert mine == sorted(mine)


def test_a_cancelled_wait_does_not_lose_the_record(tmp_path: Path) -> None:
    """Would catch a receipt whose cancellation stops the writer thread or unwrites the record."""

    async def main() -> None:
        writer = RolloutLogWriter(tmp_path)
        waiting = asyncio.ensure_future(writer.append(dropped(1)).durable())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await writer.append(dropped(2)).durable()
        writer.close()

    asyncio.run(main())
    assert ids(tmp_path) == ["1", "2"]


def test_who_waits_for_a_receipt_does_not_wait_for_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a group commit that holds new weights, or a finished batch, back."""
    monkeypatch.setattr("sao.store.log.GROUP_SECONDS", 60.0)

    async def main() -> None:
        writer = RolloutLogWriter(tmp_path)
        first = writer.append(dropped(1))
        await asyncio.wait_for(writer.append(dropped(2)).durable(), timeout=20)
        assert first.done
        writer.append(dropped(3))
        await asyncio.wait_for(writer.durable(), timeout=20)
        writer.append(dropped(4)).wait(timeout_s=20)
        writer.close()

    asyncio.run(main())


def test_a_full_group_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a bound on records that is not kept."""
    monkeypatch.setattr("sao.store.log.GROUP_SECONDS", 60.0)
    writer = RolloutLogWriter(tmp_path)
    for number in range(64):
        receipt = writer.append(dropped(number))
    deadline = time.monotonic() + 20
    while not receipt.done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert receipt.done
    writer.close()


def test_a_closed_log_refuses_records(tmp_path: Path) -> None:
    """Would catch records that vanish after the end."""
    writer = RolloutLogWriter(tmp_path)
    receipt = writer.append(dropped(1))
    writer.close()
    writer.close()
    assert receipt.done
    with pytest.raises(ValueError, match="closed"):
        writer.append(dropped(2))


FULL_DISK = """
    import asyncio, resource, signal, sys
    from pathlib import Path
    from sao.store.log import LogWriteError, RolloutLogWriter
    from sao.store.records import Dropped

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))

    async def main(inline):
        writer = RolloutLogWriter(Path(sys.argv[1]), inline=inline)
        durable = 0
        try:
            for number in range(1000):
                await writer.append(Dropped(rollout_id=str(number), reason="x" * 50)).durable()
                durable += 1
        except LogWriteError as error:
            print(durable)
            print(error)
        for attempt in (lambda: writer.append(Dropped(rollout_id="late", reason="")), writer.close):
            try:
                attempt()
                print("no error")
            except LogWriteError:
                print("refused")

    asyncio.run(main(sys.argv[2] == "inline"))
"""


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path, mode: str) -> None:
    """Would catch a full disk that is swallowed by the writer's thread, or that ruins what was written before."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path), mode],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    durable, message, *later = done.stdout.splitlines()
    assert int(durable) > 10
    assert "File too large" in message
    assert str(tmp_path) in message
    assert "free space on that disk, then go on with `sao resume`" in message
    assert later == ["refused", "refused"]
    contents = read(tmp_path)
    names = [record.rollout_id for record in contents if isinstance(record, Dropped)]
    assert names[: int(durable)] == [str(number) for number in range(int(durable))]
    assert contents.quarantined <= 1


def test_a_file_system_without_space_is_named(tmp_path: Path) -> None:
    """Would catch ENOSPC itself taken for something else; needs a small file system, so only root runs it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        writer = RolloutLogWriter(folder)
        receipts = []

        def fill() -> None:
            for number in range(1000):
                rollout = make_rollout(str(number), lengths=(300,))
                receipts.append(writer.append(Finished(rollout=rollout, position=number)))
                receipts[-1].wait(timeout_s=20)

        with pytest.raises(LogWriteError, match="No space left on device"):
            fill()
        assert len(list(read(folder))) == len(receipts) - 1 > 3
        with pytest.raises(LogWriteError):
            asyncio.run(writer.durable())
        with pytest.raises(LogWriteError):
            writer.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("inline", [False, True])
def test_a_record_without_an_encoding_is_no_full_disk(tmp_path: Path, inline: bool) -> None:
    """Would catch somebody who frees space for a task whose details the log cannot write."""

    async def main() -> None:
        writer = RolloutLogWriter(tmp_path, inline=inline)
        with pytest.raises(LogWriteError, match="cannot stand in a frame's header") as raised:
            await writer.append(Dropped(rollout_id="a", reason=object())).durable()  # type: ignore[arg-type]
        assert "free space" not in str(raised.value)
        with pytest.raises(LogWriteError):
            writer.close()

    asyncio.run(main())


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """Would catch a reader that repairs, locks or touches a dead run's log."""
    writer = RolloutLogWriter(tmp_path, inline=True)
    writer.append(dropped(1))
    writer.close()
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-3])
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    contents = read(tmp_path)
    assert list(contents) == []
    assert contents.quarantined == 1
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()} == before


def test_a_frame_that_is_no_record_is_counted(tmp_path: Path) -> None:
    """Would catch a log of a later version that cannot be read at all."""
    writer = SegmentWriter(tmp_path)
    for frame in (
        Frame(kind="novel", fields={}, arrays={}),
        Frame(kind="dropped", fields={"rollout_id": "a"}, arrays={}),
        Frame(kind="dropped", fields={"rollout_id": "b", "reason": "r"}, arrays={}),
    ):
        writer.write(encode(frame))
    writer.close()
    contents = read(tmp_path)
    assert list(contents) == [Dropped(rollout_id="b", reason="r")]
    assert contents.quarantined == 2


def test_following_gives_new_records_only(tmp_path: Path) -> None:
    """Would catch a live view that shows a record twice."""
    contents = read(tmp_path, follow=True)
    writer = RolloutLogWriter(tmp_path, inline=True)
    seen = []
    for number in range(3):
        writer.append(dropped(number))
        seen.append([record.rollout_id for record in contents if isinstance(record, Dropped)])
    writer.close()
    assert seen == [["0"], ["1"], ["2"]]
    assert list(contents) == []
