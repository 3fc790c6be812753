"""The tree of published policy versions. A number is never used twice in a run folder; a resume branches."""

from collections.abc import Mapping


class VersionTree:
    """Parents of versions; a child is always a higher number than its parent."""

    def __init__(self, parents: Mapping[int, int | None] | None = None) -> None:
        self._parents: dict[int, int | None] = {}
        for version, parent in sorted((parents or {}).items()):
            self.add(version, parent)

    @property
    def parents(self) -> Mapping[int, int | None]:
        """Parent of every version; None at a root."""
        return self._parents

    @property
    def highest(self) -> int:
        """The highest number used; -1 when there is none. The next version is higher than this."""
        return max(self._parents, default=-1)

    def add(self, version: int, parent: int | None) -> None:
        """Enter a version; entering it again with the same parent changes nothing. Raises ValueError otherwise."""
        if version < 0 or (parent is not None and parent >= version):
            raise ValueError(f"version {version} cannot have parent {parent}: numbers only grow, from 0")
        if version in self._parents and self._parents[version] != parent:
            raise ValueError(
                f"version {version} was published with parent {self._parents[version]}, and now with {parent}; "
                "a version number is never used twice"
            )
        self._parents[version] = parent

    def is_ancestor(self, ancestor: int, version: int) -> bool:
        """Whether `version` is `ancestor`, or was trained from it."""
        current: int | None = version
        while current is not None and current > ancestor:
            current = self._parents.get(current)
        return current == ancestor

    def distance(self, sampled: int, current: int) -> int:
        """Actor updates on the path between two versions: up to the common ancestor, and down. The age of a token.

        Raises ValueError for a version that was not published, or without a common ancestor.
        """
        steps, first, second = 0, sampled, current
        while first != second:
            higher = max(first, second)
            parent = self._parents.get(higher)
            if parent is None:
                raise ValueError(f"versions {sampled} and {current} have no common ancestor in the version tree")
            first, second = (parent, second) if first == higher else (first, parent)
            steps += 1
        return steps
