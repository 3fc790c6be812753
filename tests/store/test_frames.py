"""The bytes of the log: what is written is read, and damage costs only the frames it hits."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.store.frames import MAGIC, Frame, FrameReader, SegmentWriter, encode, segments


def frame(number: int, size: int = 5) -> Frame:
    arrays = {"numbers": np.arange(size, dtype=np.int32) + number, "mask": np.arange(size) % 2 == 0}
    return Frame(kind="test", fields={"number": number}, arrays=arrays)


def write(folder: Path, frames: list[Frame], segment_bytes: int = 10**6) -> None:
    writer = SegmentWriter(folder, segment_bytes=segment_bytes)
    for item in frames:
        writer.write(encode(item))
    writer.close()


def numbers(reader: FrameReader) -> list[int]:
    found = []
    for item in reader:
        number = item.fields["number"]
        np.testing.assert_array_equal(item.arrays["numbers"], np.arange(len(item.arrays["mask"])) + number)
        found.append(number)
    return found


def test_arrays_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Would catch a lost dtype, byte order, shape or NaN payload, and views that nobody may write to."""
    arrays = {
        "float": np.array([1.5, np.nan, -0.0, np.inf, 1e-45], dtype=np.float32),
        "bool": np.array([True, False, True]),
        "int": np.array([[1, -(2**31)], [2**31 - 1, 0]], dtype=np.int32),
        "big_endian": np.array([1, 2, 3], dtype=">i8"),
        "empty": np.zeros((0, 3), dtype=np.float64),
        "strided": np.arange(10, dtype=np.int16)[::3],
    }
    write(tmp_path, [Frame(kind="k", fields={"text": "ö\ud800\n", "seed": 2**64 - 1, "third": 1 / 3}, arrays=arrays)])
    (found,) = list(FrameReader(tmp_path))
    assert found.kind == "k"
    assert found.fields == {"text": "ö\ud800\n", "seed": 2**64 - 1, "third": 1 / 3}
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].shape == array.shape
        assert found.arrays[name].astype(array.dtype).tobytes() == array.tobytes()
        assert found.arrays[name].flags.writeable
        assert found.arrays[name].flags.aligned


def test_objects_are_refused() -> None:
    """Would catch pickling by the back door."""
    with pytest.raises(ValueError, match="object"):
        encode(Frame(kind="k", fields={}, arrays={"bad": np.array([{}])}))
    with pytest.raises(TypeError, match="cannot stand"):
        encode(Frame(kind="k", fields={"bad": object()}, arrays={}))


@settings(max_examples=50, deadline=None)
@given(flip=st.integers(0, 10**6), bit=st.integers(0, 7), count=st.integers(2, 6))
def test_a_flipped_bit_costs_one_frame(
    tmp_path_factory: pytest.TempPathFactory, flip: int, bit: int, count: int
) -> None:
    """Would catch a reader that stops, raises, or loses intact neighbours of a damaged frame."""
    folder = tmp_path_factory.mktemp("log")
    write(folder, [frame(number) for number in range(count)])
    (segment,) = segments(folder)
    data = bytearray(segment.read_bytes())
    flip %= len(data)
    data[flip] ^= 1 << bit
    segment.write_bytes(bytes(data))
    hit = flip // (len(data) // count)
    reader = FrameReader(folder)
    assert numbers(reader) == [number for number in range(count) if number != hit]
    assert reader.bad + reader.torn == 1


@settings(max_examples=50, deadline=None)
@given(cut=st.integers(0, 10**6))
def test_a_torn_tail_is_counted_and_the_next_segment_is_read(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    """Would catch a writer that appends to a torn segment, or a reader that loses what follows one."""
    folder = tmp_path_factory.mktemp("log")
    write(folder, [frame(number) for number in range(3)])
    (segment,) = segments(folder)
    size = segment.stat().st_size
    cut %= size + 1
    segment.write_bytes(segment.read_bytes()[:cut])
    write(folder, [frame(9)])
    whole = cut // (size // 3)
    reader = FrameReader(folder)
    assert numbers(reader) == [*range(whole), 9]
    assert (reader.bad, reader.torn) == (0, 0 if cut % (size // 3) == 0 else 1)
    assert len(segments(folder)) == 2


@pytest.mark.parametrize(
    "garbage", [b"", b"garbage", MAGIC[:5], MAGIC + b"\xff" * 40], ids=["none", "text", "part", "length"]
)
def test_following_a_growing_log_gives_every_frame_once(tmp_path: Path, garbage: bytes) -> None:
    """Would catch a live view that counts a frame under way as torn, reads one twice, or waits on a damaged length."""
    reader = FrameReader(tmp_path, follow=True)
    assert numbers(reader) == []
    data = encode(frame(0)) + garbage + encode(frame(1)) + encode(frame(2))
    path = tmp_path / "000001.seg"
    found = []
    for size in range(0, len(data) + 1, 3):
        path.write_bytes(data[:size])
        found += numbers(reader)
    path.write_bytes(data)
    found += numbers(reader)
    assert found == [0, 1, 2]
    assert (reader.bad, reader.torn) == (1 if garbage else 0, 0)


def test_following_over_segments_counts_a_tail_once_it_is_final(tmp_path: Path) -> None:
    """Would catch a follower that stays for ever at the torn tail of a writer that died."""
    write(tmp_path, [frame(0)])
    (first,) = segments(tmp_path)
    first.write_bytes(first.read_bytes() + encode(frame(1))[:30])
    reader = FrameReader(tmp_path, follow=True)
    assert numbers(reader) == [0]
    assert reader.torn == 0
    write(tmp_path, [frame(2)])
    assert numbers(reader) == [2]
    assert reader.torn == 1
    assert numbers(reader) == []


def test_segments_rotate_by_size(tmp_path: Path) -> None:
    """Would catch one endless file, and an order by name that breaks at the tenth segment."""
    write(tmp_path, [frame(number, size=300) for number in range(25)], segment_bytes=1000)
    assert len(segments(tmp_path)) > 10
    assert numbers(FrameReader(tmp_path)) == list(range(25))


def test_files_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    """Would catch a reader that stumbles over an editor's backup file, or over an empty segment."""
    (tmp_path / "notes.seg").write_bytes(b"x")
    (tmp_path / "000001.seg").write_bytes(b"")
    write(tmp_path, [frame(1)])
    assert [path.name for path in segments(tmp_path)] == ["000001.seg", "000002.seg"]
    assert numbers(FrameReader(tmp_path)) == [1]
