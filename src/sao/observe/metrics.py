"""Metrics are values with a reduction; keys are `stage/name`, and `docs/metrics.md` lists each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Reduction(StrEnum):
    """How several values of one metric become one."""

    SUM = "sum"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, and how to merge it with others of its key."""

    value: float
    """NaN where it is not known."""
    reduction: Reduction
    """What merging does with several values of the key."""


Metrics = Mapping[str, Metric]


def total(value: float) -> Metric:
    """A metric that merges by sum."""
    return Metric(float(value), Reduction.SUM)


def last(value: float) -> Metric:
    """A metric of which the newest value counts."""
    return Metric(float(value), Reduction.LAST)


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge metrics of several sources, in order. Values that are not finite are kept, so that they show."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = _merge_two(key, merged[key], metric) if key in merged else metric
    return merged


def _merge_two(key: str, first: Metric, second: Metric) -> Metric:
    if first.reduction is not second.reduction:
        raise ValueError(f"metric {key} is merged by {first.reduction} and by {second.reduction}")
    return total(first.value + second.value) if first.reduction is Reduction.SUM else second
