"""Claims and what came of them, as sentences that say no more than the interval does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sao.study.claims import Claim
from sao.study.plan import Plan
from sao.study.results import Pairing, Result, pair
from sao.study.statistics import ALPHA, Decision, decide

ORDER = ("does not hold", "undecided", "holds")
"""What did not reproduce comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A claim, its pairs, and the decision once all pairs of the plan are there."""

    pairing: Pairing
    """Its differences so far."""
    decision: Decision | None
    """None where a run failed, and while runs are missing."""
    pending: bool
    """Whether runs of the plan's claims are still to be done: nothing is decided before."""

    @property
    def claim(self) -> Claim:
        """What is claimed."""
        return self.pairing.claim

    @property
    def verdict(self) -> str:
        """ "holds", "does not hold", "undecided", or "not yet"."""
        if self.pending:
            return "not yet"
        return self.decision.verdict if self.decision is not None else "undecided"


def findings(plan: Plan, results: Mapping[tuple[str, int], Result]) -> list[Finding]:
    """One per claim, those that did not reproduce first. No claim is decided before every run of all claims ended."""
    pairings = [pair(plan, claim, results) for claim in plan.claims]
    pending = any(pairing.missing for pairing in pairings)
    decisions: Sequence[Decision | None] = [None] * len(pairings)
    if not pending:
        decisions = decide(
            [(_complete(plan, pairing), pairing.claim.kind, pairing.claim.margin) for pairing in pairings]
        )
    found = [
        Finding(pairing=pairing, decision=decision, pending=pending)
        for pairing, decision in zip(pairings, decisions, strict=True)
    ]
    return found if pending else sorted(found, key=lambda finding: ORDER.index(finding.verdict))


def _complete(plan: Plan, pairing: Pairing) -> Sequence[float] | None:
    return pairing.differences if len(pairing.differences) == plan.pairs(pairing.claim) else None


def sentence(finding: Finding, plan: Plan) -> str:
    """What was found, with its interval."""
    pairing, claim = finding.pairing, finding.claim
    planned = plan.pairs(claim)
    if finding.pending:
        there = planned - pairing.missing
        return f"{there} of {planned} pairs are there; no verdict before all runs of the plan's claims have ended."
    if finding.decision is None:
        return (
            f"Undecided: {'; '.join(pairing.lost)}, and pairs that are left out may differ from those that are there."
        )
    decision = finding.decision
    interval = decision.interval
    return (
        f"{claim.better} minus {claim.worse}, {plan.measure(claim.measure).words}: {interval.mean:+.3f}, "
        f"{decision.confidence:.1%} interval {interval.low:+.3f} to {interval.high:+.3f}, {interval.count} paired "
        f"seeds. {_meaning(decision, claim)}"
    )


def _meaning(decision: Decision, claim: Claim) -> str:
    """In words, for an error rate of `ALPHA` over all claims."""
    bound = f"{claim.margin:g}"
    if claim.kind == "equivalent":
        return {
            "holds": f"The difference is within ±{bound}.",
            "does not hold": f"The difference is outside ±{bound}.",
            "undecided": f"The interval does not say whether the difference is within ±{bound}.",
        }[decision.verdict]
    sides = ("above", "below")
    if claim.kind == "less":
        sides, bound = ("below", "above"), f"{0.0 - claim.margin:g}"
    return {
        "holds": f"The difference is {sides[0]} {bound}.",
        "does not hold": f"The difference is {sides[1]} {bound}: the claim is contradicted.",
        "undecided": f"The interval contains {bound}: neither shown nor contradicted.",
    }[decision.verdict]


CORRECTION = f"""Each claim is decided by one two-sided paired t-interval over seeds, at the level at which Holm's
  step-down tests it among the plan's claims, so that any verdict is wrong with a chance of at most {ALPHA:.0%}; an
  equivalence needs that whole interval within its margin (TOST). Verdicts appear once all planned seeds are there. A
  claim with a failed run stays undecided."""
