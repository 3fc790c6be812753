"""Nested tables as TOML, which the standard library only reads."""

import json
from collections.abc import Iterator
from typing import Any


def toml_lines(table: dict[str, Any], prefix: str) -> Iterator[str]:
    """Lines of a table and its sections, those below `prefix` ("a.b."); `tomllib` reads them back the same."""
    sections = {key: value for key, value in table.items() if _is_section(value)}
    for key, value in table.items():
        if key not in sections:
            yield f"{key} = {toml_value(value)}"
    for key, value in sections.items():
        for entry in value if isinstance(value, (list, tuple)) else (value,):
            yield ""
            yield f"[[{prefix}{key}]]" if isinstance(value, (list, tuple)) else f"[{prefix}{key}]"
            yield from toml_lines(entry, f"{prefix}{key}.")


def toml_value(value: Any) -> str:
    """One value; "none" stands for None."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if value is None:
        return '"none"'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one that TOML refuses
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], dict))
