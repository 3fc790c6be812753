"""Which pieces of prompts the local engine computes in one forward."""

from hypothesis import given
from hypothesis import strategies as st

from sao.engines.decoder import _LARGE_FILL, _SMALL_FILL, _Fill, _Seat, _similar


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_groups_hold_every_piece_once_and_keep_to_their_sizes(sizes: list[int]) -> None:
    """Catches a piece that is lost or filled twice, a forward that no cache holds, and one that is mostly padding."""
    fills = [_Fill(_Seat(str(row), row), row, row + size) for row, size in enumerate(sizes)]
    groups = _similar(fills)
    assert sorted(fill.seat.row for group in groups for fill in group) == list(range(len(sizes)))
    for group in groups:
        found = [fill.end - fill.start for fill in group]
        padded = len(found) * max(found)
        assert len(found) == 1 or padded <= _LARGE_FILL
        assert padded <= max(2 * sum(found), _SMALL_FILL)
    lonely = [group[0].end - group[0].start for group in groups if len(group) == 1]
    assert all(2 * size > _SMALL_FILL for size in lonely[:-1])
