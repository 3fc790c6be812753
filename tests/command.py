"""The command `sao` within this process: what its entry point prints, and its exit code."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from small_runs import small_config

from sao.cli import main
from sao.config import to_toml


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


def sao(*words: object) -> Result:
    """Run `sao WORDS`."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["sao", *map(str, words)]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def refused(*words: object) -> str:
    """What `sao WORDS` says when it refuses them: exit code 2, one message, no trace."""
    result = sao(*words)
    assert result.code == 2, result
    assert "Traceback" not in result.err + result.out
    return result.err + result.out


def small_toml(folder: Path, *overrides: str, name: str = "config.toml") -> Path:
    """The smallest configuration as a file."""
    path = folder / name
    path.write_text(to_toml(small_config(*overrides)))
    return path
