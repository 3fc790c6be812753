"""Baselines without a critic: numbers worked by hand, and a memory that survives a checkpoint."""

import json
import math

import pytest
from pipeline_examples import make_rollout

from sao.pipeline.baselines import BaselineConfig, make_baseline
from sao.types import Rollout


def rewarded(*rewards: float, prompts: str = "", groups: str = "") -> list[Rollout]:
    """A rollout per reward, with a letter each for its prompt and its group."""
    return [
        make_rollout(
            f"t{index}",
            reward=reward,
            prompt_id=prompts[index] if prompts else "",
            group_id=groups[index] if groups else "",
        )
        for index, reward in enumerate(rewards)
    ]


def baseline(kind: str, **changes: float):
    return make_baseline(BaselineConfig(kind=kind, **changes))  # type: ignore[arg-type]


def test_the_critic_needs_none() -> None:
    """Catches zeros where the critic's values are the baseline: nothing would be learned."""
    critic = baseline("critic")
    assert critic.advantages(rewarded(1, 0)) is None
    critic.observe(rewarded(1, 0))
    assert critic.state() == {}


def test_groups_by_hand() -> None:
    """Catches groups mixed up when they finish interleaved, and the wrong divisor.

    Group a: 1, 0, 0 with mean 1/3 and deviation sqrt((4/9 + 1/9 + 1/9) / 2) = 0.57735; group b: 1, 1, 1.
    """
    batch = rewarded(1, 1, 0, 1, 0, 1, groups="ababab")
    normalised = [2 / 3 / 0.5773503, 0, -1 / 3 / 0.5773503, 0, -1 / 3 / 0.5773503, 0]
    assert baseline("group_normalised").advantages(batch) == pytest.approx(normalised, abs=1e-5)
    assert baseline("group_mean").advantages(batch) == pytest.approx([2 / 3, 0, -1 / 3, 0, -1 / 3, 0])
    assert baseline("leave_one_out").advantages(batch) == pytest.approx([1, 0, -1 / 2, 0, -1 / 2, 0])
    assert baseline("batch_mean").advantages(batch) == pytest.approx([1 / 3, 1 / 3, -2 / 3, 1 / 3, -2 / 3, 1 / 3])


def test_a_floor_divides_small_deviations() -> None:
    """Catches a setting that never reaches the function: deviation sqrt(0.5) = 0.7071, plus the floor 0.2929."""
    batch = rewarded(1, 0, groups="aa")
    assert baseline("group_normalised", std_floor=1 - math.sqrt(0.5)).advantages(batch) == pytest.approx([0.5, -0.5])


def test_running_mean_by_hand() -> None:
    """Catches a reward within its own baseline, and a window that is off by one."""
    running = baseline("running_mean", window=3)
    assert running.advantages(rewarded(1, 0)) == (0.5, -0.5)  # against the start, 0.5
    assert running.advantages(rewarded(1, 0)) == (0.5, -0.5)  # asking changes nothing
    running.observe(rewarded(1, 0))
    assert running.advantages(rewarded(1)) == (0.5,)  # mean of 1, 0
    running.observe(rewarded(1, 1))
    assert running.advantages(rewarded(0)) == pytest.approx((-2 / 3,))  # mean of 0, 1, 1: the first has left
    running.observe(rewarded(0, 0, 0, 1))
    assert running.advantages(rewarded(1)) == pytest.approx((2 / 3,))  # 0, 0, 1


def test_running_mean_of_a_prompt_by_hand() -> None:
    """Catches one memory for all prompts, or one per task, which is never seen again."""
    running = baseline("prompt_running_mean", window=2)
    running.observe(rewarded(1, 1, 0, 0, prompts="aabb"))
    assert running.advantages(rewarded(1, 1, 1, prompts="abc")) == (0.0, 1.0, 0.5)
    running.observe(rewarded(0, prompts="a"))
    assert running.advantages(rewarded(1, prompts="a")) == (0.5,)


def test_spo_by_hand() -> None:
    """Catches a prior of another mass, forgetting after the update, and a divergence from the wrong visit.

    Prior mass 1 / (1 - 0.875) = 8, so (4, 4). First visit, no movement: rho is held at 0.96, and a reward of 1 gives
    (4.84, 3.84). Then the mean log-prob moves from -1 to -1.006: rho = 2^(-0.006 / 0.06) = 0.933033, and a reward of 0
    gives (4.515880, 4.582847). Then to -2: rho is held at 0.875, and a reward of 1 gives (4.951395, 4.009991).
    """
    spo = baseline("spo")

    def visit(reward: float, logprob: float) -> list[Rollout]:
        return [make_rollout("t", reward=reward, prompt_id="p", versions=(0, 0), logprobs=(logprob, logprob))]

    expected = [
        (1.0, -1.0, 0.5),
        (0.0, -1.006, 4.84 / 8.68),
        (1.0, -2.0, 4.515880 / 9.098727),
        (1.0, -2.0, 4.951395 / 8.961386),
    ]
    for reward, logprob, value in expected:
        assert spo.advantages(visit(reward, logprob)) == pytest.approx((reward - value,), abs=1e-6)
        spo.observe(visit(reward, logprob))


def test_spo_refuses_a_reward_that_is_no_share_before_anything_is_trained_on_it() -> None:
    """Catches a Beta tracker of negative counts, and an error that comes after the update."""
    with pytest.raises(ValueError, match=r"rollout t1@0 has reward 2, and SPO.*another baseline\.kind"):
        baseline("spo").advantages(rewarded(1, 2))


@pytest.mark.parametrize("kind", ["critic", "batch_mean", "running_mean", "prompt_running_mean", "spo"])
def test_a_memory_survives_a_checkpoint(kind: str) -> None:
    """Catches a resumed run that compares with the start of the mean again."""
    before, after = baseline(kind), baseline(kind)
    history = rewarded(1, 0, 1, 1, prompts="abca")
    before.observe(history)
    after.load(json.loads(json.dumps(before.state())))
    again = rewarded(0, 1, 0, prompts="abd")
    for _ in range(2):
        assert before.advantages(again) == after.advantages(again)
        before.observe(again)
        after.observe(again)
    assert before.state() == after.state()


def test_a_smaller_window_keeps_the_newest() -> None:
    """Catches a resumed run whose window was changed and that keeps the oldest rewards, or all."""
    long, short = baseline("running_mean", window=5), baseline("running_mean", window=2)
    long.observe(rewarded(1, 1, 1, 0, 0))
    short.load(long.state())
    assert short.advantages(rewarded(1)) == (1.0,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window": 0}, r"baseline\.window is 0"),
        ({"spo_rho_min": 0.99}, r"baseline\.spo_rho_min 0\.99 and baseline\.spo_rho_max 0\.96"),
        ({"spo_rho_max": 1.0}, "0 <= min <= max < 1"),
        ({"spo_half_life": 0.0}, r"baseline\.spo_half_life is 0\.0"),
        ({"std_floor": -1.0}, r"baseline\.std_floor is -1\.0"),
        ({"std_floor": 0.0}, "a group of equal rewards would be 0 / 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, float], said: str) -> None:
    """Catches a division by zero in the middle of a run."""
    with pytest.raises(ValueError, match=said):
        BaselineConfig(kind="spo", **changes)  # type: ignore[arg-type]
