"""What every benchmark prints: a ratio or a figure, the limit beside it, and whether it holds."""

from typing import Literal


def verdict(name: str, value: float, limit: float, *, want: Literal["at least", "at most"], unit: str = "") -> None:
    """Print one line. A noisy machine fails a limit without failing the command."""
    holds = value >= limit if want == "at least" else value <= limit
    print(f"{name}: {value:.3g}{unit} ({want} {limit:g}{unit}) {'HOLDS' if holds else 'FAILS'}", flush=True)
