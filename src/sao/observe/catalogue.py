"""Which figures a report shows, in its order, and what to say of each."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from sao.observe import figures
from sao.observe.run_data import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """How to draw a figure, and what to say of it."""

    name: str
    """Name of the file, without ".png"."""
    title: str
    """Heading in the report."""
    caption: str
    """What it shows, and what is healthy."""
    needs: str
    """What is missing where the figure cannot be drawn."""
    draw: Callable[[RunData], Figure | None]
    """Gives the figure, or None where the run lacks what it needs."""


PLOTS: tuple[Plot, ...] = (
    Plot(
        name="reward",
        title="Reward",
        caption="Mean reward of each batch, and smoothed. It should rise; older policies sampled part of these "
        "rollouts, so judge by the evaluation.",
        needs="a training step",
        draw=figures.reward,
    ),
    Plot(
        name="evaluation",
        title="Evaluation",
        caption="Mean reward on held-out tasks at pinned versions, with intervals. Gains smaller than the intervals "
        "are not gains.",
        needs="an evaluation",
        draw=figures.evaluation,
    ),
    Plot(
        name="entropy",
        title="Entropy",
        caption="Of the policy at its own tokens. A slow fall is learning; a fall to 0 within few steps is a collapse.",
        needs="actor/entropy",
        draw=figures.lines("Entropy of the policy", "nats per action token", {"actor/entropy": ""}),
    ),
    Plot(
        name="explained_variance",
        title="Explained variance",
        caption="1 - Var(return - value) / Var(return) over action tokens, before the step's updates. Above 0 the "
        "critic helps; below 0 it adds noise.",
        needs="a critic, and returns that differ",
        draw=figures.explained_variance,
    ),
    Plot(
        name="value_calibration",
        title="Value calibration",
        caption="Action tokens of the run's second half, in ten bins by predicted value. On the dotted line the "
        "prediction is right on average.",
        needs="a critic, and trained tokens in the log",
        draw=figures.calibration,
    ),
    Plot(
        name="value_by_position",
        title="Values along the rollout",
        caption="The same tokens by their place in the rollout. The error should fall towards the end, where more is "
        "known.",
        needs="a critic, and trained tokens in the log",
        draw=figures.value_by_position,
    ),
    Plot(
        name="token_age",
        title="Age of tokens",
        caption="Actor updates between the sampling of a token and its training. It should level off; without bound "
        "the engine outruns the trainer.",
        needs="age/mean",
        draw=figures.lines(
            "Age of tokens over the run",
            "actor updates",
            {"age/mean": "mean", "age/p90": "90 %", "age/max": "oldest", "age/queue": "mean time in the queue"},
        ),
    ),
    Plot(
        name="token_age_histogram",
        title="Ages, all together",
        caption="Ages of the action tokens of the run's second half; the last bar holds all older ones.",
        needs="trained tokens in the log",
        draw=figures.age_histogram,
    ),
    Plot(
        name="masked_tokens",
        title="Masked tokens",
        caption="Action tokens that the double-sided mask removed from the gradient. Under 1 % is usual; a steady rise "
        "says that data is too old, or that engine and trainer disagree.",
        needs="actor/masked_low_share",
        draw=figures.lines(
            "Tokens outside the ratio's band",
            "share of action tokens",
            {"actor/masked_low_share": "ratio too low", "actor/masked_high_share": "ratio too high"},
            percent=True,
        ),
    ),
    Plot(
        name="ratio_quantiles",
        title="Ratio quantiles",
        caption="Over action tokens; dotted lines are the band. The median should stay at 1.",
        needs="actor/ratio_p50",
        draw=figures.ratios,
    ),
    Plot(
        name="engine_gap",
        title="Noise floor and staleness",
        caption="Mean difference of recorded and actor's log-probs: of tokens that the version computing the loss "
        "sampled itself (the noise between engine and trainer), and of older ones (staleness besides).",
        needs="engine/gap_older_mean",
        draw=figures.lines(
            "Recorded against the actor's log-probs",
            "nats",
            {"engine/gap_same_mean": "same version: noise", "engine/gap_older_mean": "older: noise and staleness"},
            log=True,
        ),
    ),
    Plot(
        name="gradient_norms",
        title="Gradient norms",
        caption="Before clipping. Sudden growth comes before a collapse; a critic that is always clipped learns too "
        "slowly.",
        needs="actor/grad_norm",
        draw=figures.lines(
            "Gradient norms before clipping",
            "norm",
            {"actor/grad_norm": "actor", "critic/grad_norm": "critic"},
            log=True,
        ),
    ),
    Plot(
        name="throughput",
        title="Throughput",
        caption="Action tokens that the engine sampled and the trainer consumed, per second of the run's clock. Over "
        "the run both are about equal.",
        needs="time/clock and engine/generated_tokens",
        draw=figures.throughput_figure,
    ),
    Plot(
        name="idle_time",
        title="Idle time",
        caption="Trainer: waiting for a batch. Engine: not computing. One of the two should be near 0; if neither is, "
        "tools or admission are the limit.",
        needs="time/wait_for_batch, or engine/busy_seconds",
        draw=figures.idle_figure,
    ),
    Plot(
        name="critic_cost",
        title="Cost of the critic",
        caption="Seconds of a step spent on the actor, on values, and on the critic's updates (smoothed).",
        needs="a critic, and time/critic",
        draw=figures.critic_cost,
    ),
)
