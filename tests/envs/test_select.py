"""Names of a configuration become sources, environments and experts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from sao.clock import VirtualClock, run_virtual
from sao.envs.chain import ChainConfig
from sao.envs.demonstrations import FLAWLESS, ReplayExpert, demonstrate, play
from sao.envs.math_python import MathPythonEnvironment
from sao.envs.protocol import Environment, TaskSource, WorldError
from sao.envs.sandbox import SandboxConfig
from sao.envs.select import EnvironmentConfig, TasksConfig, Use, make_expert, make_source, make_world, trained_on
from sao.envs.toy import GuessConfig, GuessEnvironment
from sao.types import Message, Task

TASK = Task(id="t/0", prompt_id="t", question="q", answer="42")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a data set of each kind, five records each."""
    numbers = range(5)
    tasks = [{"id": f"f{i}", "question": f"q{i}", "answer": i} for i in numbers]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    for split in ("train", "test"):
        records = [{"question": f"{split} {i}", "answer": f"{i}=<<{i}+0={i}>>{i}\n#### {i}"} for i in numbers]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    rows = "".join(f"p{i},problem {i},{i},Algebra\n" for i in numbers)
    (tmp_path / "answerbench_v2.csv").write_text("Problem ID,Problem,Short Answer,Category\n" + rows, encoding="utf-8")
    return tmp_path


def answers(source: TaskSource, count: int) -> list[str]:
    return [task.answer for index in range(count) if (task := source.at(index)) is not None]


def configured(source: str, data: Path, **settings: Any) -> TasksConfig:
    path = data / "tasks.jsonl" if source == "file" else data
    return TasksConfig(source=source, path=str(path), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["file", "gsm8k", "imo_answerbench"])
def test_training_shuffles_and_cycles_but_evaluation_does_not(data: Path, source: str) -> None:
    """Would catch an evaluation without an end, or training in the order of the file."""
    evaluation = make_source(configured(source, data), "evaluation", seed=1)
    assert answers(evaluation, 12) == ["0", "1", "2", "3", "4"]
    training = make_source(configured(source, data), "train", seed=1)
    ten = answers(training, 10)
    assert sorted(ten) == sorted(["0", "1", "2", "3", "4"] * 2)
    assert ten[:5] != ten[5:] or ten[:5] != ["0", "1", "2", "3", "4"]
    assert ten == answers(make_source(configured(source, data), "train", seed=1), 10)


@pytest.mark.parametrize("source", ["file", "gsm8k", "imo_answerbench"])
def test_limit_and_no_cycle(data: Path, source: str) -> None:
    """Would catch a limit that counts cycles, or a run that never ends though cycle is off."""
    ends = make_source(configured(source, data, limit=3, cycle=False), "train", seed=0)
    assert sorted(answers(ends, 10)) == ["0", "1", "2"]
    assert ends.at(3) is None
    goes_on = make_source(configured(source, data, limit=3), "train", seed=0)
    assert sorted(answers(goes_on, 6)) == sorted(["0", "1", "2"] * 2)


def test_auto_takes_the_split_of_the_use(data: Path) -> None:
    """Would catch training on the test set."""
    splits: dict[Use, str] = {"train": "train", "sft": "train", "evaluation": "test"}
    for use, split in splits.items():
        task = make_source(configured("gsm8k", data), use, seed=0).at(0)
        assert task is not None
        assert task.question.startswith(split)
        assert task.data_set == f"gsm8k-{split}"
    held_out = make_source(configured("gsm8k", data, split="evaluation"), "train", seed=0).at(0)
    assert held_out is not None
    assert held_out.question.startswith("test")


def test_chains_and_games_by_use() -> None:
    """Would catch evaluation on the chains of training, or a configured size left out."""
    uses: tuple[Use, ...] = ("train", "sft", "evaluation")
    config = TasksConfig(limit=4, chain=ChainConfig(max_steps=2))
    assert [make_source(config, use, seed=0).name for use in uses] == ["chain-train", "chain-sft", "chain-evaluation"]
    tasks = [make_source(config, "train", seed=0).at(index) for index in range(5)]
    assert all(task is not None and int(task.details["steps"]) <= 2 for task in tasks[:4])
    assert tasks[4] is not None
    assert tasks[4].prompt_id in {task.prompt_id for task in tasks[:4] if task is not None}, "a limit is a pool"
    once = replace(config, cycle=False)
    assert make_source(once, "train", seed=0).at(4) is None
    assert make_source(config, "train", seed=1).at(0) != tasks[0]
    game = make_source(TasksConfig(source="guess", guess=GuessConfig(highest=3)), "train", seed=0)
    assert (game.name, set(answers(game, 40))) == ("guess-train", {"1", "2", "3"})


@pytest.mark.parametrize("source", ["file", "gsm8k", "imo_answerbench"])
def test_paths_that_are_missing(tmp_path: Path, source: str) -> None:
    """Would catch a FileNotFoundError, or a source that needs a path and says so only when it is read."""
    with pytest.raises(ValueError, match=rf'tasks.source = "{source}" needs tasks.path'):
        TasksConfig(source=source)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none") as error:
        make_source(TasksConfig(source=source, path=str(tmp_path / "none")), "train", seed=0)  # type: ignore[arg-type]
    assert ("get it from https://" in str(error.value)) == (source != "file")


def test_negative_limit() -> None:
    """Would catch a slice that drops the last tasks."""
    with pytest.raises(ValueError, match=r"tasks\.limit is -1"):
        TasksConfig(limit=-1)


def test_unprotected_needs_its_switch() -> None:
    """Would catch model-written code run with the user's rights by one word in a file."""
    with pytest.raises(ValueError, match="allow_unprotected"):
        EnvironmentConfig(tool="unprotected")
    assert EnvironmentConfig(tool="unprotected", allow_unprotected=True).tool == "unprotected"


def test_configurations_come_from_plain_data() -> None:
    """Would catch a field that a TOML file cannot set, or an unknown name taken for the default."""
    tasks = TypeAdapter(TasksConfig).validate_python({"source": "guess", "guess": {"highest": 5}, "limit": 2})
    assert (tasks.guess.highest, tasks.limit) == (5, 2)
    world = TypeAdapter(EnvironmentConfig).validate_python({"math_python": {"latency": {"median_s": 1.5}}})
    assert world.math_python.latency.median_s == 1.5
    for wrong in ({"source": "chains"}, {"chain": {"min_steps": 0}}):
        with pytest.raises(ValidationError):
            TypeAdapter(TasksConfig).validate_python(wrong)


def test_a_world_of_mathematics() -> None:
    """Would catch environments that share their variables, or a world that cannot be stopped twice."""

    async def episodes() -> None:
        world = make_world(EnvironmentConfig(), TasksConfig(), VirtualClock(), seed=0)
        try:
            texts = ["<python> a = 42 </python>", "<answer> 42.0 </answer>"]
            trace = await play(TASK, world.make_environment(), ReplayExpert(texts))
            assert trace.reward == 1.0
            other = world.make_environment()
            assert isinstance(other, MathPythonEnvironment)
            await other.reset(TASK)
            step = await other.step(Message(role="assistant", content="<python> a </python>"))
            assert step.messages[0].content == "error : name a is not defined"
            await other.close()
        finally:
            await world.stop()
            await world.stop()

    run_virtual(episodes())


def test_a_world_of_games() -> None:
    """Would catch the game's settings left out."""

    async def reward() -> float:
        config = TasksConfig(source="guess", guess=GuessConfig(highest=1, max_guesses=1))
        world = make_world(EnvironmentConfig(name="guess"), config, VirtualClock(), seed=0)
        task = make_source(config, "train", seed=0).at(0)
        environment = world.make_environment()
        assert isinstance(environment, GuessEnvironment)
        assert task is not None
        trace = await play(task, environment, ReplayExpert(["1"]))
        await world.stop()
        return trace.reward

    assert run_virtual(reward()) == 1.0


def test_no_sandbox_starts_before_it_is_called() -> None:
    """Would catch a process per environment though its policy only answers."""
    unusable = EnvironmentConfig(tool="sandbox", sandbox=SandboxConfig(python="/nowhere/python"))

    async def reward(text: str) -> float:
        world = make_world(unusable, TasksConfig(), VirtualClock(), seed=0)
        try:
            return (await play(TASK, world.make_environment(), ReplayExpert([text]), max_turns=1)).reward
        finally:
            await world.stop()

    assert run_virtual(reward("<answer> 42 </answer>")) == 1.0
    with pytest.raises((WorldError, ValueError), match="/nowhere/python"):
        run_virtual(reward("<python> 1 </python>"))


@pytest.mark.parametrize("source", ["chain", "gsm8k"])
def test_experts_play_their_sources(data: Path, source: str) -> None:
    """Would catch an expert for the tasks of another source."""
    config = configured(source, data)

    def environment(clock: VirtualClock) -> Environment:
        return make_world(EnvironmentConfig(), config, clock, seed=0).make_environment()

    tasks, expert = make_source(config, "sft", seed=0), make_expert(config, FLAWLESS, seed=0)
    assert [trace.reward for trace in demonstrate(tasks, environment, expert, count=5)] == [1.0] * 5


@pytest.mark.parametrize("source", ["file", "imo_answerbench", "guess"])
def test_sources_without_an_expert(data: Path, source: str) -> None:
    """Would catch fine-tuning on nothing, or on the script of another source."""
    with pytest.raises(ValueError, match=rf'no scripted expert for tasks.source = "{source}".*sft.traces'):
        make_expert(configured(source, data), FLAWLESS, seed=0)


def test_a_file_is_split_and_the_parts_share_no_task(tmp_path: Path) -> None:
    """Catches an evaluation on what was trained on that is called held out."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{number}?", "answer": number}) for number in range(200)))
    config = TasksConfig(source="file", path=str(path), held_out_share=0.25, cycle=False)
    uses: tuple[Use, ...] = ("train", "sft", "evaluation")
    parts = {use: set(answers(make_source(config, use, seed=0), 200)) for use in uses}
    assert parts["train"] == parts["sft"]
    assert parts["train"].isdisjoint(parts["evaluation"])
    assert len(parts["train"] | parts["evaluation"]) == 200
    assert 30 < len(parts["evaluation"]) < 70
    assert not trained_on(config, config)
    assert trained_on(replace(config, held_out_share=0.0), config), "the whole file has the trained part too"
    assert trained_on(replace(config, split="train"), config)
    whole = TasksConfig(source="file", path=str(path))
    assert trained_on(whole, whole)
    assert not trained_on(replace(whole, path="other.jsonl"), whole)


def test_a_pool_of_generated_tasks_is_of_the_part_trained_on() -> None:
    """Would catch demonstrations and evaluations that are cut to a pool to train on, and one evaluated that is not."""
    config = TasksConfig(source="chain", limit=5)
    sizes = {use: len({task.prompt_id for task in map(make_source(config, use, seed=0).at, range(40)) if task})
             for use in ("train", "sft", "evaluation")}  # fmt: skip
    assert sizes == {"train": 5, "sft": 40, "evaluation": 40}
    pool = make_source(TasksConfig(source="chain", limit=5, split="train"), "evaluation", seed=0)
    trained = make_source(config, "train", seed=0)
    assert {task.prompt_id for index in range(9) if (task := pool.at(index))} == {
        task.prompt_id for index in range(9) if (task := trained.at(index))
    }
    assert pool.at(5) is None
