"""A whole run in which the rewarded style switches, straight and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import Silent, run_small, small_config

from sao.config import RunConfig
from sao.envs.select import make_source
from sao.stages import run_stages
from sao.store.log import read
from sao.store.records import Admitted, Finished, Trained
from sao.store.run_folder import RunFolder

SWITCHES = (
    "tasks.source=styles", "environment.name=styles", "environment.judge.coin=true", "tasks.styles.switch_steps=[2, 4]",
    "rollout.max_turns=1", "trainer.reference_kl=0.1", "loop.checkpoint_every=1",
)  # fmt: skip


def config_of(steps: int, *more: str) -> RunConfig:
    return small_config(*SWITCHES, f"loop.steps={steps}", *more)


def style_of_tasks(path: Path) -> dict[str, str]:
    """What the log says was asked for, by task."""
    return {each.task.id: each.task.data_set for each in read(path / "log") if isinstance(each, Admitted)}


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == "train"]


def test_a_run_that_was_stopped_goes_on_with_the_schedule(tmp_path: Path) -> None:
    """Catches a schedule that begins anew, or counts steps of the process instead of tasks of the run."""
    config = config_of(6)
    run_small(tmp_path / "straight", config)
    run_small(tmp_path / "stopped", config_of(3))
    with RunFolder.resume(tmp_path / "stopped") as folder:
        run_stages(config, folder, Silent())
    straight, stopped = (style_of_tasks(tmp_path / name) for name in ("straight", "stopped"))
    source = make_source(config.tasks, "train", seed=0, tasks_per_step=6)
    for found in (straight, stopped):
        expected = [task for task in map(source.at, range(len(found))) if task is not None]
        assert found == {task.id: task.data_set for task in expected}
    assert set(straight.values()) == {"styles-cute", "styles-chuunibyou", "styles-classical"}
    finished = [each.rollout for each in read(tmp_path / "stopped" / "log") if isinstance(each, Finished)]
    assert all(rollout.data_set == stopped[rollout.task_id] for rollout in finished)


def test_rows_tell_the_reward_of_each_style_and_the_distance_from_the_start(tmp_path: Path) -> None:
    """Catches a switch that no metric shows, marks lost on their way to log and rows, a reference that moves."""
    run_small(tmp_path / "run", config_of(6, "evaluation.every_steps=6", "trainer.actor_lr=1e-2"))
    rows = rows_of(tmp_path / "run")
    for row in rows:
        parts = [value for key, value in row.items() if key.startswith("rollout/styles-")]
        assert min(parts) - 1e-9 <= row["rollout/reward"] <= max(parts) + 1e-9
    finished = {each.rollout.id: each.rollout for each in read(tmp_path / "run" / "log") if isinstance(each, Finished)}
    trained = [each for each in read(tmp_path / "run" / "log") if isinstance(each, Trained)]
    for row, step in zip(rows, trained, strict=True):
        for name in ("quality", "style"):
            marks = [finished[each].marks[name] for each in step.rollout_ids if name in finished[each].marks]
            assert row[f"rollout/mark_{name}"] == pytest.approx(sum(marks) / len(marks))
    assert "rollout/styles-cute/reward" in rows[0]
    assert "rollout/styles-classical/reward" in rows[-1]
    assert rows[0]["actor/reference_kl"] == 0
    assert abs(rows[-1]["actor/reference_kl"]) > 1e-4
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert {key for key in last if key.endswith("/mean")} >= {f"eval/styles-{s}/mean" for s in ("cute", "classical")}


def test_groups_are_of_one_style_and_switch_at_the_same_step(tmp_path: Path) -> None:
    """Catches groups whose members are judged by different styles, and a schedule that groups slow down."""
    grouped = ("recipe=grpo-dis", "loop.group_size=3")
    run_small(tmp_path / "run", config_of(6, *grouped))
    found = style_of_tasks(tmp_path / "run")
    order = list(dict.fromkeys(task.split("#")[0] for task in found))
    assert all(found[f"{task}#0"] == found[f"{task}#1"] == found[f"{task}#2"] for task in order)
    assert [found[f"{task}#0"] for task in order[:8]] == ["styles-cute"] * 4 + ["styles-chuunibyou"] * 4
