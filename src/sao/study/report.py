"""The report of a study, from what is kept of its runs alone: README.md in the folder of results, and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sao.config import RunConfig
from sao.store.files import write_durably
from sao.study.caveats import caveat_lines
from sao.study.claims import AREA, FINAL, Claim, Measure
from sao.study.curves import cell, curve_lines, with_interval
from sao.study.figures import draw_curves, draw_over_steps
from sao.study.plan import Arm, Plan
from sao.study.results import Result, measured, pair, read_results
from sao.study.verdicts import CORRECTION, Finding, findings, sentence

_READING = """## How to read this

- {correction}
- Arms of one seed share the fine-tuned policy, the rollouts that the critic was pretrained on, and the held-out tasks.
- An arm's interval is the 95 % t-interval of its mean over seeds. A single run's own interval over prompts stands in
  its `metrics.jsonl.gz`.
- Arms whose settings reach further back (`rollout`, slots of value pretraining) have a policy or rollouts of their own.
- Tables and figures hold the seeds whose runs have ended in every arm, tables of differences all pairs.
- Explained variance, age and masked share are means over the later half of the steps. A run that collapsed keeps its
  last value.
- Core-seconds are of training and evaluation; fine-tuning is shared and not among them.
"""


def write_study_report(
    plan: Plan, configs: Mapping[tuple[str, int], RunConfig], folder: Path, command: str
) -> list[Finding]:
    """Write README.md and the figures; what was found about the claims."""
    results = read_results(plan, folder)
    found = findings(plan, results)
    shown = _complete_seeds(plan, results)
    folder.mkdir(parents=True, exist_ok=True)
    figures = draw_curves(shown, folder)
    lines = [f"# Study: {plan.name}", "", plan.question, "", f"Made by `{command}`. {_standing(plan, results)}", ""]
    lines += _claims(plan, found)
    lines += _arms(plan, results, shown)
    lines += _measures(plan, shown)
    lines += _differences(plan, results)
    lines += _pictures(figures)
    lines += curve_lines(plan, configs, shown, folder)
    lines += _over_steps(plan, shown, folder)
    lines += _failures(results)
    lines += caveat_lines(results)
    lines += _settings(plan, configs)
    lines.append(_READING.format(correction=CORRECTION))
    write_durably(folder / "README.md", "\n".join(lines))
    return found


def _standing(plan: Plan, results: Mapping[tuple[str, int], Result]) -> str:
    planned = len(plan.runs())
    failed = sum(bool(result.failure) for result in results.values())
    ended = f"{len(results)} of {planned} runs have ended"
    return f"{ended}, {failed} of them failed." if failed else f"{ended}."


def _complete_seeds(plan: Plan, results: Mapping[tuple[str, int], Result]) -> dict[str, list[Result]]:
    """By arm: the runs that did not fail, of seeds that ended in every arm that has them."""
    planned = plan.runs()
    over = {seed for _, seed in planned if all((arm.name, seed) in results for arm, other in planned if other == seed)}
    return {
        arm.name: [
            results[arm.name, seed]
            for seed in sorted(over)
            if (arm.name, seed) in results and not results[arm.name, seed].failure
        ]
        for arm in plan.arms
    }


def _claims(plan: Plan, found: Sequence[Finding]) -> list[str]:
    if not found:
        return []
    lines = ["## Claims", ""]
    if any(finding.pending for finding in found):
        lines += ["Not all runs have ended, so nothing is decided yet.", ""]
    lines += ["| verdict | claim | difference | interval | pairs | p, corrected |", "|---|---|---|---|---|---|"]
    for finding in found:
        decision = finding.decision
        cells = ["", "", str(len(finding.pairing.differences)), ""]
        if decision is not None:
            interval = decision.interval
            cells = [
                f"{interval.mean:+.3f}",
                f"{interval.low:+.3f} to {interval.high:+.3f} ({decision.confidence:.1%})",
                str(interval.count),
                f"{decision.adjusted_p:.3g}",
            ]
        lines.append(f"| {' | '.join((f'**{finding.verdict}**', finding.claim.text, *cells))} |")
    lines.append("")
    for finding in found:
        claim = finding.claim
        lines += [f"### {claim.id}: {finding.verdict}", "", f"{claim.text} {sentence(finding, plan)}", ""]
        if finding.decision is not None:
            each = ", ".join(f"{difference:+.3f}" for difference in finding.pairing.differences)
            lines += [f"By seed: {each}.", ""]
        if claim.paper:
            lines += [f"The paper: {claim.paper}", ""]
    return lines


def _arms(plan: Plan, results: Mapping[tuple[str, int], Result], shown: Mapping[str, Sequence[Result]]) -> list[str]:
    lines = [
        "## Arms", "",
        f"`final` is the {FINAL.words} of a run, `gain` what it is above the run's first.", "",
        "| arm | seeds | final | gain | area | EV | age | masked | clock, s | core-s | collapsed | failed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for arm in plan.arms:
        runs = shown[arm.name]
        failed = sum(bool(result.failure) for (name, _), result in results.items() if name == arm.name)
        cells = (
            arm.name,
            f"{len(runs)} of {plan.seeds_of(arm.name)}",
            with_interval(measured(runs, FINAL)),
            with_interval([gain for run in runs if (gain := _gain(run)) is not None], sign="+"),
            _mean(measured(runs, AREA)),
            _mean([run.later_mean("critic/explained_variance") for run in runs], ".2f"),
            _mean([run.later_mean("age/mean") for run in runs], ".1f"),
            _mean([run.later_mean("actor/masked_low_share", "actor/masked_high_share") for run in runs], ".2%"),
            _mean(measured(runs, Measure(name="clock", key="time/clock")), ",.0f"),
            _mean([run.environment.get("core_seconds") for run in runs], ",.0f"),
            str(sum(run.collapsed for run in runs)),
            str(failed),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _measures(plan: Plan, shown: Mapping[str, Sequence[Result]]) -> list[str]:
    """The plan's own measures, arm by arm."""
    if not plan.measures:
        return []
    headings = ["arm", *(measure.words for measure in plan.measures)]
    lines = ["## Measures of this plan", "", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for arm in plan.arms:
        cells = (cell(shown[arm.name], measure) for measure in plan.measures)
        lines.append(f"| {' | '.join((arm.name, *cells))} |")
    return [*lines, ""]


def _differences(plan: Plan, results: Mapping[tuple[str, int], Result]) -> list[str]:
    """The plan's tables of differences from one arm."""
    if not plan.against:
        return []
    lines = ["## Differences", "", "Paired by seed, with 95 % t-intervals, uncorrected for their number: they decide"]
    lines += ["nothing, and of twenty that are zero one lies outside of its interval.", ""]
    for table in plan.against:
        measure = plan.measure(table.measure)
        lines += [f"| {measure.words}, minus `{table.arm}` | difference | pairs | by seed |", "|---|---|---|---|"]
        for arm in table.arms or [arm.name for arm in plan.arms if arm.name != table.arm]:
            found = pair(plan, Claim(id=arm, text="", better=arm, worse=table.arm, measure=table.measure), results)
            cells = (with_interval(found.differences, sign="+"), str(len(found.differences)))
            each = ", ".join(f"{difference:+.3f}" for difference in found.differences)
            lines.append(f"| {' | '.join((arm, *cells, each))} |")
        lines.append("")
    return lines


def _gain(run: Result) -> float | None:
    steps, means = run.curve()
    return float(means[-1] - means[0]) if len(means) > 1 and steps[0] == 0 else None


def _mean(values: Sequence[float | None], form: str = ".3f") -> str:
    numbers = [value for value in values if value is not None]
    return format(sum(numbers) / len(numbers), form) if numbers else ""


def _pictures(figures: Sequence[str]) -> list[str]:
    captions = {
        "equal_samples.png": "Held-out tasks solved at equal numbers of rollouts, with 95 % intervals over seeds.",
        "equal_time.png": "The same over the run's clock; right of the dotted line not every arm has a value.",
    }
    lines = ["## Learning curves", ""] if figures else []
    for name in figures:
        lines += [f"![{captions[name]}]({name})", "", f"*{captions[name]}*", ""]
    return lines


def _over_steps(plan: Plan, shown: Mapping[str, Sequence[Result]], folder: Path) -> list[str]:
    lines = ["## Over the steps", ""] if plan.over_steps else []
    for figure in plan.over_steps:
        drawn = draw_over_steps(figure, shown, folder)
        lines += [f"![{figure.text}]({figure.id}.png)", ""] if drawn else []
        lines += [f"*{figure.text}*" if drawn else f"{figure.text} No run has it yet.", ""]
    return lines


def _failures(results: Mapping[tuple[str, int], Result]) -> list[str]:
    failed = [result for result in results.values() if result.failure]
    if not failed:
        return []
    lines = ["## Runs that failed", "", "| arm | seed | step | reason |", "|---|---|---|---|"]
    for result in failed:
        reason = result.failure.splitlines()[-1].replace("|", "\\|")
        lines.append(f"| {result.arm} | {result.seed} | {result.last_step} | {reason} |")
    return [*lines, ""]


def _settings(plan: Plan, configs: Mapping[tuple[str, int], RunConfig]) -> list[str]:
    lines = ["## What the arms are", "", "| arm | recipe | also set | slots | eta | group | steps |"]
    lines.append("|---|---|---|---|---|---|---|")
    for arm in plan.arms:
        loop = configs[arm.name, 0].loop
        numbers = (loop.concurrency, loop.max_batches_ahead, loop.group_size, loop.steps)
        lines.append(f"| {' | '.join((arm.name, arm.recipe, _code(arm), *map(str, numbers)))} |")
    everywhere = ", ".join(f"`{setting}`" for setting in plan.set)
    lines += ["", f"All arms: `{plan.base}`{f', {everywhere}' if everywhere else ''}."]
    if plan.collapse is not None:
        many = "an evaluation" if plan.collapse.in_a_row == 1 else f"{plan.collapse.in_a_row} evaluations in a row"
        where = f"from step {plan.collapse.from_step} on"
        lines.append(f"A run has collapsed, and ends, after {many} below {plan.collapse.below:g}, {where}.")
    return [*lines, ""]


def _code(arm: Arm) -> str:
    return ", ".join(f"`{setting}`" for setting in arm.set)
