"""Files that survive a crash: durable writes, checksums, lines of JSON."""

import errno
import gzip
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

FREE_SPACE = "What was committed before is safe; free space on that disk"
"""What to do about a disk that is full."""

_CHUNK = 4 * 1024 * 1024


def is_full(error: OSError) -> bool:
    """Whether the disk, or what one may use of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def describe_error(error: BaseException) -> str:
    """What an error says. The system's name file and cause apart, and do not say what to do."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{where}" + (f". {FREE_SPACE}" if is_full(error) else "")


def sync_file(path: Path) -> None:
    """Return once the file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return once the folder's entries (new names, renames) are on the disk."""
    sync_file(path)


def checksum(path: Path) -> str:
    """CRC32C of a file, as "crc32c:" and eight hexadecimal digits."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = google_crc32c.extend(crc, chunk)
    return f"crc32c:{crc:08x}"


def write_durably(path: Path, text: str) -> None:
    """Write or replace a file so that a crash leaves the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync_file(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def plain(value: Any) -> Any:
    """The value as JSON says it, at any depth: plain numbers for numpy's, lists for tuples, text keys."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def finite(value: Any) -> Any:
    """As `plain`, with None for numbers that JSON cannot say: NaN and infinities."""
    value = plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


class JsonLinesWriter:
    """Appends one JSON object a line, visible to readers at once; NaN and infinities are written as null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        if self._file.tell() and not _ends_with_newline(path):
            # A crash left part of a line; what follows must not be glued to it.
            self._file.write(b"\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises OSError when the disk is full, TypeError for what JSON cannot say."""
        self._file.write(json.dumps(finite(row), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Sync and close. Safe to call twice."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """What a file of JSON lines holds."""

    rows: list[dict[str, Any]]
    """Every JSON object, in the order of the file."""
    broken: int
    """Lines that are no JSON object: torn by a crash, or damaged."""


def read_json_lines(path: Path) -> JsonLines:
    """Every row that can be read; a missing file has none. A name that ends in .gz is of a compressed file."""
    rows: list[dict[str, Any]] = []
    broken = 0
    if not path.exists():
        return JsonLines(rows=rows, broken=0)
    data = path.read_bytes()
    for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            broken += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    return JsonLines(rows=rows, broken=broken)
