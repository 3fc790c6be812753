"""What the terminal shows."""

import io

from rich.console import Console

from sao.observe.metrics import last
from sao.progress import ConsoleReporter


def test_masked_tokens_of_both_sides_are_shown() -> None:
    """Would catch tokens masked because the ratio is too high hidden behind a healthy low side."""
    shown = io.StringIO()
    reporter = ConsoleReporter(1, Console(file=shown, width=200))
    metrics = {"actor/masked_low_share": last(0.01), "actor/masked_high_share": last(0.03)}
    reporter.row(1, 1, "train", metrics)
    reporter.row(1, 1, "train", {"rollout/reward": last(0.5)})
    first, second = shown.getvalue().splitlines()
    assert "masked 4.00%" in first
    assert "masked" not in second
