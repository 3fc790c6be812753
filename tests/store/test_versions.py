"""Age is counted along the tree of versions."""

import pytest

from sao.store.versions import VersionTree

TREE = VersionTree({0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4})
"""0-1-2-3, and after a crash 1-4-5."""


@pytest.mark.parametrize(
    ("sampled", "current", "age"), [(5, 5, 0), (4, 5, 1), (0, 5, 3), (2, 5, 3), (3, 5, 4), (3, 4, 3)]
)
def test_age_counts_up_to_the_common_ancestor_and_down(sampled: int, current: int, age: int) -> None:
    """Would catch an age taken as the difference of two version numbers."""
    assert TREE.distance(sampled, current) == age
    assert TREE.distance(current, sampled) == age


def test_ancestors() -> None:
    """Would catch a dead branch that counts as history."""
    assert [version for version in range(6) if TREE.is_ancestor(version, 5)] == [0, 1, 4, 5]
    assert TREE.highest == 5
    assert VersionTree().highest == -1


def test_a_number_is_never_used_twice() -> None:
    """Would catch a resume that goes on at a number that tokens of a dead branch carry."""
    tree = VersionTree({0: None, 1: 0})
    tree.add(1, 0)
    with pytest.raises(ValueError, match="never used twice"):
        tree.add(1, None)
    with pytest.raises(ValueError, match="numbers only grow"):
        tree.add(2, 2)
    with pytest.raises(ValueError, match="no common ancestor"):
        tree.distance(7, 1)
