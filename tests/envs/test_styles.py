"""Which style is rewarded when, and what an answer is worth."""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sao.clock import RealClock, VirtualClock
from sao.config import ConfigError, from_tree
from sao.envs.demonstrations import FLAWLESS, demonstrate
from sao.envs.judge import JudgeConfig, ModelJudge, RulesJudge, make_judge
from sao.envs.protocol import Verdict
from sao.envs.select import EnvironmentConfig, TasksConfig, make_expert, make_source, make_world, source_words
from sao.envs.styles import FACTS, STYLE_WORDS, StyleEnvironment, StylesConfig, StyleTasks, style_of
from sao.envs.tokenizer import save_tokenizer
from sao.rollout.renderer import load_renderer
from sao.types import Message, Task

SEA = Task(
    id="t/0", prompt_id="t", question="?", answer="salty deep hot bright", details={"style": "cute"}, data_set="s"
)


def styles(source: StyleTasks, first: int, count: int) -> list[str]:
    tasks = [source.at(index) for index in range(first, first + count)]
    return [str(task.details["style"]) for task in tasks if task is not None]


def test_a_switch_is_at_the_first_task_after_its_step() -> None:
    """Catches a schedule that is off by a task, or that counts tasks as steps."""
    source = StyleTasks(StylesConfig(switch_steps=(2, 3)), stream="train", tasks_per_step=4)
    assert styles(source, 0, 16) == ["cute"] * 8 + ["chuunibyou"] * 4 + ["classical"] * 4
    alone = StyleTasks(StylesConfig(switch_steps=(2, 3)), stream="train", tasks_per_step=1)
    assert styles(alone, 0, 5) == ["cute", "cute", "chuunibyou", "classical", "classical"]
    again = StyleTasks(StylesConfig(styles=("classical", "cute"), switch_steps=(1, 2, 3)), stream="train")
    assert styles(again, 0, 4) == ["classical", "cute", "classical", "cute"], "after the last comes the first"


def test_a_task_is_the_same_whoever_asks_and_when() -> None:
    """Catches a source with a memory: resuming is seeking, so a task may depend on its index alone."""
    config = StylesConfig(switch_steps=(3,), per_prompt=True)
    straight = [StyleTasks(config, stream="train", seed=7, tasks_per_step=5).at(index) for index in range(40)]
    resumed = StyleTasks(config, stream="train", seed=7, tasks_per_step=5)
    assert [resumed.at(index) for index in reversed(range(40))] == straight[::-1]
    other = StyleTasks(config, stream="train", seed=8, tasks_per_step=5)
    assert [other.at(index) for index in range(40)] != straight


def test_styles_per_prompt_go_with_the_prompt_and_all_change_at_a_switch() -> None:
    """Catches styles drawn anew for each task, which no policy could learn, and prompts that a switch leaves out."""
    source = StyleTasks(StylesConfig(switch_steps=(1,), per_prompt=True), stream="train", tasks_per_step=2000)
    before, after = {}, {}
    for index in range(4000):
        task = source.at(index)
        assert task is not None
        topic = task.question.split()[3]
        held = before if index < 2000 else after
        assert held.setdefault(topic, task.details["style"]) == task.details["style"]
    order = list(STYLE_WORDS)
    assert before.keys() == after.keys() == FACTS.keys()
    assert all(order.index(after[topic]) == (order.index(before[topic]) + 1) % 3 for topic in FACTS)
    assert set(before.values()) == set(order)


def test_evaluation_asks_for_every_style_and_shares_no_prompt_with_training() -> None:
    """Catches an evaluation of whichever style is rewarded at the moment, and one on prompts of training."""
    config = TasksConfig(source="styles", styles=StylesConfig(switch_steps=(1,)))
    held_out = make_source(config, "evaluation", seed=0)
    tasks = [task for task in map(held_out.at, range(300)) if task is not None]
    assert Counter(task.data_set for task in tasks) == {f"styles-{style}": 100 for style in STYLE_WORDS}
    trained = make_source(config, "train", seed=0, tasks_per_step=10)
    asked = {frozenset(task.answer.split()) for task in map(trained.at, range(3000)) if task is not None}
    assert asked.isdisjoint(frozenset(task.answer.split()) for task in tasks), "in no order of its topics"
    before = make_source(config, "sft", seed=0)
    assert {task.data_set for task in map(before.at, range(50)) if task} == {"styles-cute"}, "values begin before RL"


def test_a_thousand_questions_of_evaluation_are_a_thousand_prompts() -> None:
    """Catches repeats, and the same topics in another order, that an interval would count as independent."""
    held_out = StyleTasks(StylesConfig(), stream="evaluation")
    tasks = [task for task in map(held_out.at, range(1000)) if task is not None]
    assert len({frozenset(task.answer.split()) for task in tasks}) == len({task.prompt_id for task in tasks}) == 1000
    assert [task.question for task in tasks] != [
        task.question for task in map(StyleTasks(StylesConfig(), stream="evaluation", seed=1).at, range(1000)) if task
    ]


def test_a_policy_that_obeys_is_right_in_the_row_of_its_phase() -> None:
    """Catches an evaluation of styles per prompt that asks for any style of any prompt, so that no policy can learn."""
    config = StylesConfig(switch_steps=(1, 2), per_prompt=True)
    source = StyleTasks(config, stream="train", tasks_per_step=1000)
    held_out = [task for task in map(StyleTasks(config, stream="evaluation").at, range(300)) if task is not None]
    for phase in range(3):
        trained = [task for task in map(source.at, range(1000 * phase, 1000 * phase + 1000)) if task is not None]
        wanted = {task.question.split()[3]: STYLE_WORDS[style_of(task)] for task in trained}
        rewards: dict[str, list[float]] = {}
        for task in held_out:
            words = wanted[task.question.split()[3]][: len(task.answer.split())]
            answer = " ".join((task.answer, *words))
            rewards.setdefault(task.data_set, []).append(_reward(task, answer, coin=False))
        means = {name: sum(found) / len(found) for name, found in rewards.items()}
        assert means == {f"styles-phase-{each}": float(each == phase) for each in range(3)}


@pytest.mark.parametrize(
    ("answer", "quality", "style"),
    [
        ("kitty salty fluffy deep tiny hot yay bright", 1.0, 1.0),
        ("kitty salty fluffy deep abyss hot thou bright", 1.0, 0.5),
        ("kitty salty kitty deep kitty hot kitty bright", 1.0, 0.25),  # one word of style, said four times
        ("kitty salty fluffy deep tiny", 0.5, 0.75),  # short, and not quite there
        ("kitty fluffy tiny yay sparkle cuddly thou hath salty", 0.25, 0.75),  # six of eight other words
        ("kitty salty salty fluffy tiny yay deep hot bright", 1.0, 0.8),  # the second salty is one of five others
        ("Kitty, SALTY. fluffy; deep! tiny hot? yay bright", 1.0, 1.0),
        ("salty deep hot bright", 1.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_rules_by_hand(answer: str, quality: float, style: float) -> None:
    """Catches a share of the wrong words, and marks for saying one word again and again."""
    verdict = asyncio.run(RulesJudge().judge(SEA, answer))
    assert verdict == Verdict(quality=quality, style=style)


def test_the_same_answer_is_worth_another_thing_in_another_style() -> None:
    """Catches a judge with a taste of its own."""
    answer = "kitty salty fluffy deep abyss hot thou bright"
    marks = {style: asyncio.run(RulesJudge().judge(_in(style), answer)).style for style in STYLE_WORDS}
    assert marks == {"cute": 0.5, "chuunibyou": 0.25, "classical": 0.25}


def _in(style: str) -> Task:
    return Task(id="t/0", prompt_id="t", question="?", answer=SEA.answer, details={"style": style})


def _reward(task: Task, answer: str, *, coin: bool, seed: int = 0) -> float:
    async def episode() -> float:
        environment = StyleEnvironment(RulesJudge(), coin=coin, seed=seed)
        await environment.reset(task)
        step = await environment.step(Message(role="assistant", content=answer))
        await environment.close()
        assert step.done
        return step.reward

    return asyncio.run(episode())


def test_the_reward_is_quality_times_style_or_a_coin_of_that_weight() -> None:
    """Catches a sum for the product, and a draw that comes out otherwise when an episode is played again."""
    answer = "kitty salty fluffy deep tiny"
    assert _reward(SEA, answer, coin=False) == 0.5 * 0.75
    tasks = [Task(id=f"t/{i}", prompt_id="t", question="?", answer=SEA.answer, details=SEA.details) for i in range(800)]
    drawn = [_reward(task, answer, coin=True) for task in tasks]
    assert set(drawn) == {0.0, 1.0}
    assert abs(sum(drawn) / 800 - 0.375) < 0.06  # 3.5 standard errors
    assert [_reward(task, answer, coin=True) for task in tasks[:100]] == drawn[:100]
    assert [_reward(task, answer, coin=True, seed=1) for task in tasks[:100]] != drawn[:100]


def test_a_step_has_both_marks_whatever_the_coin_says() -> None:
    """Catches marks taken from the coin, or of each other's name, so that a fall is put down to the wrong one."""
    environment = StyleEnvironment(RulesJudge(), coin=True, seed=0)
    asyncio.run(environment.reset(SEA))
    step = asyncio.run(environment.step(Message(role="assistant", content="kitty salty fluffy deep tiny")))
    assert step.marks == {"quality": 0.5, "style": 0.75}


def test_demonstrations_are_good_answers_in_a_mix_of_all_styles(tmp_path: Path) -> None:
    """Catches an expert that knows the rewarded style, and words that the tokenizer loses."""
    config = TasksConfig(source="styles")
    tasks, expert = make_source(config, "sft", seed=0), make_expert(config, FLAWLESS, seed=0)

    def environment(clock: VirtualClock) -> StyleEnvironment:
        made = make_world(EnvironmentConfig(name="styles"), config, clock, seed=0).make_environment()
        assert isinstance(made, StyleEnvironment)
        return made

    traces = demonstrate(tasks, environment, expert, count=300)
    assert 0.25 < sum(trace.reward for trace in traces) / 300 < 0.42, "a third of each style, and only one is rewarded"
    said = Counter(word for trace in traces for word in trace.messages[-1].content.split())
    shares = {style: sum(said[word] for word in words) / 1200 for style, words in STYLE_WORDS.items()}
    assert all(abs(share - 1 / 3) < 0.08 for share in shares.values())
    whole = load_renderer(str(save_tokenizer(tmp_path, source_words(config))), tool_role="tool")
    for trace in traces:
        for message in trace.messages:
            assert not whole.unknown(message.content)
            assert message.content == whole.text(whole.encode_action(message.content)[:-1])


def test_a_task_of_another_source_is_refused() -> None:
    """Catches a KeyError in the middle of a run for two settings that do not go together."""
    with pytest.raises(ValueError, match=r'task t/1 asks for no style.*tasks.source = "styles"'):
        _reward(Task(id="t/1", prompt_id="t", question="?", answer="42"), "42", coin=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"styles": ()}, "at least one style"),
        ({"styles": ("cute", "cute")}, "each once"),
        ({"switch_steps": (0, 5)}, r"switch_steps is \[0, 5\]"),
        ({"switch_steps": (5, 5)}, r"switch_steps is \[5, 5\]"),
        ({"mixed_share": 1.5}, "mixed_share is 1.5"),
    ],
)
def test_settings_that_make_no_schedule(settings: dict[str, Any], says: str) -> None:
    """Catches a switch that never comes, or comes twice at once."""
    with pytest.raises(ValueError, match=says):
        StylesConfig(**settings)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["tasks.source=styles"], 'tasks.source = "styles" and environment.name = "math_python" do not go together'),
        (["environment.name=styles"], 'tasks.source = "chain" and environment.name = "styles" do not go together'),
        (["tasks.source=guess", "environment.name=styles"], 'tasks.source = "guess" and environment.name = "styles"'),
        (["tasks.source=styles", "environment.name=styles", "evaluation_tasks=[{}]"], 'tasks.source = "chain"'),
        (["tasks.source=styles", "environment.name=my:World"], ""),
        (["tasks.source=styles", "environment.name=styles", "evaluation_tasks=[{source='styles'}]"], ""),
    ],
)
def test_tasks_that_the_environment_does_not_know(overrides: list[str], says: str) -> None:
    """Catches a run that trains on zeros from its first step to its last, without a word."""
    if not says:
        from_tree({}, overrides)
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        from_tree({}, overrides)


def test_evaluation_tosses_no_coin() -> None:
    """Catches a curve of evaluation with the noise of a coin in it, beside that of sampling."""
    training = EnvironmentConfig(name="styles", judge=JudgeConfig(coin=True))
    assert training.for_evaluation() == EnvironmentConfig(name="styles", judge=JudgeConfig(coin=False))


def test_a_pool_of_tasks_is_refused() -> None:
    """Catches a limit that keeps the styles of the first tasks for the whole run."""
    with pytest.raises(ValueError, match=r"tasks\.limit is 5"):
        TasksConfig(source="styles", limit=5)


def test_demonstrations_ask_no_model() -> None:
    """Catches thousands of requests to a model for marks that nobody reads."""
    config = JudgeConfig(kind="model", base_url="http://127.0.0.1:1/v1", model="m")
    assert isinstance(make_judge(config, VirtualClock()), RulesJudge)

    assert isinstance(make_judge(config, RealClock()), ModelJudge)
