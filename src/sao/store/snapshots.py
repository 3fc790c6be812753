"""Whether the weight files of a snapshot are what was published: for whoever wrote them and whoever reads them."""

from pathlib import Path

import google_crc32c
from safetensors import SafetensorError, safe_open

from sao.store.files import checksum
from sao.types import Snapshot


def file_checksum(path: Path) -> str:
    """CRC32C of a file, as `crc32c:` and eight hexadecimal digits. Raises ValueError if it cannot be read."""
    try:
        return checksum(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); the folder is not whole") from error


def folder_checksum(folder: Path) -> str:
    """Checksum of all weight files of a folder: the file's own where there is one, else of the names and checksums.

    Raises ValueError naming the folder that holds none, or the file that cannot be read.
    """
    files = _weight_files(folder)
    if len(files) == 1:
        return file_checksum(files[0])
    listing = "".join(f"{file.name} {file_checksum(file)}\n" for file in files)
    return f"crc32c:{google_crc32c.value(listing.encode()):08x}"


def check_snapshot(snapshot: Snapshot) -> int:
    """Bytes of a snapshot's weights, all of which are read; call it in a thread, before any weights change.

    Raises ValueError naming the folder or file that is missing, cut short, damaged or not what was published.
    """
    folder = Path(snapshot.location)
    advice = "publish the version again"
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"there is no model folder {str(folder)!r}, with a config.json: it is half written, or was deleted"
        )
    files = _weight_files(folder)
    for file in files:
        try:
            # Opening compares the header's sizes with the file's: it tells which file of several is cut.
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is cut short or damaged ({error}); {advice}") from error
    found = folder_checksum(folder)
    if found != snapshot.checksum:
        what = str(files[0]) if len(files) == 1 else f"one of the {len(files)} files {folder}/*.safetensors"
        raise ValueError(
            f"{what} was damaged or replaced after version {snapshot.version} was published: the checksum is {found}, "
            f"not {snapshot.checksum!r}; {advice}"
        )
    return sum(file.stat().st_size for file in files)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file; the folder is not whole, or is no model folder")
    return files
