"""The tree of policy versions, and the age of a token in it."""

import numpy as np

from sao.types import FloatArray, IntArray


class VersionTree:
    """Versions with their parents. A run that never resumed is a chain; each resume starts a branch."""

    def __init__(self) -> None:
        self._parent: dict[int, int | None] = {}
        self._depth: dict[int, int] = {}

    def add(self, version: int, parent: int | None) -> None:
        """Record that `version` was trained from `parent`. Adding the same edge again changes nothing."""
        if version in self._parent:
            if self._parent[version] != parent:
                raise ValueError(
                    f"version {version} has parent {self._parent[version]}, and cannot be published again from {parent}"
                )
            return
        if parent is not None and parent not in self._parent:
            raise ValueError(f"version {version} names the unknown parent {parent}")
        self._parent[version] = parent
        self._depth[version] = 0 if parent is None else self._depth[parent] + 1

    @property
    def highest(self) -> int:
        """The highest number ever used; -1 when there is none."""
        return max(self._parent, default=-1)

    def distance(self, first: int, second: int) -> int:
        """Actor updates on the path: up from `first` to the common ancestor, and down to `second`."""
        steps = 0
        while first != second:
            if self._depth_of(first) >= self._depth_of(second):
                first = self._up(first)
            else:
                second = self._up(second)
            steps += 1
        return steps

    def ages(self, versions: IntArray, current: int) -> FloatArray:
        """Age of each token (N,), given the version that sampled it, when `current` computes the loss."""
        unique, inverse = np.unique(versions, return_inverse=True)
        ages = np.array([self.distance(int(version), current) for version in unique], dtype=np.float32)
        return ages[inverse] if len(unique) else np.zeros(0, dtype=np.float32)

    def _depth_of(self, version: int) -> int:
        if version not in self._depth:
            raise ValueError(f"version {version} was never published; known versions end at {self.highest}")
        return self._depth[version]

    def _up(self, version: int) -> int:
        parent = self._parent[version]
        if parent is None:
            raise ValueError(f"version {version} has no ancestor in common with the other version")
        return parent
