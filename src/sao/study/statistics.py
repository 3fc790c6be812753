"""Statistics over seeds: pure functions of numbers.

A claim is about paired differences, one per seed. Each claim is decided by one two-sided t-interval of its mean, at the
level at which Holm's step-down tests it, so that the interval shown and the verdict cannot disagree:

    greater      holds: the interval lies above the margin          does not hold: it lies below
    less         holds: it lies below minus the margin              does not hold: it lies above
    equivalent   holds: it lies within +- margin (TOST, stricter)   does not hold: it lies outside

The p-value of a claim is the smallest level whose interval decides it, either way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr

from sao.evaluate import Interval, paired_t_interval
from sao.study.claims import Kind

Verdict = Literal["holds", "does not hold", "undecided"]

ALPHA = 0.05
"""Chance, at most, of any wrong verdict among the claims of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was found about one claim."""

    verdict: Verdict
    """By the interval alone."""
    interval: Interval
    """Of the mean difference, two-sided."""
    confidence: float
    """Coverage of the interval: 1 minus the level at which Holm tests the claim."""
    p_value: float
    """Before the correction: the smallest level that decides the claim."""
    adjusted_p: float
    """After it: the smallest error rate over all claims with which the claim is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolmStep:
    """What Holm's step-down says of one hypothesis."""

    level: float
    """Level at which it is tested; once one is not rejected, all later ones keep that one's."""
    adjusted_p: float
    """Smallest alpha that rejects it."""
    rejected: bool
    """Whether alpha rejects it."""


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[HolmStep]:
    """Holm's correction (1979), in the order given. Raises ValueError for a p-value outside [0, 1]."""
    bad = [p for p in p_values if not 0 <= p <= 1]
    if bad:
        raise ValueError(f"{bad[0]} is no p-value; it must lie in [0, 1]")
    steps: dict[int, HolmStep] = {}
    level, adjusted, rejecting = 0.0, 0.0, True
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        left = len(p_values) - rank
        adjusted = min(1.0, max(adjusted, left * p_values[index]))
        if rejecting:
            level = alpha / left
            rejecting = p_values[index] <= level
        steps[index] = HolmStep(level=level, adjusted_p=adjusted, rejected=rejecting)
    return [steps[index] for index in range(len(p_values))]


def one_sided(differences: Sequence[float], margin: float) -> tuple[float, float]:
    """p-values against "the mean is not above the margin" and "it is not below": Student's, n - 1 degrees of freedom.

    Raises ValueError for fewer than two differences, or one that is not finite.
    """
    interval = paired_t_interval(differences)
    deviation = float(np.asarray(differences, dtype=np.float64).std(ddof=1))
    distance = interval.mean - margin
    if deviation == 0:
        return (0.0, 1.0) if distance > 0 else (1.0, 0.0) if distance < 0 else (1.0, 1.0)
    t = distance / (deviation / math.sqrt(interval.count))
    below = float(stdtr(interval.count - 1, t))
    return float(stdtr(interval.count - 1, -t)), below


def decision_p(differences: Sequence[float], kind: Kind, margin: float) -> float:
    """The smallest level whose two-sided interval decides the claim. Raises ValueError as `one_sided`."""
    above, below = one_sided(differences, -margin if kind == "less" else margin)
    if kind != "equivalent":
        return min(1.0, 2 * min(above, below))
    above_low, below_low = one_sided(differences, -margin)
    inside, outside = max(above_low, below), min(above, below_low)
    return min(1.0, 2 * min(inside, outside))


def verdict_of(interval: Interval, kind: Kind, margin: float) -> Verdict:
    """What an interval says of a claim."""
    if kind == "greater":
        return "holds" if interval.low > margin else "does not hold" if interval.high < margin else "undecided"
    if kind == "less":
        return "holds" if interval.high < -margin else "does not hold" if interval.low > -margin else "undecided"
    if -margin < interval.low and interval.high < margin:
        return "holds"
    return "does not hold" if interval.low > margin or interval.high < -margin else "undecided"


def decide(claims: Sequence[tuple[Sequence[float] | None, Kind, float]], alpha: float = ALPHA) -> list[Decision | None]:
    """A decision per claim (differences, kind, margin), corrected over all of them.

    A claim without differences, because a run of it failed, stays undecided as None and still counts in the correction.
    """
    p_values = [1.0 if found is None else decision_p(found, kind, margin) for found, kind, margin in claims]
    decisions: list[Decision | None] = []
    for (found, kind, margin), p_value, step in zip(claims, p_values, holm(p_values, alpha), strict=True):
        if found is None:
            decisions.append(None)
            continue
        interval = paired_t_interval(found, 1 - step.level)
        decisions.append(
            Decision(
                verdict=verdict_of(interval, kind, margin),
                interval=interval,
                confidence=1 - step.level,
                p_value=p_value,
                adjusted_p=step.adjusted_p,
            )
        )
    return decisions
