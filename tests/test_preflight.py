"""What a run will need, before it starts."""

from sao.preflight import LOG_BYTES, run_folder_bytes


def test_disk_space_counts_the_plain_copy_of_a_sharded_actor() -> None:
    """Catches a run of several ranks that fills the disk which `sao check` found large enough."""
    # Actor, critic and two moments of each, three times; the actor alone, four times.
    assert run_folder_bytes(1000, sharded=False) == LOG_BYTES + 3 * 24_000 + 4 * 4_000
    # And the actor once more in each checkpoint.
    assert run_folder_bytes(1000, sharded=True) == LOG_BYTES + 3 * 28_000 + 4 * 4_000
