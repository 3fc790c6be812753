"""Framed records in append-only segment files: the bytes of the durable log.

A frame is: magic (8 bytes), header length (u32), body length (u64), CRC32C of lengths, header and body (u32), a JSON
header, a body of zstandard-compressed raw arrays. All integers are little-endian. The magic holds a byte that neither
JSON nor ASCII has, so that a reader that lost its place finds the next frame. Nothing is pickled.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zstandard
from numpy.typing import NDArray

from sao.store.files import sync_folder

Array = NDArray[Any]

MAGIC = b"\x89SAO\r\n\x1a\n"
SEGMENT_BYTES = 64 * 1024 * 1024
SEGMENT_SUFFIX = ".seg"
_PREFIX = struct.Struct("<8sIQI")
_LENGTHS = struct.Struct("<IQ")


class PackedArrays(Mapping[str, Array]):
    """Named arrays, decompressed at the first look. Raises ValueError where the bytes do not fit the description."""

    def __init__(self, descriptions: list[list[Any]], packed: bytes) -> None:
        self._descriptions = descriptions
        self._packed = packed
        self._arrays: dict[str, Array] | None = None

    def _unpacked(self) -> dict[str, Array]:
        if self._arrays is None:
            self._arrays = _unpack(self._descriptions, self._packed)
        return self._arrays

    def __getitem__(self, name: str) -> Array:
        return self._unpacked()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unpacked())

    def __len__(self) -> int:
        return len(self._descriptions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One record as it is stored."""

    kind: str
    """Says which record it is, and so how to read the rest."""
    fields: Mapping[str, Any]
    """What JSON can say."""
    arrays: Mapping[str, Array]
    """Everything per token."""


def encode(frame: Frame) -> bytes:
    """The frame's bytes. Raises ValueError for object arrays, TypeError for fields that JSON cannot say."""
    descriptions: list[list[Any]] = []
    chunks: list[bytes] = []
    for name, array in frame.arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"array {name} has dtype {array.dtype}; only plain numbers are stored")
        raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        descriptions.append([name, array.dtype.newbyteorder("<").str, list(array.shape)])
        chunks.append(raw)
    loaded = {"kind": frame.kind, "fields": dict(frame.fields), "arrays": descriptions}
    header = json.dumps(loaded, separators=(",", ":"), default=_plain_number).encode("ascii")
    body = zstandard.ZstdCompressor(level=1).compress(b"".join(chunks)) if chunks else b""
    crc = _checksum(_LENGTHS.pack(len(header), len(body)), header, body)
    return _PREFIX.pack(MAGIC, len(header), len(body), crc) + header + body


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot stand in a frame's header")


def _checksum(*parts: bytes | memoryview) -> int:
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, bytes(part))
    return crc


def _unpack(descriptions: list[list[Any]], packed: bytes) -> dict[str, Array]:
    sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for _, dtype, shape in descriptions]
    try:
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=sum(sizes) + 1) if packed else b""
    except zstandard.ZstdError as error:
        raise ValueError(f"arrays of a frame cannot be decompressed: {error}") from error
    if len(raw) != sum(sizes):
        raise ValueError(f"arrays of a frame hold {len(raw)} bytes, but their description says {sum(sizes)}")
    arrays: dict[str, Array] = {}
    start = 0
    for (name, dtype, shape), size in zip(descriptions, sizes, strict=True):
        # A copy, because the views would be read-only, and unaligned after an array of bools.
        arrays[name] = np.frombuffer(raw[start : start + size], dtype=dtype).reshape(shape).copy()
        start += size
    return arrays


class _Short:
    """The bytes end before the frame does."""


class _Bad:
    """These bytes are not a frame."""


def _parse(data: bytes, start: int) -> tuple[Frame, int] | type[_Short] | type[_Bad]:
    """The frame at `start` and where it ends."""
    magic = data[start : start + len(MAGIC)]
    if magic != MAGIC:
        return _Short if len(magic) < len(MAGIC) and MAGIC.startswith(magic) else _Bad
    if start + _PREFIX.size > len(data):
        return _Short
    _, header_size, body_size, crc = _PREFIX.unpack_from(data, start)
    header_start = start + _PREFIX.size
    body_start = header_start + header_size
    end = body_start + body_size
    if end > len(data):
        return _Short
    header, body = data[header_start:body_start], data[body_start:end]
    if _checksum(_LENGTHS.pack(header_size, body_size), header, body) != crc:
        return _Bad
    try:
        loaded = json.loads(header)
        frame = Frame(kind=loaded["kind"], fields=loaded["fields"], arrays=PackedArrays(loaded["arrays"], body))
    except (ValueError, KeyError, TypeError):
        return _Bad
    return frame, end


def segments(folder: Path) -> list[Path]:
    """Segment files of a log, oldest first."""
    return sorted(path for path in folder.glob(f"*{SEGMENT_SUFFIX}") if path.stem.isdigit())


class FrameReader:
    """Iterates the frames of a log, opened read-only; damage is skipped and counted, never raised.

    Iterating again goes on where the last pass ended. With `follow`, an unfinished frame at the end of the newest
    segment is taken as being written, and read by a later pass; without, it is a torn tail and is counted.
    """

    def __init__(self, folder: Path, *, follow: bool = False) -> None:
        self.bad = 0
        """Damaged frames that were skipped."""
        self.torn = 0
        """Segments that end within a frame: a writer died, or the disk was full."""
        self._folder = folder
        self._follow = follow
        self._segment: Path | None = None
        self._offset = 0
        self._lost = False

    def __iter__(self) -> Iterator[Frame]:
        while True:
            # Listed before reading: a segment that has a successor now will not grow any more.
            names = segments(self._folder)
            if self._segment is None:
                if not names:
                    return
                self._segment = names[0]
            later = [name for name in names if name > self._segment]
            yield from self._scan(self._segment, closed=bool(later) or not self._follow)
            if not later:
                return
            self._segment, self._offset, self._lost = later[0], 0, False

    def _scan(self, segment: Path, *, closed: bool) -> Iterator[Frame]:
        with segment.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        base, position = self._offset, 0
        while position < len(data):
            if self._lost:
                position = self._search(data, position, closed)
                self._offset = base + position
                if self._lost:
                    return
                continue
            parsed = _parse(data, position)
            if isinstance(parsed, tuple):
                frame, position = parsed
                self._offset = base + position
                yield frame
                continue
            if parsed is _Short and data.find(MAGIC, position + 1) < 0:
                if not closed:
                    return
                self.torn += 1
                position = len(data)
            else:
                self.bad += 1
                self._lost = True
                position += 1
            self._offset = base + position

    def _search(self, data: bytes, position: int, closed: bool) -> int:
        """Where the next magic is; still lost, before what may be the beginning of one, when there is none."""
        found = data.find(MAGIC, position)
        self._lost = found < 0 and not closed
        if found >= 0:
            return found
        return len(data) if closed else max(position, len(data) - len(MAGIC) + 1)


class SegmentWriter:
    """Appends frames to a segment of its own, never to one that exists. Not thread-safe."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._descriptor: int | None = None
        self._written = 0

    def write(self, data: bytes) -> None:
        """Append the bytes of one or more frames. Raises OSError; the segment then may end within a frame."""
        if self._descriptor is not None and self._written >= self._segment_bytes:
            self.close()
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        view = memoryview(data)
        while view:
            count = os.write(self._descriptor, view)
            view = view[count:]
            self._written += count

    def sync(self) -> None:
        """Return once everything written is on the disk. Raises OSError."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close. Raises OSError. Safe to call twice."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _open(self) -> None:
        existing = segments(self._folder)
        number = int(existing[-1].stem) + 1 if existing else 1
        path = self._folder / f"{number:06d}{SEGMENT_SUFFIX}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._written = 0
        sync_folder(self._folder)
