"""What a step cost."""

import pytest

from sao.training.timing import StepTimer, peak_bytes


def test_parts_are_timed_once_each() -> None:
    """Seconds of one step that show again in the next, or that go to the wrong part."""
    times = iter([1.0, 3.0, 3.5, 4.0])
    timer = StepTimer(lambda: next(times))
    with timer.part("actor"):
        pass
    with timer.part("critic"):
        pass
    assert {key: metric.value for key, metric in timer.take().items()} == {"time/actor": 2.0, "time/critic": 0.5}
    assert timer.take() == {}


@pytest.mark.parametrize(("platform", "expected"), [("linux", 2048), ("darwin", 2)])
def test_peak_memory_in_the_units_of_the_system(platform: str, expected: int) -> None:
    """Peak memory a thousand times too large on macOS."""
    assert peak_bytes(2, platform) == expected
