"""The processes of a Ray cluster, by what lives in them."""

from pathlib import Path

MARKS = {
    "engine": "sao.engines.serve",
    "engine actor": "ray::_EngineHost",
    "rank": "ray::_Rank",
    "worker": "ray::_PlayerHost",
    "raylet": "raylet/raylet",
    "vllm": "vllm.entrypoints.cli.main serve",
}
"""What the command line of each kind holds."""


def below(*roots: int) -> dict[int, str]:
    """Command lines of all processes that descend from these."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            lines[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
        if stat[0] not in "ZX":
            parents[int(entry.name)] = int(stat[1])
    found, fresh = dict[int, str](), set(roots)
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh and pid not in found}
        found |= {pid: lines[pid] for pid in fresh}
    return found


def of_kind(kind: str, *roots: int) -> list[int]:
    """Process ids of a kind below these, oldest first."""
    return sorted(pid for pid, line in below(*roots).items() if MARKS[kind] in line)
