"""Metrics are values with a reduction; keys are `stage/name`, and `docs/metrics.md` lists each."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Reduction(StrEnum):
    """How several values of one metric become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, how to merge it with others of its key, and its weight in a mean."""

    value: float
    reduction: Reduction = Reduction.LAST
    weight: float = 1.0


Metrics = Mapping[str, Metric]


def mean(value: float, weight: float = 1.0) -> Metric:
    """A metric that merges by weighted mean."""
    return Metric(float(value), Reduction.MEAN, float(weight))


def total(value: float) -> Metric:
    """A metric that merges by sum."""
    return Metric(float(value), Reduction.SUM)


def largest(value: float) -> Metric:
    """A metric that merges by maximum."""
    return Metric(float(value), Reduction.MAX)


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
    match first.reduction:
        case Reduction.MEAN:
            weight = first.weight + second.weight
            value = (first.value * first.weight + second.value * second.weight) / weight if weight else math.nan
            return Metric(value, Reduction.MEAN, weight)
        case Reduction.SUM:
            return Metric(first.value + second.value, Reduction.SUM)
        case Reduction.MAX:
            return first if first.value >= second.value else second
        case Reduction.MIN:
            return first if first.value <= second.value else second
        case Reduction.LAST:
            return second
