"""A world that changes under the policy: the style of an answer that is rewarded switches at set training steps.

The prompt does not say which style is wanted; the policy finds out by its rewards, as in the paper's online experiment
(cute, then chuunibyou, then classical). One turn: a question about four topics, an answer, and what a judge says of it.

The style belongs to the task, and the task's index is what the schedule reads. A run that resumes takes tasks up where
it left them, so they have the same styles; so has an attempt that comes again; and no environment, wherever it is
played, needs to know how far training is. Task i is counted to step i // tasks_per_step, in which it would be trained
if tasks finished in their order; those under way at a switch are trained a few steps later, still under their style.
"""

import bisect
import itertools
from dataclasses import dataclass
from typing import Literal

from sao.envs.keyed import generator, key, uniform
from sao.envs.protocol import Judge, Step
from sao.types import Message, Task

Style = Literal["cute", "chuunibyou", "classical"]

STYLE_WORDS: dict[Style, tuple[str, ...]] = {
    "cute": ("kitty", "fluffy", "sparkle", "cuddly", "tiny", "yay"),
    "chuunibyou": ("abyss", "sealed", "darkness", "destined", "accursed", "eternal"),
    "classical": ("thou", "hath", "verily", "whence", "alas", "forsooth"),
}
"""Words by which rules know a style."""

STYLE_WORDS_WANTED = 4
"""Different words of the style for full marks."""

FACTS: dict[str, str] = {
    "sea": "salty",
    "fire": "hot",
    "snow": "cold",
    "forest": "green",
    "desert": "dry",
    "river": "winding",
    "mountain": "high",
    "moon": "pale",
    "storm": "loud",
    "honey": "sweet",
    "stone": "hard",
    "feather": "light",
    "iron": "heavy",
    "night": "black",
    "rose": "red",
    "lemon": "sour",
    "lake": "deep",
    "rain": "wet",
    "cloud": "soft",
    "road": "long",
}
"""What a good answer says of each topic."""

TOPICS_ASKED = 4
"""Topics of a question."""

_HELD_OUT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class StylesConfig:
    """Which style is rewarded when."""

    styles: tuple[Style, ...] = ("cute", "chuunibyou", "classical")
    """In the order in which they are rewarded (paper); after the last comes the first again."""
    switch_steps: tuple[int, ...] = (150, 300)
    """Training steps after which the next style is rewarded (paper: near 150 and 300); a step counts as many tasks as
    it trains, loop.batch_size / loop.group_size."""
    per_prompt: bool = False
    """Whether the first topic of a prompt decides which style it begins with, so that at any time all are rewarded,
    each by other prompts. False: all prompts change together (paper)."""
    mixed_share: float = 0.3
    """Share of a demonstration's style words that are of any style instead of its own. At 0 the first word settles the
    style, and a policy that has lost one never meets it again."""

    def __post_init__(self) -> None:
        if not self.styles or len(set(self.styles)) < len(self.styles):
            raise ValueError(f"tasks.styles.styles is {list(self.styles)}; name at least one style, and each once")
        if any(later <= earlier for earlier, later in zip((0, *self.switch_steps), self.switch_steps, strict=False)):
            raise ValueError(
                f"tasks.styles.switch_steps is {list(self.switch_steps)}; give steps above 0, each above the one before"
            )
        if not 0 <= self.mixed_share <= 1:
            raise ValueError(f"tasks.styles.mixed_share is {self.mixed_share}; it must lie between 0 and 1")


class StyleTasks:
    """Endless questions about four topics; a quarter of the sets of topics is for evaluation alone.

    Topics are asked for in one order, so that no two prompts are of the same topics. "train" follows the schedule, and
    "sft" is what comes before any switch. "evaluation" asks for what is rewarded before any switch, after one, after
    two, in turn, so that each has a row of its own, and repeats no prompt before all were asked.
    """

    def __init__(
        self,
        config: StylesConfig,
        *,
        stream: Literal["train", "sft", "evaluation"],
        seed: int = 0,
        tasks_per_step: int = 1,
    ) -> None:
        self.name = f"styles-{stream}"
        self._config, self._stream, self._seed, self._tasks_per_step = config, stream, seed, tasks_per_step
        sets = itertools.combinations(FACTS, TOPICS_ASKED)
        held_out = stream == "evaluation"
        self._sets = [topics for topics in sets if (uniform("held out", *topics) < _HELD_OUT_SHARE) == held_out]
        self._order = generator(seed, self.name).permutation(len(self._sets)) if held_out else None

    def at(self, index: int) -> Task | None:
        """Question `index`."""
        if self._order is None:
            drawn = key(self._seed, self.name, index) % len(self._sets)
        else:
            drawn = int(self._order[index % len(self._sets)])
        topics = self._sets[drawn]
        first = key("first topic", *topics) % TOPICS_ASKED
        topics = topics[first:] + topics[:first]
        switches = self._switches(index)
        style = self._style(topics[0], switches)
        by_phase = self._stream == "evaluation" and self._config.per_prompt
        *others, last = (f"the {topic}" for topic in topics)
        return Task(
            id=f"{self.name}/{index}",
            prompt_id=f"{self.name}/{'-'.join(topics)}",
            question=f"tell of {' '.join(others)} and {last}",
            answer=" ".join(FACTS[topic] for topic in topics),
            data_set=f"styles-phase-{switches}" if by_phase else f"styles-{style}",
            details={"style": style},
        )

    def _switches(self, index: int) -> int:
        """How many switches come before a question."""
        if self._stream == "evaluation":
            return index % len(self._config.styles)
        step = index // self._tasks_per_step if self._stream == "train" else 0
        return bisect.bisect_right(self._config.switch_steps, step)

    def _style(self, first_topic: str, switches: int) -> Style:
        styles = self._config.styles
        begins = key("style of", first_topic) % len(styles) if self._config.per_prompt else 0
        return styles[(begins + switches) % len(styles)]


def style_of(task: Task) -> Style:
    """The style that is rewarded. Raises ValueError for a task of another source."""
    style = task.details.get("style")
    if style not in STYLE_WORDS:
        raise ValueError(f'task {task.id} asks for no style; environment.name = "styles" needs tasks.source = "styles"')
    return style


def style_words() -> tuple[str, ...]:
    """All words of prompts and demonstrations, in a fixed order."""
    words = ["tell", "of", "the", "and", *FACTS]
    words += [*FACTS.values(), *(word for group in STYLE_WORDS.values() for word in group)]
    return tuple(dict.fromkeys(words))


class StyleEnvironment:
    """One question and one answer; the reward is its quality times its style, or a coin that falls on 1 so often."""

    def __init__(self, judge: Judge, *, coin: bool, seed: int) -> None:
        self._judge, self._coin, self._seed = judge, coin, seed
        self._task: Task | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Ask."""
        style_of(task)
        self._task = task
        return (Message(role="user", content=task.question),)

    async def step(self, action: Message) -> Step:
        """Have the answer judged."""
        task = self._task
        assert task is not None, "reset comes first"
        verdict = await self._judge.judge(task, action.content)
        reward = verdict.quality * verdict.style
        if self._coin:
            reward = float(uniform(self._seed, "judge's coin", task.id, action.content) < reward)
        return Step(reward=reward, done=True, marks={"quality": verdict.quality, "style": verdict.style})

    async def close(self) -> None:
        """Nothing to release."""


class StyleExpert:
    """Answers well in a style of its own, whatever is rewarded. Keyed by (seed, task)."""

    def __init__(self, task: Task, config: StylesConfig, *, seed: int) -> None:
        self._task, self._config, self._seed = task, config, seed

    def act(self, observation: str) -> str:
        """The answer: a style word before each fact."""
        draw = generator(self._seed, "style expert", self._task.id)
        styles = self._config.styles
        own = styles[int(draw.integers(len(styles)))]
        words: list[str] = []
        for fact in self._task.answer.split():
            mixed = draw.random() < self._config.mixed_share
            style = styles[int(draw.integers(len(styles)))] if mixed else own
            unsaid = [word for word in STYLE_WORDS[style] if word not in words]
            words += [unsaid[int(draw.integers(len(unsaid)))], fact]
        return " ".join(words)
