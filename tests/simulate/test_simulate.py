"""The simulation: durations by hand, what must hold of any schedule, and what is refused."""

import asyncio
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from sao import __version__
from sao.clock import VirtualClock, run_virtual
from sao.config_tree import ConfigError
from sao.loop import LoopConfig
from sao.simulate import results
from sao.simulate.command import DEFAULT
from sao.simulate.command import simulate as command
from sao.simulate.engine import TimedEngine
from sao.simulate.plan import Place, places, read_plan
from sao.simulate.run import Measured, Row, measure, simulate
from sao.simulate.settings import Distribution, SimulationConfig, config_of
from sao.simulate.worker import script
from sao.types import Snapshot

ROOT = Path(__file__).parents[2]
PLAN = """
seeds = 2
set = [
  "loop.steps=3", "warmup_steps=1", "loop.batch_size=4", "loop.concurrency=4", "replicas=1", "turns.mean=2",
]
[[arms]]
name = "streaming"
[[arms]]
name = "groups"
set = ["loop.group_size=2"]
[[curves]]
name = "tail"
label = "sigma"
points = [{x = 0.0, set = ["turns.spread=0.0"]}, {x = 1.0, set = ["turns.spread=1.0"]}]
"""


def by_hand(**changes: object) -> SimulationConfig:
    """Decode steps of 10 ms whatever runs, and a trainer of 5 + 1 seconds; `changes` of it, or of its loop."""
    base = SimulationConfig(
        replicas=1, step_seconds=0.01, session_seconds=0.0, load_seconds=0.0, actor_seconds=5.0,
        actor_token_seconds=0.0, critic_seconds=1.0, critic_token_seconds=0.0, warmup_steps=2, prompt_share=0.0,
        loop=LoopConfig(steps=6, batch_size=4, concurrency=4),
    )  # fmt: skip
    of_loop = {name: changes.pop(name) for name in list(changes) if hasattr(base.loop, name)}
    return replace(base, loop=replace(base.loop, **of_loop), **changes)  # type: ignore[arg-type]


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
    longest = [max(duration(config, 4 * step + place) for place in range(4)) for step in range(config.loop.steps)]
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
    barrier = replace(config, loop=replace(config.loop, group_size=group))
    grouped = [row["time/clock"] for row in simulate(barrier)]
    assert all(ours <= theirs * (1 + 1e-9) for ours, theirs in zip(streaming, grouped, strict=True))


def committed() -> list[Place]:
    return list(places(read_plan(ROOT / DEFAULT)))


def test_the_tails_of_the_plan_have_one_mean():
    """Catches a curve over the tail that is a curve over the mean: a cut at `most` takes 20 % off the heaviest."""
    drawn: dict[tuple[Distribution, float], float] = {}
    for config in (place.config for place in committed() if place.curve in ("tail", "tools")):
        drawn[config.turns, 1.0] = 6.0
        drawn[config.turn_tokens, config.block_tokens] = 400.0
        drawn[config.tool_seconds, 0.0] = 10.0 if config.tool_seconds.kind == "pareto" else 3.0
    assert len(drawn) == 5 + 1 + 4
    z = ndtri((np.arange(200_000) + 0.5) / 200_000)
    for (of, least), mean in drawn.items():
        values = of.of_normal(z, least=least)
        assert values.mean() == pytest.approx(mean, rel=1e-3), of
        assert least <= values.min() <= values.max() <= of.most


def test_whole_turns_and_blocks_keep_the_mean():
    """Catches rounding that lengthens rollouts: to the nearest, at least 1, sigma 1.6 gains a tenth of a turn."""
    turns = Distribution(mean=2.3, spread=1.6, most=9.0)
    config = SimulationConfig(turns=turns, turn_tokens=Distribution(mean=70.0, spread=1.0, most=200.0))
    blocks = [script(config, prompt, 0)[0] for prompt in range(4000)]
    assert max(len(each) for each in blocks) == 9
    assert sum(len(each) for each in blocks) / 4000 == pytest.approx(2.3, rel=0.03)
    every = [count for each in blocks for count in each]
    assert 50 * sum(every) / len(every) == pytest.approx(70.0, rel=0.03)
    assert min(every) == 1


def test_age_is_bounded_where_the_loop_bounds_it():
    """Catches a bound that the simulation does not pass on to the loop, and dropped rollouts that hold no slot.

    "wait" bounds the age of what runs; eta batches may lie in the queue after that.
    """
    found: dict[str, Measured] = {}
    for over_age in ("train", "drop", "wait"):
        config = by_hand(
            over_age=over_age, max_age=1, max_batches_ahead=1, actor_seconds=0.5, critic_seconds=0.0, steps=30,
            turns=Distribution(mean=4.0, spread=1.5, most=50.0),
        )  # fmt: skip
        found[over_age] = measure(simulate(config), warmup_steps=2, concurrency=4)
    assert found["train"].age_max > 2
    assert found["drop"].age_max <= 1
    assert found["wait"].age_max <= 2
    assert found["train"].dropped == found["wait"].dropped == 0 < found["drop"].dropped < 1
    assert found["drop"].slots_idle == pytest.approx(found["train"].slots_idle, abs=0.1)


def test_the_same_seed_gives_the_same_run():
    """Catches an order that depends on anything but virtual time."""
    config = config_of(["loop.steps=4", "warmup_steps=1", "loop.batch_size=8", "loop.concurrency=16"])
    assert simulate(config) == simulate(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("turns.speard=1", "turns.spread"),
        ("turns.kind=pareto turns.spread=1.0", "below 1, or the mean would be infinite"),
        ("loop.group_size=3", "loop.batch_size 128 is not a multiple"),
        ("concurrency=8", "unknown key concurrency; did you mean loop.concurrency"),
        ("loop.over_age=keep", "loop.over_age"),
        ("warmup_steps=24", "below loop.steps"),
        ("turns.mean=0.5", "at least 1 turn"),
        ("turn_tokens.mean=20", "at least a block"),
        ("step_seconds=-1", "not negative"),
        ("step_seconds=0 session_seconds=0", "must take some time"),
        ("loop.concurrency=0", "loop.concurrency is 0; it must be at least 1"),
        ("prompt_share=2", r"lie in \[0, 1\]"),
        ("turns.mean=60", "above the mean"),
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
        ("x = 1.0", "x = 0", "two points at x = 0"),
        ("group_size=2", "group_size=3", "curve 'tail', x = 0, arm 'groups'.*not a multiple"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(old: str, new: str, message: str, tmp_path: Path):
    """Catches a plan whose fault shows only after its first runs."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        list(places(read_plan(path)))


def run(tmp_path: Path, plan: str = PLAN) -> Path:
    """The folder of results of a call of the command."""
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    command(path, ["turns.mean=3"], tmp_path / "out", 1)
    return tmp_path / "out"


def test_the_command_writes_table_curves_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Catches a report that misses an arm, a point or a seed, and a row that does not say what was run."""
    out = run(tmp_path, PLAN.replace("{x = 1.0,", "{x = 1.0, seeds = 1,"))
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    kinds = [
        (row["config"]["turns"]["spread"], row["config"]["loop"]["group_size"], row["config"]["seed"]) for row in rows
    ]
    assert set(kinds) == {(0.0, 1, 0), (0.0, 1, 1), (0.0, 2, 0), (0.0, 2, 1), (1.0, 1, 0), (1.0, 2, 0)}
    assert all(row["version"] == __version__ and row["measured"]["tokens_per_second"] > 0 for row in rows)
    summary = (out / "summary.md").read_text()
    assert "--set turns.mean=3" in summary
    assert "| tokens/s, streaming / this |" in summary
    even, heavy = (line for line in summary.splitlines() if "| groups |" in line)
    assert re.search(r"\| groups \| 2 \|.* \| \d\.\d\dx \(\d\.\d\d to \d\.\d\d\) \|$", even)
    assert re.search(r"\| groups \| 1 \|.* \| \d\.\d\dx \(one seed\) \|$", heavy)
    assert all(line.endswith("|  |") for line in summary.splitlines() if "| streaming |" in line)
    assert (out / "tail.png").stat().st_size > 5000
    assert "| groups |" in capsys.readouterr().out


def test_a_call_goes_on_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Catches runs that are lost with a killed call, repeated by the next, or taken for those of other settings."""
    out = run(tmp_path)
    summary, file = (out / "summary.md").read_text(), out / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    other = lines[1].replace('"replicas": 1', '"replicas": 2')
    file.write_text("".join([lines[0], other, *lines[2:5], lines[5][:40]]))
    run(tmp_path)
    assert "4 of 8 runs are in" in capsys.readouterr().out
    assert (out / "summary.md").read_text() == summary
    assert sorted(file.read_text().splitlines(keepends=True)) == sorted([other, *lines])


def test_a_run_that_fails_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Catches a plan that is lost with one of its runs, a failure that goes unnoticed or is never repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "simulate", fails_at_spread_1)
        with pytest.raises(typer.Exit) as exit_:
            run(tmp_path)
    assert exit_.value.exit_code == 1
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    failed = [row for row in rows if "failed" in row]
    assert (len(rows), len(failed)) == (8, 2)
    assert all(row["failed"] == "RuntimeError: no room" and row["config"]["loop"]["group_size"] == 2 for row in failed)
    summary = (tmp_path / "out/summary.md").read_text()
    assert "failed: curve tail, x = 1, groups, seed 1: RuntimeError: no room" in summary
    assert summary.count("| streaming | 2 |") == 2
    assert summary.count("| groups | 2 |") == 1
    run(tmp_path)
    assert "6 of 8 runs are in" in capsys.readouterr().out
    assert (tmp_path / "out/summary.md").read_text().count("| groups | 2 |") == 2


def fails_at_spread_1(config: SimulationConfig) -> list[Row]:
    if config.turns.spread == 1 and config.loop.group_size == 2:
        raise RuntimeError("no room")
    return simulate(config)


def test_the_plan_of_this_repository_can_be_run():
    """Catches a committed plan that a change broke: each schedule, where it is smallest, over its first steps."""
    smallest: dict[str, SimulationConfig] = {}
    for place in sorted(committed(), key=lambda place: place.config.loop.concurrency):
        smallest.setdefault(place.arm, place.config)
    assert len(smallest) == 6
    for config in smallest.values():
        rows = simulate(replace(config, warmup_steps=1, loop=replace(config.loop, steps=4)))
        found = measure(rows, warmup_steps=1, concurrency=config.loop.concurrency)
        assert len(rows) == 4
        assert found.tokens_per_second > 0


def test_everything_grows_alike_along_the_workers():
    """Catches a curve whose points differ in more than the size, or that does not reach 10,000."""
    at = {place.x: place.config for place in committed() if place.curve == "workers" and place.arm == "streaming"}
    assert max(at) >= 10_000
    for x, config in at.items():
        loop = config.loop
        assert x == loop.concurrency == 2 * loop.batch_size == 32 * config.replicas
        assert loop.batch_size * config.actor_token_seconds == pytest.approx(64e-4)
        assert config.actor_token_seconds == config.critic_token_seconds
        assert config.warmup_steps == 8


def test_the_plan_of_the_page_can_be_run(tmp_path: Path):
    """Catches an example in the docs that is refused by those who copy it."""
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/simulate.md").read_text(), re.DOTALL)
    path = tmp_path / "mine.toml"
    path.write_text(example)
    assert len(list(places(read_plan(path), []))) == 2 * (3 + 5)
