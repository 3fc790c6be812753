"""The simulation: durations by hand, what must hold of any schedule, and what is refused."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.clock import VirtualClock, run_virtual
from sao.config_tree import ConfigError
from sao.simulate.command import DEFAULT
from sao.simulate.command import simulate as command
from sao.simulate.engine import TimedEngine
from sao.simulate.plan import places, read_plan
from sao.simulate.run import measure, simulate
from sao.simulate.settings import Distribution, SimulationConfig, config_of
from sao.simulate.worker import script
from sao.types import Snapshot

ROOT = Path(__file__).parents[2]
PLAN = """
seeds = 2
set = ["steps=3", "warmup_steps=1", "batch_size=4", "concurrency=4", "replicas=1", "turns.mean=2"]
[[arms]]
name = "streaming"
[[arms]]
name = "groups"
set = ["group_size=2"]
[[curves]]
name = "tail"
label = "sigma"
points = [{x = 0.0, set = ["turns.spread=0.0"]}, {x = 1.0, set = ["turns.spread=1.0"]}]
"""


def by_hand(**changes: object) -> SimulationConfig:
    """Decode steps of 10 ms whatever runs, and a trainer of 5 + 1 seconds."""
    base = SimulationConfig(
        replicas=1, step_seconds=0.01, session_seconds=0.0, load_seconds=0.0, actor_seconds=5.0,
        actor_token_seconds=0.0, critic_seconds=1.0, critic_token_seconds=0.0, steps=6, warmup_steps=2, batch_size=4,
        concurrency=4, prompt_share=0.0,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def fixed(mean: float) -> Distribution:
    return Distribution(kind="fixed", mean=mean)


def duration(config: SimulationConfig, index: int) -> float:
    blocks, tools = script(config, index, 0)
    return sum(blocks) * config.block_tokens * config.step_seconds + sum(tools)


def snapshot(version: int) -> Snapshot:
    return Snapshot(version=version, parent=None, location="", checksum="")


def test_a_synchronous_step_is_its_longest_rollout_and_the_actor():
    """Catches work that is charged twice, or overlaps where it cannot; the critic overlaps the next batch."""
    config = by_hand(max_batches_ahead=0, turns=Distribution(mean=6.0, spread=1.0, most=50.0))
    clocks = [row["time/clock"] for row in simulate(config)]
    longest = [max(duration(config, 4 * step + place) for place in range(4)) for step in range(config.steps)]
    assert clocks[0] == pytest.approx(longest[0] + 5 + 1)
    found = [after - before for before, after in pairwise(clocks)]
    assert found == pytest.approx([seconds + 5 for seconds in longest[1:]])


def test_streaming_trains_workers_over_duration():
    """Catches slots that stay empty: 3 turns of 1 s and 2 tools of 2 s make 7 s, 300 tokens; 4 workers, no trainer."""
    config = by_hand(
        turns=fixed(3), turn_tokens=fixed(100), tool_seconds=fixed(2), actor_seconds=0.0, critic_seconds=0.0
    )
    found = measure(simulate(config), warmup_steps=2, concurrency=4)
    assert found.tokens_per_second == pytest.approx(4 * 300 / 7)
    assert found.updates_per_hour == pytest.approx(3600 / 7)
    assert found.rollout_seconds == pytest.approx(7)
    assert found.slots_idle == pytest.approx(0)
    # All run in step: 3 of 7 seconds decode.
    assert found.engine_idle == pytest.approx(4 / 7)
    assert found.trainer_idle == pytest.approx(1)


def test_sessions_share_the_steps_of_a_replica():
    """Catches a session that speeds up when another comes.

    Steps take 1 s + 1 s per session. A: 10 tokens from 0. B: 2 tokens from 4, when A has 2: both at 3 s a step, so B
    ends at 10, when A has 4; the other 6 at 2 s end at 22.
    """
    config = by_hand(step_seconds=1.0, session_seconds=1.0, block_tokens=1)

    async def play() -> list[float]:
        clock = VirtualClock()
        engine = TimedEngine(clock, config)
        await engine.load(snapshot(0))

        async def turn(start: float, tokens: int) -> float:
            await clock.sleep(start)
            await engine.decode(tokens)
            return clock.now()

        return list(await asyncio.gather(turn(0, 10), turn(4, 2)))

    assert run_virtual(play()) == pytest.approx([22, 10])


def test_a_block_has_the_version_in_force_at_its_start():
    """Catches ages that are off by a version: blocks start at 0, 1, 2, 3 s; weights come at 1.5 s, and at 2.5 s."""
    config = by_hand(step_seconds=1.0, block_tokens=1)

    async def play() -> list[int]:
        clock = VirtualClock()
        engine = TimedEngine(clock, config)
        await engine.load(snapshot(0))
        turn = asyncio.create_task(engine.decode(4))
        await clock.sleep(1.5)
        await engine.load(snapshot(1))
        await clock.sleep(1.0)
        await engine.load(snapshot(2))
        return await turn

    assert run_virtual(play()) == [0, 0, 1, 2]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), group=st.sampled_from([2, 4]), eta=st.integers(0, 2), spread=st.floats(0, 1.5))
def test_streaming_is_never_behind_the_group_barrier(seed: int, group: int, eta: int, spread: float):
    """Catches a barrier that is passed early: the same rollouts, but those of a group wait for one another."""
    config = by_hand(
        seed=seed, max_batches_ahead=eta, turns=Distribution(mean=4.0, spread=spread, most=50.0), concurrency=5,
        steps=5, warmup_steps=1,
    )  # fmt: skip
    streaming = [row["time/clock"] for row in simulate(config)]
    grouped = [row["time/clock"] for row in simulate(replace(config, group_size=group))]
    assert all(ours <= theirs * (1 + 1e-9) for ours, theirs in zip(streaming, grouped, strict=True))


def test_a_tail_leaves_the_mean_where_it_is():
    """Catches a curve over the tail that is a curve over the mean."""
    draws = SimulationConfig(turns=Distribution(mean=6.0, spread=0.4, most=1e6), prompt_share=0.5)
    pareto = replace(draws, turns=Distribution(kind="pareto", mean=6.0, spread=0.3, most=1e6))
    for config in (draws, pareto):
        mean = sum(len(script(config, prompt, 0)[0]) for prompt in range(4000)) / 4000
        assert mean == pytest.approx(6.0, rel=0.05)


def test_the_same_seed_gives_the_same_run():
    """Catches an order that depends on anything but virtual time."""
    config = config_of(["steps=4", "warmup_steps=1", "batch_size=8", "concurrency=16"])
    assert simulate(config) == simulate(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("turns.speard=1", "turns.spread"),
        ("turns.kind=pareto turns.spread=1.0", "below 1, or the mean would be infinite"),
        ("group_size=3", "not a multiple"),
        ("warmup_steps=24", "below steps"),
        ("step_seconds=-1", "not negative"),
        ("step_seconds=0 session_seconds=0", "must take some time"),
        ("concurrency=0", "at least 1"),
        ("prompt_share=2", r"lie in \[0, 1\]"),
        ("turns.mean=60", "at least the mean"),
    ],
)
def test_what_cannot_be_is_refused(override: str, message: str):
    """Catches a setting that hangs the loop, or that is silently not the one meant."""
    with pytest.raises(ConfigError, match=message):
        config_of(override.split())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "groups"', 'name = "streaming"', "must differ"),
        ('label = "sigma"', 'label = "sigma"\narms = ["group"]', "known: streaming, groups"),
        ("seeds = 2", "seeds = 0", "at least 1"),
        ("group_size=2", "group_size=3", "curve 'tail', x = 0, arm 'groups'.*not a multiple"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(old: str, new: str, message: str, tmp_path: Path):
    """Catches a plan whose fault shows only after its first runs."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        list(places(read_plan(path)))


def test_the_command_writes_table_curves_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Catches a report that misses an arm, a point or a seed."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    command(path, ["turns.mean=3"], tmp_path / "out", 1)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results) == 2 * 2 * 2
    assert {(row["x"], row["arm"], row["seed"]) for row in results} >= {(0.0, "streaming", 0), (1.0, "groups", 1)}
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "--set turns.mean=3" in summary
    assert summary.count("| groups | 2 |") == 2
    assert (tmp_path / "out" / "tail.png").stat().st_size > 5000
    assert "| groups |" in capsys.readouterr().out


def test_the_plan_of_this_repository_can_be_run():
    """Catches a committed plan that a change of the settings broke."""
    found = list(places(read_plan(ROOT / DEFAULT)))
    assert {place.config.concurrency for place in found} >= {8, 10_000}
