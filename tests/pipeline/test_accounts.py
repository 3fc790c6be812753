"""Counts, and ages of tokens along the version tree."""

from dataclasses import replace

import numpy as np
import pytest
from pipeline_examples import make_rollout

from sao.observe.metrics import Metrics
from sao.pipeline.accounts import Accounts, age_metrics, gap_metrics, rollout_metrics, token_ages
from sao.store.versions import VersionTree

# A run that published 0 .. 5, was stopped, went on from 3 as 6 (parent 3), 7, and then from 3 again as 8.
#
#     0 - 1 - 2 - 3 - 4 - 5
#                 |\
#                 | 6 - 7
#                  \
#                   8
TREE = VersionTree({0: None, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 3, 7: 6, 8: 3})


def values(metrics: Metrics) -> dict[str, float]:
    return {key: metric.value for key, metric in metrics.items()}


def test_ages_on_one_branch_are_updates_passed() -> None:
    """Catches ages off by one: a token of the version that computes the loss has age 0."""
    rollouts = [make_rollout("a", versions=(3, 4, 5)), make_rollout("b", versions=(5, 1))]
    assert token_ages(rollouts, TREE, 5).tolist() == [2, 1, 0, 0, 4]


def test_ages_across_a_dead_branch_go_up_and_down() -> None:
    """Catches the difference of numbers: from the dead 5 up to 3 and down to 7 are 2 + 2 updates, not 2."""
    rollouts = [make_rollout("a", versions=(2, 3, 4, 5)), make_rollout("b", versions=(5, 6, 7))]
    assert token_ages(rollouts, TREE, 7).tolist() == [3, 2, 3, 4, 4, 1, 0]
    assert token_ages(rollouts, TREE, 8).tolist() == [2, 1, 2, 3, 3, 2, 3]


def test_age_metrics_by_hand() -> None:
    """Catches quantiles over rollouts instead of tokens, and a queue age that is not of the newest token.

    Ages at version 7: 3, 2, 3, 4 and 4, 1, 0. Mean 17/7; sorted 0 1 2 3 3 4 4. Newest token of each: 2 and 0.
    """
    rollouts = [make_rollout("a", versions=(2, 3, 4, 5)), make_rollout("b", versions=(5, 6, 7))]
    found = values(age_metrics(rollouts, TREE, 7))
    assert found["age/mean"] == pytest.approx(17 / 7)
    assert (found["age/p50"], found["age/max"], found["age/queue"]) == (3.0, 4.0, 1.0)
    assert found["age/p90"] == pytest.approx(np.quantile([0, 1, 2, 3, 3, 4, 4], 0.9))


def test_an_unknown_version_is_an_error() -> None:
    """Catches an age of 0 for a token whose version nobody published."""
    with pytest.raises(ValueError, match="no common ancestor"):
        token_ages([make_rollout("a", versions=(12,))], TREE, 8)


def test_nothing_gives_no_metrics() -> None:
    """Catches 0/0 at the end of a source."""
    assert age_metrics([], TREE, 8) == {}
    assert age_metrics([make_rollout("a", versions=())], TREE, 8) == {}
    assert rollout_metrics([]) == {}


def test_noise_and_staleness_are_told_apart() -> None:
    """Catches staleness taken for disagreement with the engine, and the zeros of a critic-only step for log-probs.

    Recorded are -1 throughout; the actor at version 5 says -1.5, -1.25 (version 5) and -3 (version 4), and -0.9 (5).
    """
    rollouts = [make_rollout("a", versions=(4, 5, 5)), make_rollout("b", versions=(5,))]
    actor = [[np.array([0, -3, -1.5, -1.25], np.float32)], [np.array([0, -0.9], np.float32)]]
    found = values(gap_metrics(rollouts, actor, TREE, 5))
    assert found["engine/gap_same_tokens"] == 3
    assert found["engine/gap_same_mean"] == pytest.approx((0.5 + 0.25 + 0.1) / 3)
    assert found["engine/gap_same_max"] == pytest.approx(0.5)
    assert found["engine/gap_older_mean"] == pytest.approx(2.0)
    assert set(values(gap_metrics(rollouts, actor, TREE, 8))) == {"engine/gap_same_tokens", "engine/gap_older_mean"}
    assert gap_metrics(rollouts, [[np.zeros_like(part) for part in parts] for parts in actor], TREE, 5) == {}
    assert gap_metrics([], [], TREE, 5) == {}


def test_rollout_metrics_are_means_over_rollouts() -> None:
    """Catches means over tokens, in which long rollouts weigh more."""
    found = values(rollout_metrics([make_rollout("a", reward=1.0, versions=(0,) * 9), make_rollout("b")]))
    assert found["rollout/reward"] == 0.5
    assert (found["rollout/action_tokens"], found["rollout/tokens"]) == (5.0, 6.0)
    assert (found["rollout/seconds"], found["rollout/tool_seconds"], found["rollout/truncated_share"]) == (2.0, 0.5, 0)


def test_a_mark_is_the_mean_over_the_rollouts_that_have_it() -> None:
    """Catches a rollout without a mark that counts as 0: one that was cut before its answer could be judged."""
    marks: list[dict[str, float]] = [{"style": 0.25, "quality": 1.0}, {}, {"style": 0.75}]
    rollouts = [replace(make_rollout(name), marks=each) for name, each in zip("abc", marks, strict=True)]
    found = values(rollout_metrics(rollouts))
    assert (found["rollout/mark_style"], found["rollout/mark_quality"]) == (0.5, 1.0)
    assert not [key for key in values(rollout_metrics(rollouts[1:2])) if "mark" in key]


def test_counts_go_on_after_a_checkpoint() -> None:
    """Catches counts that start again with each resume, and a name that is counted nowhere."""
    accounts = Accounts({"admitted": 7, "a name of another release": 1})
    accounts.add("admitted", 2)
    accounts.add("trained")
    assert accounts.counts()["admitted"] == 9
    assert values(accounts.metrics())["loop/trained"] == 1
    assert set(accounts.counts()) == set(Accounts.NAMES)
    with pytest.raises(AssertionError):
        accounts.add("lost")


def test_the_failure_share_needs_twenty_attempts_and_looks_at_the_last_hundred() -> None:
    """Catches a run stopped by its first failure, and one that a good beginning keeps alive for ever."""
    accounts = Accounts({})
    for _ in range(19):
        accounts.attempt(failed=True)
    assert accounts.failure_share(retries=False) == 0.0
    accounts.attempt(failed=False)
    assert accounts.failure_share(retries=False) == 0.95
    for _ in range(1000):
        accounts.attempt(failed=False)
    for _ in range(60):
        accounts.attempt(failed=True)
    assert accounts.failure_share(retries=False) == 0.6


def test_a_share_with_retries_needs_retries_that_fail() -> None:
    """Catches one incident of many episodes taken for a broken world, and a broken world taken for an incident."""
    accounts = Accounts({})
    for _ in range(100):
        accounts.attempt(failed=True)
    assert accounts.failure_share(retries=True) == 0.0, "nothing was tried again yet"
    for failed in (True, True, True, True, False):
        accounts.attempt(failed=failed, retry=True)
    assert accounts.failure_share(retries=True) == pytest.approx(0.8)
    for _ in range(11):
        accounts.attempt(failed=False, retry=True)
    assert accounts.failure_share(retries=True) == pytest.approx(0.25)
