import pytest

from sao.clock import VirtualClock
from sao.envs.answers import ExactGrader
from sao.envs.chain import ChainConfig, ChainTasks, Stream, chain_of
from sao.envs.demonstrations import FLAWLESS, ChainExpert, NoiseConfig, demonstrate
from sao.envs.math_python import MathPythonConfig, MathPythonEnvironment
from sao.envs.restricted import RestrictedTool
from sao.types import Task

CONFIG = ChainConfig()


def environment(clock: VirtualClock) -> MathPythonEnvironment:
    return MathPythonEnvironment(RestrictedTool, ExactGrader(), clock, MathPythonConfig(), inline_tool=True)


def tasks(stream: Stream, count: int, config: ChainConfig = CONFIG, seed: int = 0) -> list[Task]:
    source = ChainTasks(config, stream=stream, seed=seed)
    found = [source.at(index) for index in range(count)]
    return [task for task in found if task is not None]


def test_values_stay_in_bounds_and_give_the_answer() -> None:
    """Would catch an answer that its own chain does not give, or numbers that outgrow the vocabulary."""
    for task in tasks("train", 150):
        chain = chain_of(task)
        assert chain.steps == task.details["steps"]
        assert str(chain.values[-1]) == task.answer
        assert all(0 <= value <= CONFIG.max_value for value in chain.values)


def test_the_calls_of_a_chain_compute_it() -> None:
    """Would catch code that reads other names or numbers than the question."""
    for task in tasks("train", 80):
        chain, tool = chain_of(task), RestrictedTool()
        outputs = [tool.run(chain.code(step)).output for step in range(1, chain.steps + 1)]
        assert outputs == [str(value) for value in chain.values[1:]]


def test_tasks_are_functions_of_seed_stream_and_index() -> None:
    """Would catch a generator whose task depends on the ones asked for before: a resumed run would see other tasks."""
    source = ChainTasks(CONFIG, stream="train", seed=3)
    late = source.at(40)
    assert [source.at(index) for index in range(41)][40] == late
    assert ChainTasks(CONFIG, stream="train", seed=3).at(40) == late
    assert ChainTasks(CONFIG, stream="train", seed=4).at(40) != late


def test_streams_share_no_chain() -> None:
    """Would catch evaluation on problems that were trained on, under other names or in other words."""
    short = ChainConfig(max_steps=2)
    streams: tuple[Stream, ...] = ("train", "sft", "evaluation")
    seen = {
        stream: {
            (chain.start, chain.operators, chain.operands)
            for seed in (0, 1)
            for chain in map(chain_of, tasks(stream, 250, short, seed))
        }
        for stream in streams
    }
    assert not seen["train"] & seen["sft"]
    assert not seen["train"] & seen["evaluation"]
    assert not seen["sft"] & seen["evaluation"]


def test_lengths_are_heavy_tailed_in_every_stream() -> None:
    """Would catch a stream whose lengths differ, so that a score is not comparable."""
    shares = CONFIG.length_shares
    assert shares[0] / shares[-1] == pytest.approx(12**CONFIG.length_exponent)
    for stream in ("train", "evaluation"):
        lengths = [chain_of(task).steps for task in tasks(stream, 400)]
        assert lengths.count(1) / 400 == pytest.approx(shares[0], abs=0.08)
        assert max(lengths) == 12


def test_finite_source_ends() -> None:
    """Would catch an evaluation that never ends."""
    source = ChainTasks(CONFIG, stream="evaluation", size=3)
    assert source.at(2) is not None
    assert source.at(3) is None


@pytest.mark.parametrize(
    "settings",
    [{"min_steps": 0}, {"max_steps": 40}, {"min_steps": 5, "max_steps": 4}, {"max_operand": 1}, {"words_share": 1.5}],
)
def test_bad_settings(settings: dict[str, int]) -> None:
    """Would catch settings for which no task exists."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        ChainConfig(**settings)  # type: ignore[arg-type]


def test_no_chain_left() -> None:
    """Would catch a draw that loops for ever when a stream has no chain of a length."""
    tiny = ChainConfig(max_value=2, max_operand=2, max_steps=1)

    def draw_all() -> None:
        for stream in ("train", "sft", "evaluation"):
            ChainTasks(tiny, stream=stream).at(0)

    with pytest.raises(ValueError, match="no chain of 1 steps"):
        draw_all()


def test_flawless_expert_is_always_right() -> None:
    """Would catch an expert that cannot play its own environment, tool errors included."""
    source = ChainTasks(ChainConfig(tool_error_probability=0.3), stream="sft")
    traces = demonstrate(source, environment, lambda task: ChainExpert(task, FLAWLESS), count=60)
    assert all(trace.reward == 1.0 for trace in traces)
    assert any(message.content == "error try again" for trace in traces for message in trace.messages)


def test_noise_costs_reward_and_is_keyed() -> None:
    """Would catch noise without effect, and demonstrations that change from run to run."""
    source = ChainTasks(CONFIG, stream="sft")

    def play(seed: int) -> list[float]:
        make = lambda task: ChainExpert(task, NoiseConfig(), seed=seed)  # noqa: E731
        return [trace.reward for trace in demonstrate(source, environment, make, count=120)]

    assert 0.2 < sum(play(0)) / 120 < 0.75
    assert play(0) == play(0)
    assert play(0) != play(1)


@pytest.mark.parametrize(
    ("noise", "sign"),
    [
        (NoiseConfig(wrong_operand=1.0, wrong_operator=0.0, skip_step=0.0), "right operand"),
        (NoiseConfig(wrong_operand=0.0, wrong_operator=1.0, skip_step=0.0), "right operator"),
    ],
)
def test_each_noise_is_what_it_says(noise: NoiseConfig, sign: str) -> None:
    """Would catch two kinds of noise swapped."""
    for task in tasks("sft", 50):
        chain = chain_of(task)
        first = ChainExpert(task, NoiseConfig(**{**vars(noise), "early_answer": 0.0})).act(task.question)
        said, right = first.removeprefix("<python> ").removesuffix(" </python>").split(), chain.code(1).split()
        assert said[:3] == right[:3]
        assert (said[4] != right[4], said[3] != right[3]) == (sign == "right operand", sign == "right operator")


def test_a_skipped_step_is_taken_in_place_of_the_next() -> None:
    """Would catch a skipped step without effect, or one past the end of the chain."""
    noise = NoiseConfig(wrong_operand=0.0, wrong_operator=0.0, skip_step=1.0, early_answer=0.0, wrong_answer=0.0)
    for task in tasks("sft", 50):
        chain = chain_of(task)
        said = ChainExpert(task, noise).act(task.question)
        assert said == f"<python> {chain.code(min(2, chain.steps), chain.start)} </python>"


def test_noise_is_checked() -> None:
    """Would catch a probability above 1, and three that together exceed it."""
    with pytest.raises(ValueError, match=r"give_up is 1\.5"):
        NoiseConfig(give_up=1.5)
    with pytest.raises(ValueError, match="add up"):
        NoiseConfig(wrong_operand=0.6, wrong_operator=0.6)


def test_other_tasks_are_refused() -> None:
    """Would catch a KeyError deep in the expert for a task that is no chain."""
    with pytest.raises(ValueError, match="it is not a chain"):
        chain_of(Task(id="x", prompt_id="x", question="q", answer="1"))
