"""Scripted experts: the flawless one, each kind of noise by itself, and how episodes become traces."""

import math
from pathlib import Path

import pytest

from sao.clock import VirtualClock, run_virtual
from sao.envs.answers import ExactGrader, exactly_equal, extract_answer, extract_code
from sao.envs.chain import Chain, ChainConfig, ChainTasks, Stream, chain_of
from sao.envs.demonstrations import (
    FLAWLESS,
    ChainExpert,
    NoiseConfig,
    ReplayExpert,
    demonstrate,
    gsm8k_expert,
    play,
)
from sao.envs.math_python import TOOL_ERROR, MathPythonConfig, MathPythonEnvironment
from sao.envs.protocol import ToolResult, WorldError
from sao.envs.restricted import RestrictedTool
from sao.envs.sources import ListSource, gsm8k_tasks
from sao.envs.traces import Trace
from sao.types import Message, Task

DATA = Path(__file__).parents[3] / "shared" / "data"
CALM, SHAKY = ChainConfig(tool_error_probability=0.0), ChainConfig(tool_error_probability=0.3)
COUNT = 300
HAND = Task(
    id="hand/0", prompt_id="hand/0", question="7 ; b + 3 ; c * 2 ; c ?", answer="20",
    details={"start": 7, "operators": "+ *", "operands": "3 2", "names": "b c"},
)  # fmt: skip


def environment(clock: VirtualClock) -> MathPythonEnvironment:
    return MathPythonEnvironment(RestrictedTool, ExactGrader(), clock, MathPythonConfig(), inline_tool=True)


def noise(**probabilities: float) -> NoiseConfig:
    return NoiseConfig(**{**vars(FLAWLESS), **probabilities})


@pytest.fixture(scope="module")
def calm() -> ListSource:
    return finite(CALM)


@pytest.fixture(scope="module")
def shaky() -> ListSource:
    return finite(SHAKY)


def finite(config: ChainConfig, stream: Stream = "sft", count: int = COUNT) -> ListSource:
    source = ChainTasks(config, stream=stream)
    tasks = [task for index in range(count) if (task := source.at(index)) is not None]
    return ListSource(tasks, name="s", shuffle=False, cycle=False)


def played(source: ListSource, config: NoiseConfig, seed: int = 0) -> list[tuple[Chain, Trace]]:
    chains = [chain_of(task) for index in range(len(source)) if (task := source.at(index)) is not None]
    make = lambda task: ChainExpert(task, config, seed=seed)  # noqa: E731
    return list(zip(chains, demonstrate(source, environment, make, count=len(source)), strict=True))


def test_the_expert_reads_marked_results() -> None:
    """Catches marks that the expert takes for a number, a right step marked wrong, and an error that no mark shows."""
    marked = finite(
        ChainConfig(tool_error_probability=0.0, min_steps=3, max_steps=5, result_marks="verified"), count=40
    )
    for _, trace in played(marked, FLAWLESS):
        assert trace.reward == 1.0
        assert all(message.content.endswith(" .") for message in trace.messages if message.role == "tool")
    wrong = [trace for _, trace in played(marked, noise(wrong_operand=1.0))]
    firsts = [next(message.content for message in trace.messages if message.role == "tool") for trace in wrong]
    assert all(first.endswith(" ?") for first in firsts)


def said(trace: Trace) -> list[str]:
    return [message.content for message in trace.messages if message.role == "assistant"]


def calls(trace: Trace) -> list[list[str]]:
    """Name, =, left, operator, operand of each call."""
    return [code.split() for text in said(trace) if (code := extract_code(text)) is not None]


def assert_rate(events: list[bool], probability: float) -> None:
    """Within four standard deviations."""
    assert len(events) >= 50
    deviation = math.sqrt(probability * (1 - probability) / len(events))
    assert abs(sum(events) / len(events) - probability) <= 4 * deviation


def test_flawless_expert_by_hand() -> None:
    """Would catch a call too many, or a call that works on something other than the value just seen."""
    expert = ChainExpert(HAND, FLAWLESS)
    assert expert.act(HAND.question) == "<python> b = 7 + 3 </python>"
    assert expert.act("10") == "<python> c = 10 * 2 </python>"
    assert expert.act(TOOL_ERROR) == "<python> c = 10 * 2 </python>"
    assert expert.act("20") == "<answer> 20 </answer>"


def test_expert_believes_what_it_sees() -> None:
    """Would catch noise that is undone by the next call, so that it never costs the reward."""
    expert = ChainExpert(HAND, FLAWLESS)
    expert.act(HAND.question)
    assert expert.act("-3") == "<python> c = -3 * 2 </python>"
    assert expert.act("-6") == "<answer> -6 </answer>"


@pytest.mark.parametrize("stream", ["train", "sft", "evaluation"])
@pytest.mark.parametrize("words_share", [0.0, 1.0])
def test_flawless_expert_solves_everything(stream: Stream, words_share: float) -> None:
    """Would catch a task without a solution, in either form, or more turns than steps, errors and an answer."""
    source = finite(ChainConfig(words_share=words_share, tool_error_probability=0.3), stream, 40)
    for chain, trace in played(source, FLAWLESS):
        assert trace.reward == 1.0
        errors = sum(message.content == TOOL_ERROR for message in trace.messages)
        assert len(said(trace)) == chain.steps + errors + 1


@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_wrong_operands_at_their_rate(calm: ListSource, rate: float) -> None:
    """Would catch a rate per episode instead of per call, or an operator changed along."""
    events: list[bool] = []
    for chain, trace in played(calm, noise(wrong_operand=rate)):
        for step, (name, _, _, operator, operand) in enumerate(calls(trace)):
            assert (name, operator) == (chain.names[step], chain.operators[step])
            assert abs(int(operand) - chain.operands[step]) <= 3
            events.append(int(operand) != chain.operands[step])
    assert_rate(events, rate)


@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_wrong_operators_at_their_rate(calm: ListSource, rate: float) -> None:
    """Would catch an operator "changed" to itself, or an operand changed along."""
    events: list[bool] = []
    for chain, trace in played(calm, noise(wrong_operator=rate)):
        for step, (name, _, _, operator, operand) in enumerate(calls(trace)):
            assert (name, int(operand)) == (chain.names[step], chain.operands[step])
            events.append(operator != chain.operators[step])
    assert_rate(events, rate)


def test_skipped_steps_at_their_rate(calm: ListSource) -> None:
    """Would catch skips past the end of the chain, or at another rate than set."""
    events: list[bool] = []
    for chain, trace in played(calm, noise(skip_step=0.2)):
        for step, (name, _, _, operator, operand) in enumerate(calls(trace)[:-1]):
            skipped = name != chain.names[step]
            events.append(skipped)
            place = step + skipped
            assert (name, operator, int(operand)) == (chain.names[place], chain.operators[place], chain.operands[place])
        assert calls(trace)[-1][0] == chain.names[-1]
    assert_rate(events, 0.2)


def test_a_skipped_step_is_taken_in_place_of_the_next() -> None:
    """Would catch a skipped step without effect, or one past the end of the chain."""
    source = finite(CALM, count=50)
    for task in (task for index in range(50) if (task := source.at(index)) is not None):
        chain = chain_of(task)
        first = ChainExpert(task, noise(skip_step=1.0)).act(task.question)
        assert first == f"<python> {chain.code(min(2, chain.steps), chain.start)} </python>"


def test_every_call_works_on_the_value_last_seen(shaky: ListSource) -> None:
    """Would catch an expert that knows the true values after its own mistake."""
    for chain, trace in played(shaky, NoiseConfig()):
        seen = chain.start
        for message in trace.messages[1:]:
            if message.role == "assistant" and (code := extract_code(message.content)) is not None:
                assert int(code.split()[2]) == seen
            elif message.role == "tool" and not message.content.startswith("error"):
                seen = int(message.content)


def test_giving_up_at_its_rate(shaky: ListSource) -> None:
    """Would catch an expert that gives up without a failure, or says something new when it tries again."""
    events: list[bool] = []
    for _, trace in played(shaky, noise(give_up=0.5)):
        texts = said(trace)
        outputs = [message.content for message in trace.messages if message.role == "tool"]
        for turn, output in enumerate(outputs):
            if output == TOOL_ERROR:
                events.append(texts[turn + 1].startswith("<answer>"))
                assert events[-1] or texts[turn + 1] == texts[turn]
        if TOOL_ERROR not in outputs:
            assert trace.reward == 1.0
    assert_rate(events, 0.5)


def test_early_answers_at_their_rate(calm: ListSource) -> None:
    """Would catch a rate per episode, or answers other than the last value seen."""
    events: list[bool] = []
    for chain, trace in played(calm, noise(early_answer=0.1)):
        texts = said(trace)
        early = len(texts) <= chain.steps
        events += [False] * (len(texts) - 1) + [True] * early
        assert texts[-1] == f"<answer> {chain.values[len(texts) - 1]} </answer>"
    assert_rate(events, 0.1)


def test_wrong_answers_at_their_rate(calm: ListSource) -> None:
    """Would catch wrong answers that are right, or off by more than three."""
    results = played(calm, noise(wrong_answer=0.3))
    for chain, trace in results:
        off = int(extract_answer(said(trace)[-1]) or "") - chain.values[-1]
        assert abs(off) <= 3
        assert (off == 0) == (trace.reward == 1.0)
    assert_rate([trace.reward == 0.0 for _, trace in results], 0.3)


def test_noise_is_keyed_by_seed_task_and_turn(calm: ListSource) -> None:
    """Would catch noise without effect, or that depends on which tasks were played before."""
    traces = [trace for _, trace in played(calm, NoiseConfig())]
    assert 0.2 < sum(trace.reward for trace in traces) / COUNT < 0.75
    make = lambda task: ChainExpert(task, NoiseConfig())  # noqa: E731
    assert demonstrate(calm, environment, make, first=40, count=5) == traces[40:45]
    assert [trace for _, trace in played(calm, NoiseConfig(), seed=1)] != traces


def test_noise_is_checked() -> None:
    """Would catch a probability above 1, and three that together exceed it."""
    with pytest.raises(ValueError, match=r"give_up is 1\.5"):
        NoiseConfig(give_up=1.5)
    with pytest.raises(ValueError, match="add up"):
        NoiseConfig(wrong_operand=0.6, wrong_operator=0.6)


def test_what_demonstrate_keeps(calm: ListSource) -> None:
    """Would catch wrong traces kept with only_right, or an end of the source that raises."""
    make = lambda task: ChainExpert(task, noise(wrong_answer=0.5))  # noqa: E731
    everything = demonstrate(calm, environment, make, count=20)
    right = demonstrate(calm, environment, make, count=20, only_right=True)
    assert 0 < len(right) < 20
    assert right == [trace for trace in everything if trace.reward == 1.0]
    assert len(demonstrate(calm, environment, make, first=COUNT - 3, count=20)) == 3


def test_out_of_turns() -> None:
    """Would catch a trace that ends with an observation nobody answers, or a reward that was never earned."""
    texts = ["<python> 1 </python>", "<python> 2 </python>", "<answer> 20 </answer>"]
    trace = run_virtual(play(HAND, environment(VirtualClock()), ReplayExpert(texts), max_turns=2))
    assert [message.role for message in trace.messages] == ["user", "assistant", "tool", "assistant"]
    assert trace.reward == 0.0


def test_replay_past_its_end_says_nothing() -> None:
    """Would catch a StopIteration inside an episode."""
    expert = ReplayExpert(["a"])
    assert [expert.act(""), expert.act(""), expert.act("")] == ["a", "", ""]


def test_a_failing_world_is_closed() -> None:
    """Would catch a tool left running when the episode fails."""

    class Broken(RestrictedTool):
        stopped = 0

        def run(self, code: str) -> ToolResult:
            raise WorldError("gone")

        def stop(self) -> None:
            Broken.stopped += 1

    broken = MathPythonEnvironment(Broken, ExactGrader(), VirtualClock(), MathPythonConfig())
    with pytest.raises(WorldError, match="gone"):
        run_virtual(play(HAND, broken, ReplayExpert(["<python> 1 </python>"])))
    assert Broken.stopped == 1


def test_gsm8k_solution_by_hand() -> None:
    """Would catch an annotation read as the answer, or words lost that stand between two annotations."""
    solution = "Half is 10/2=<<10/2=5>>5, and more: 5+1=<<5+1=6>>6.\n#### 6"
    task = Task(id="g", prompt_id="g", question="q", answer="6", details={"solution": solution})
    expert = gsm8k_expert(task)
    assert [expert.act("") for _ in range(4)] == [
        "Half is 10/2=\n<python> 10/2 </python>",
        "5, and more: 5+1=\n<python> 5+1 </python>",
        "6.\n<answer> 6 </answer>",
        "",
    ]


def test_gsm8k_annotations_become_calls() -> None:
    """Would catch an annotation left in the text, and a call whose words come after it."""
    solution = "He sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"
    task = Task(id="g", prompt_id="g", question="how many?", answer="72", details={"solution": solution})
    (trace,) = demonstrate(ListSource([task], name="g"), environment, gsm8k_expert, count=1)
    assert [message.content for message in trace.messages[1:]] == [
        "He sold 48/2 =\n<python> 48/2 </python>",
        "24.0",
        "24 clips.\nIn all 48+24 =\n<python> 48+24 </python>",
        "72",
        "72.\n<answer> 72 </answer>",
    ]
    assert trace.reward == 1.0


def test_gsm8k_expert_needs_a_solution() -> None:
    """Would catch a trace that answers without any work because the solution was lost."""
    with pytest.raises(ValueError, match="has no solution"):
        gsm8k_expert(Task(id="g", prompt_id="g", question="q", answer="1"))


def test_gsm8k_solution_without_annotations_only_answers() -> None:
    """Would catch an IndexError for the few solutions without an annotation."""
    task = Task(id="g", prompt_id="g", question="q", answer="6", details={"solution": "It is six.\n#### 6"})
    (trace,) = demonstrate(ListSource([task], name="g"), environment, gsm8k_expert, count=1)
    assert trace.messages[1:] == (Message(role="assistant", content="It is six.\n<answer> 6 </answer>"),)
    assert trace.reward == 1.0


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets at {DATA}")
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_trace_is_graded_right(split: str) -> None:
    """Would catch a conversion that loses answers, or calls whose outputs differ from the annotations."""
    tasks = gsm8k_tasks(DATA / "gsm8k", split)
    grader = ExactGrader()
    for task in tasks:
        expert = gsm8k_expert(task)
        texts = list(iter(lambda: expert.act(""), ""))  # noqa: B023
        assert len(texts) == str(task.details["solution"]).count("<<") + 1
        assert grader.grade(task, extract_answer(texts[-1]) or "").reward == 1.0
        assert all(extract_code(text) is not None for text in texts[:-1])
        assert extract_code(texts[-1]) is None
    some = ListSource(tasks[:: len(tasks) // 150], name="gsm8k", shuffle=False, cycle=False)
    traces = demonstrate(some, environment, gsm8k_expert, count=len(some))
    assert all(trace.reward == 1.0 for trace in traces)
    same: list[bool] = []
    for index, trace in enumerate(traces):
        task = some.at(index)
        assert task is not None
        annotated = [part.partition(">>")[0].rpartition("=")[2] for part in str(task.details["solution"]).split("<<")]
        outputs = [message.content for message in trace.messages if message.role == "tool"]
        same += [exactly_equal(output, gold) for output, gold in zip(outputs, annotated[1:], strict=True)]
    assert sum(same) >= 0.95 * len(same)
