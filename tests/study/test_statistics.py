"""Statistics over seeds: numbers worked by hand, and what must hold whatever the numbers."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.evaluate import Interval, paired_t_interval
from sao.study.statistics import decide, decision_p, holm, one_sided, verdict_of

HAND = [0.1, 0.2, 0.3]
"""Mean 0.2, deviation 0.1, so t = 0.2 / (0.1 / sqrt 3) = 3.4641 with 2 degrees of freedom. There the distribution is
known in closed form: P(T <= t) = 1/2 + t / (2 sqrt(2 + t^2)), which is 0.96291."""
ONE_SIDED = 0.5 - math.sqrt(12) / (2 * math.sqrt(14))


def test_p_values_by_hand() -> None:
    """Catches a wrong tail, n for n - 1 degrees of freedom, and a margin that is added where it is to be taken off."""
    above, below = one_sided(HAND, 0.0)
    assert above == pytest.approx(ONE_SIDED)
    assert below == pytest.approx(1 - ONE_SIDED)
    assert decision_p(HAND, "greater", 0.0) == pytest.approx(2 * ONE_SIDED)
    assert one_sided(HAND, 0.2) == pytest.approx((0.5, 0.5))
    assert one_sided(HAND, 0.4) == pytest.approx((1 - ONE_SIDED, ONE_SIDED))


def test_tost_by_hand() -> None:
    """Catches an equivalence that takes the easier of its two tests."""
    centred = [-0.1, 0.0, 0.1]
    assert decision_p(centred, "equivalent", 0.2) == pytest.approx(2 * ONE_SIDED)
    assert decision_p(HAND, "equivalent", 0.4) == pytest.approx(2 * ONE_SIDED)  # the side at +0.4 is the harder one
    far = [10.1, 10.2, 10.3]
    assert decision_p(far, "equivalent", 0.4) == decision_p(far, "greater", 0.4)


def test_differences_without_spread() -> None:
    """Catches a division by zero where all seeds agree, and a claim decided by a difference that is the margin."""
    assert one_sided([0.5, 0.5], 0.0) == (0.0, 1.0)
    assert one_sided([0.5, 0.5], 0.75) == (1.0, 0.0)
    assert one_sided([0.5, 0.5], 0.5) == (1.0, 1.0)
    assert decision_p([0.5, 0.5], "greater", 0.5) == 1.0


def test_holm_by_hand() -> None:
    """Catches Bonferroni in its place, an order that is not put back, and a rejection after one that failed."""
    steps = holm([0.03, 0.005, 0.04, 0.01])
    assert [step.adjusted_p for step in steps] == pytest.approx([0.06, 0.02, 0.06, 0.03])
    assert [step.level for step in steps] == pytest.approx([0.025, 0.0125, 0.025, 0.05 / 3])
    assert [step.rejected for step in steps] == [False, True, False, True]
    with pytest.raises(ValueError, match=r"1\.5 is no p-value"):
        holm([1.5])


P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(P_VALUES)
def test_holm_never_rejects_more_than_no_correction(p_values: list[float]) -> None:
    """Catches a correction that finds more than there is, or that a larger p-value profits from."""
    steps = holm(p_values)
    for p, step in zip(p_values, steps, strict=True):
        assert step.adjusted_p >= p
        assert 0.05 / len(p_values) <= step.level <= 0.05
        assert step.rejected == (step.adjusted_p <= 0.05) or step.adjusted_p == pytest.approx(0.05)
        assert not step.rejected or p <= 0.05
        assert step.rejected or p > 0.05 / len(p_values)
    ordered = sorted(zip(p_values, steps, strict=True), key=lambda pair: pair[0])
    for (_, smaller), (_, larger) in pairwise(ordered):
        assert smaller.adjusted_p <= larger.adjusted_p
        assert smaller.rejected or not larger.rejected


DIFFERENCES = st.lists(st.integers(-100, 100).map(lambda n: n / 100), min_size=2, max_size=8)
CLAIMS = st.lists(
    st.tuples(DIFFERENCES, st.sampled_from(["greater", "less", "equivalent"]), st.sampled_from([0.05, 0.2])),
    min_size=1,
    max_size=5,
)


@given(CLAIMS)
def test_the_interval_and_the_correction_agree(claims: list) -> None:
    """Catches a verdict worded more strongly than its interval allows, or an interval at another level than Holm's."""
    p_values = [decision_p(found, kind, margin) for found, kind, margin in claims]
    for decision, p, step in zip(decide(claims), p_values, holm(p_values), strict=True):
        assert decision is not None
        if not math.isclose(p, step.level, rel_tol=1e-6):
            assert (decision.verdict != "undecided") == step.rejected
        assert decision.confidence >= 0.95


@given(DIFFERENCES, st.sampled_from([0.0, 0.05, 0.2]))
def test_less_is_greater_the_other_way_round(found: list, margin: float) -> None:
    """Catches a margin that is added on the wrong side."""
    (less,), (greater,) = decide([(found, "less", margin)]), decide([([-x for x in found], "greater", margin)])
    assert less is not None
    assert greater is not None
    assert less.verdict == greater.verdict
    assert less.p_value == pytest.approx(greater.p_value)


def test_verdicts_by_hand() -> None:
    """Catches a claim that holds because its difference is not shown to be wrong."""

    def of(low: float, high: float, kind: str, margin: float) -> str:
        return verdict_of(Interval(mean=(low + high) / 2, low=low, high=high, count=5), kind, margin)  # type: ignore[arg-type]

    assert of(0.01, 0.2, "greater", 0.0) == "holds"
    assert of(-0.01, 0.2, "greater", 0.0) == "undecided"
    assert of(0.01, 0.2, "greater", 0.05) == "undecided"
    assert of(-0.2, -0.01, "greater", 0.0) == "does not hold"
    assert of(-0.01, 0.02, "equivalent", 0.03) == "holds"
    assert of(-0.04, 0.02, "equivalent", 0.03) == "undecided"
    assert of(0.04, 0.05, "equivalent", 0.03) == "does not hold"
    assert of(-0.05, -0.04, "equivalent", 0.03) == "does not hold"


def test_one_claim_has_the_plain_interval() -> None:
    """Catches a correction where there is nothing to correct for."""
    (decision,) = decide([(HAND, "greater", 0.0)])
    assert decision is not None
    assert decision.interval == paired_t_interval(HAND)
    assert decision.verdict == "undecided"
    assert decision.adjusted_p == decision.p_value == pytest.approx(2 * ONE_SIDED)


def test_a_claim_without_its_runs_still_counts() -> None:
    """Catches a failed run that makes the other claims easier."""
    clear = [0.30, 0.31, 0.32]
    alone, (lost, beside) = (
        decide([(clear, "greater", 0.0)])[0],
        decide([(None, "greater", 0.0), (clear, "greater", 0.0)]),
    )
    assert lost is None
    assert alone is not None
    assert beside is not None
    assert beside.adjusted_p == pytest.approx(2 * alone.adjusted_p)
    assert beside.confidence == pytest.approx(0.975)
