"""Holds the simulation against committed real-time runs on two cores, and writes results/against_real.md.

    python experiments/simulate/against_real.py

Costs come from one stretch of a run's metrics, and what they predict is compared with another stretch that they
have not seen.

    turns           mean; spread from how much the mean of a batch moves from one step to the next
    decode step     seconds of a rollout per token, as a line over the sessions that decode (by Little's law)
    trainer         time/values + actor + publish, and time/critic, per action token
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sao.loop import LoopConfig
from sao.observe.run_data import read_metrics
from sao.simulate.run import SLOT_SECONDS, Measured, Row, measure, simulate
from sao.simulate.settings import Distribution, SimulationConfig
from sao.study.keep import METRICS

HERE = Path(__file__).parent
DEMO, SHAPE = HERE.parent / "demo/results/seed-0", HERE.parent / "paper_shape/results/seed-0"
SHOWN = (
    ("seconds per step", "step_seconds"),
    ("action tokens/s", "tokens_per_second"),
    ("seconds of a rollout", "rollout_seconds"),
    ("trainer idle", "trainer_idle"),
    ("engine idle", "engine_idle"),
    ("slots idle", "slots_idle"),
    ("age, mean", "age_mean"),
    ("age, p90", "age_p90"),
)
STEPS, WARMUP = 40, 10


@dataclass(frozen=True)
class Real:
    """A run: its settings, and its training rows."""

    config: Mapping[str, Any]
    rows: Sequence[Row]

    def measured(self, start: int, end: int) -> Measured:
        """Of steps start + 1 .. end."""
        return measure(self.rows[:end], warmup_steps=start, concurrency=self.config["loop"]["concurrency"])


def read(folder: Path) -> Real:
    """A run that was kept, or a run folder. Its busy slots are estimated by Little's law: trained rollouts times their
    seconds.

    In a window that may come to more than there are slots.
    """
    config = tomllib.loads((folder / "config.toml").read_text())
    plain, kept = folder / METRICS.removesuffix(".gz"), folder / METRICS
    read_rows: Sequence[Any] = read_metrics(plain if plain.is_file() else kept).rows
    rows = [row for row in read_rows if row["stage"] == "train"]
    seconds = np.cumsum([row["rollout/seconds"] for row in rows]) * config["loop"]["batch_size"]
    return Real(config, [{**row, SLOT_SECONDS: float(busy)} for row, busy in zip(rows, seconds, strict=True)])


def calibrated(source: Real, start: int, end: int, schedule: Mapping[str, Any], *, max_turns: int) -> SimulationConfig:
    """Costs of steps start + 1 .. end of a run, under a schedule: a [loop] section."""
    rows = source.rows[start:end]

    def column(key: str) -> np.ndarray:
        return np.array([row[key] for row in rows], dtype=np.float64)

    def change(key: str) -> np.ndarray:
        return np.diff([row[key] for row in source.rows[start - 1 : end]])

    turns, tokens = column("rollout/turns"), column("rollout/action_tokens")
    variance = float((np.diff(turns) ** 2).mean()) / 2 * source.config["loop"]["batch_size"]
    per_step = column("rollout/seconds") / tokens
    sessions = per_step * change("engine/generated_tokens") / change("engine/busy_seconds")
    slope, base = np.polyfit(sessions, per_step, 1)
    if slope < 0 or base < 0:
        slope, base = per_step.mean() / sessions.mean(), 0.0
    batch_tokens = float(tokens.mean()) * source.config["loop"]["batch_size"]
    actor = column("time/values") + column("time/actor") + column("time/publish")
    return SimulationConfig(
        turns=Distribution(
            mean=float(turns.mean()), spread=math.sqrt(math.log1p(variance / turns.mean() ** 2)), most=max_turns
        ),
        turn_tokens=Distribution(mean=float(tokens.mean() / turns.mean()), spread=0.2),
        tool_seconds=Distribution(kind="fixed", mean=float((column("rollout/tool_seconds") / turns).mean())),
        block_tokens=1,
        replicas=1,
        step_seconds=float(base),
        session_seconds=float(slope),
        load_seconds=0.0,
        actor_seconds=0.0,
        actor_token_seconds=float(actor.mean()) / batch_tokens,
        critic_seconds=0.0,
        critic_token_seconds=float(column("time/critic").mean()) / batch_tokens,
        warmup_steps=WARMUP,
        loop=replace(LoopConfig(**schedule), steps=STEPS),
    )


def comparison(title: str, config: SimulationConfig, measured: Measured) -> list[str]:
    """A table as Markdown, headed by the costs."""
    rows = simulate(config)
    predicted = measure(rows, warmup_steps=config.warmup_steps, concurrency=config.loop.concurrency)
    lines = [f"## {title}", ""]
    lines += [
        f"Turns {config.turns.mean:.2f}, sigma {config.turns.spread:.2f}; "
        f"decode step {1e3 * config.step_seconds:.1f} ms + "
        f"{1e3 * config.session_seconds:.3f} ms per session; trainer {1e6 * config.actor_token_seconds:.0f} + "
        f"{1e6 * config.critic_token_seconds:.0f} us per action token.",
        "",
        "| | measured | predicted | predicted / measured |",
        "|---|---|---|---|",
    ]
    for heading, name in SHOWN:
        found, said = getattr(measured, name), getattr(predicted, name)
        ratio = f"{said / found:.2f}" if abs(found) >= 0.02 else "both near 0" if abs(said) < 0.02 else "-"
        lines.append(f"| {heading} | {found:,.3g} | {said:,.3g} | {ratio} |")
    return [*lines, ""]


def main() -> None:
    """A run that its trainer bounds, and one that its engine bounds."""
    demo, shape = read(DEMO), read(SHAPE)
    turns = {name: run.config["rollout"]["max_turns"] for name, run in (("demo", demo), ("shape", shape))}
    text = ["Made by `python experiments/simulate/against_real.py`. What it means: docs/simulate.md.", ""]
    text += comparison(
        "Demo: costs of steps 21 to 60, against steps 61 to 100",
        calibrated(demo, 20, 60, demo.config["loop"], max_turns=turns["demo"]),
        demo.measured(60, 100),
    )
    text += comparison(
        "Paper shape: costs of steps 41 to 120, against steps 121 to 200",
        calibrated(shape, 40, 120, shape.config["loop"], max_turns=turns["shape"]),
        shape.measured(120, 200),
    )
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "against_real.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
