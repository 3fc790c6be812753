"""Records come back as they were, bit for bit."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_examples import make_rollout, make_task

from sao.store.frames import Frame, FrameReader, SegmentWriter, encode
from sao.store.records import (
    Admitted,
    AttemptEnded,
    Dropped,
    Finished,
    Published,
    Record,
    TokenRecord,
    Trained,
    from_frame,
    to_frame,
)
from sao.types import FailureKind, Rollout, Snapshot


def through_a_file(folder: Path, record: Record) -> Record:
    writer = SegmentWriter(folder)
    writer.write(encode(to_frame(record)))
    writer.close()
    return from_frame(list(FrameReader(folder))[-1])


def assert_same_arrays(found: object, expected: object) -> None:
    for item in fields(expected):  # type: ignore[arg-type]
        left, right = getattr(found, item.name), getattr(expected, item.name)
        if isinstance(right, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()
        else:
            assert left == right


def assert_same_rollout(found: Rollout, expected: Rollout) -> None:
    for item in fields(Rollout):
        if item.name != "sequences":
            assert getattr(found, item.name) == getattr(expected, item.name)
    assert len(found.sequences) == len(expected.sequences)
    for left, right in zip(found.sequences, expected.sequences, strict=True):
        assert_same_arrays(left, right)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 2**32))
def test_a_rollout_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    """Would catch a sequence boundary off by one, and a lost dtype or float bit."""
    rollout = make_rollout("t", lengths=tuple(lengths), seed=seed, max_version=4)
    found = through_a_file(tmp_path_factory.mktemp("log"), Finished(rollout=rollout, position=7))
    assert isinstance(found, Finished)
    assert found.position == 7
    assert_same_rollout(found.rollout, rollout)


def test_scalar_records_come_back_equal(tmp_path: Path) -> None:
    """Would catch an enum that comes back as text, a tuple as a list, a 64-bit seed as a float."""
    snapshot = Snapshot(
        version=3, parent=None, location="/w", checksum="c", probe_token_ids=(1, 2), probe_logprobs=(-1 / 3,)
    )
    records: list[Record] = [
        Admitted(
            task=make_task("a"), cursor=5, rollout_id="a.1", group_id="g", attempt=1, seed=2**64 - 1, clock_seconds=0.1
        ),
        AttemptEnded(rollout_id="a.1", failure=FailureKind.INFRASTRUCTURE, failure_text="gone\n", retried=True),
        Dropped(rollout_id="a.2", reason="over_age"),
        Published(snapshot=snapshot),
    ]
    for record in records:
        found = through_a_file(tmp_path, record)
        assert found == record
        assert type(found) is type(record)


def test_a_failed_attempt_keeps_its_tokens_and_older_logs_are_read(tmp_path: Path) -> None:
    """Would catch tokens of a failed rollout that are promised to people and thrown away, and a log of before."""
    rollout = make_rollout("t", lengths=(3, 5), seed=1, max_version=4)
    record = AttemptEnded(
        rollout_id=rollout.id, failure=FailureKind.INFRASTRUCTURE, failure_text="gone", retried=False, rollout=rollout
    )
    found = through_a_file(tmp_path, record)
    assert isinstance(found, AttemptEnded)
    assert found.rollout is not None
    assert_same_rollout(found.rollout, rollout)
    fields = {"rollout_id": "a@0", "failure": "infrastructure", "failure_text": "gone", "retried": True}
    older = from_frame(Frame(kind="attempt_ended", fields=fields, arrays={}))
    assert older == AttemptEnded(
        rollout_id="a@0", failure=FailureKind.INFRASTRUCTURE, failure_text="gone", retried=True
    )


def test_marks_come_back_and_logs_of_before_have_none(tmp_path: Path) -> None:
    """Would catch marks that the log drops or rounds, and a log without them, whose rollouts all count as damaged."""
    rollout = make_rollout("t", seed=1)
    found = through_a_file(tmp_path, Finished(rollout=rollout, position=0))
    assert isinstance(found, Finished)
    assert found.rollout.marks == {"quality": 1 / 3, "style": -0.0}
    frame = to_frame(Finished(rollout=rollout, position=0))
    fields = {name: value for name, value in frame.fields["rollout"].items() if name != "marks"}
    older = from_frame(Frame(kind="finished", fields={"position": 0, "rollout": fields}, arrays=frame.arrays))
    assert isinstance(older, Finished)
    assert_same_rollout(older.rollout, replace(rollout, marks={}))


def test_a_trained_record_keeps_rollouts_and_sequences_apart(tmp_path: Path) -> None:
    """Would catch tokens that slide into the neighbour's sequence, and a NaN value (no critic) that becomes 0."""

    def tokens(start: int, length: int) -> TokenRecord:
        base = np.arange(start, start + length, dtype=np.float32)
        values = np.full(length, np.nan, dtype=np.float32)
        return TokenRecord(actor_logprobs=-base, values=values, advantages=base + 0.5, returns=base + 0.25)

    record = Trained(
        step=2,
        version=4,
        parent=3,
        rollout_ids=("a", "b", "c"),
        tokens=((tokens(0, 3), tokens(3, 0)), (), (tokens(5, 2),)),
    )
    found = through_a_file(tmp_path, record)
    assert isinstance(found, Trained)
    assert (found.step, found.version, found.parent, found.rollout_ids) == (2, 4, 3, ("a", "b", "c"))
    assert [len(sequences) for sequences in found.tokens] == [2, 0, 1]
    for left, right in zip(found.tokens, record.tokens, strict=True):
        for one, other in zip(left, right, strict=True):
            assert_same_arrays(one, other)


def test_inconsistent_records_are_refused() -> None:
    """Would catch a step whose tokens belong to another batch."""
    empty = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="values has shape"):
        TokenRecord(actor_logprobs=empty, values=empty[:1], advantages=empty, returns=empty)
    with pytest.raises(ValueError, match="trained 1 rollouts"):
        Trained(step=1, version=1, parent=0, rollout_ids=("a",), tokens=((), ()))


def test_a_frame_of_another_kind_is_refused() -> None:
    """Would catch a record of a later version that is taken for one of ours."""
    with pytest.raises(ValueError, match="unknown kind"):
        from_frame(Frame(kind="compacted", fields={}, arrays={}))
