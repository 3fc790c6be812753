"""A rollout as text says what was sampled, by whom, and what the loss did with it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_examples import make_rollout, make_run

from sao.observe.inspector import format_rollout, format_summaries, inspect_rollout, mask_decision, summarise
from sao.store.log import RolloutLogWriter
from sao.store.records import AttemptEnded, Finished, Published, TokenRecord, Trained
from sao.store.run_folder import RunFolder
from sao.types import FailureKind, Rollout, Sequence, Snapshot, StopReason

CONFIG = """
[algorithm]
policy_loss = "dis"
ratio_low = 0.7
ratio_high = 6.0
"""


def hand_made() -> Rollout:
    sequence = Sequence(
        token_ids=np.array([5, 6, 7, 8, 9, 4], np.int32),
        action_mask=np.array([False, False, True, True, False, True]),
        rollout_logprobs=np.array([0, 0, -1.0, -3.0, 0, -0.5], np.float32),
        policy_versions=np.array([-1, -1, 0, 1, -1, 1], np.int32),
        rewards=np.array([0, 0, 0, 0, 0, 1], np.float32),
        turns=np.array([0, 0, 0, 0, 1, 1], np.int32),
    )
    return Rollout(
        id="a@0",
        task_id="a",
        prompt_id="p",
        group_id="a",
        attempt=0,
        sequences=(sequence,),
        stop_reason=StopReason.MAX_TURNS,
        failure=FailureKind.POLICY,
        failure_text="too long",
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tokens = TokenRecord(
        actor_logprobs=np.array([0, 0, -1.5, -1.0, 0, -0.5], np.float32),
        values=np.array([0, 0, 0.25, 0.5, 0, 0.75], np.float32),
        advantages=np.array([0, 0, 0.75, 0.5, 0, 0.25], np.float32),
        returns=np.array([0, 0, 1, 1, 0, 1], np.float32),
    )
    path = tmp_path / "run"
    with RunFolder.create(path) as folder:
        folder.write_config(CONFIG)
        writer = RolloutLogWriter(folder.log, inline=True)
        for version in range(3):
            writer.append(
                Published(
                    snapshot=Snapshot(
                        version=version, parent=version - 1 if version else None, location="", checksum=""
                    )
                )
            )
        writer.append(Finished(rollout=hand_made(), position=0))
        writer.append(Finished(rollout=make_rollout("b", np.random.default_rng(0), 1), position=1))
        writer.append(Trained(step=1, version=3, parent=2, rollout_ids=("a@0",), tokens=((tokens,),)))
        writer.close()
    return path


def test_every_number_of_a_token(run: Path) -> None:
    """Would catch a column of another token, a ratio upside down, or a mask that differs from the loss's."""
    inspected = inspect_rollout(run, "a@0", decode=lambda token_id: f"w{token_id}")
    (tokens,) = inspected.sequences
    assert [token.text for token in tokens] == ["w5", "w6", "w7", "w8", "w9", "w4"]
    assert [token.action for token in tokens] == [False, False, True, True, False, True]
    first, second, third = (token for token in tokens if token.action)
    assert first.ratio == pytest.approx(np.exp(-0.5))
    assert second.ratio == pytest.approx(np.exp(2))
    assert (first.mask, second.mask, third.mask) == ("low", "high", "kept")
    assert (first.version, first.value, first.advantage, first.returned) == (0, 0.25, 0.75, 1.0)
    assert (third.index, third.turn, third.reward) == (5, 1, 1.0)
    assert tokens[0].version is None
    assert inspected.summary.step == 1
    # Ages 2, 1 and 1 when version 2 computed the loss.
    assert inspected.summary.age == pytest.approx(4 / 3)


def test_a_rollout_as_text(run: Path) -> None:
    """Would catch a view from which the ending, the failure or an observation is missing."""
    inspected = inspect_rollout(run, "a@0", decode=lambda token_id: f"w{token_id}\n")
    text = "\n".join(format_rollout(inspected))
    for part in ("trained in step 1", "max_turns", "policy (too long)", "2 observed", r"w5\nw6\n", "low", "reward 1"):
        assert part in text
    assert len(list(format_rollout(inspected, every_token=True))) == len(list(format_rollout(inspected))) + 1


def test_marks_are_in_the_list_and_in_the_rollout(run: Path) -> None:
    """Would catch marks that only metrics show, so that nobody can say which answer got them."""
    marked = replace(hand_made(), id="m@0", task_id="m", marks={"quality": 0.5, "style": 1 / 3})
    with RunFolder.resume(run) as folder:
        writer = RolloutLogWriter(folder.log, inline=True)
        writer.append(Finished(rollout=marked, position=2))
        writer.close()
    listed = list(format_summaries(summarise(run)))
    assert [line.endswith("  quality 0.5  style 0.3333") for line in listed] == [False, False, False, True]
    assert "marks:  quality 0.5  style 0.3333" in list(format_rollout(inspect_rollout(run, "m@0")))
    assert not any(line.startswith("marks") for line in format_rollout(inspect_rollout(run, "a@0")))


def test_a_rollout_that_was_not_trained(run: Path) -> None:
    """Would catch numbers made up for a rollout that no step has seen; and ids stand for text without a decoder."""
    inspected = inspect_rollout(run, "b.0")
    (tokens,) = inspected.sequences
    assert all(token.ratio is None and token.value is None and token.mask == "" for token in tokens)
    assert tokens[0].text == f"<{tokens[0].token_id}>"
    assert inspected.summary.fate == "waiting"
    assert "not trained" in "\n".join(format_rollout(inspected))


def test_the_list_of_rollouts(run: Path) -> None:
    """Would catch an untrained rollout listed as trained, or an ending without its failure."""
    lines = list(format_summaries(summarise(run)))
    assert len(lines) == 3
    assert "max_turns, policy failure" in lines[1]
    assert lines[1].split()[:7] == ["a@0", "1.000", "2", "6", "3", "1", "1.3"]
    assert "(waiting)" in lines[2]
    assert lines[2].split()[5] == "-"


def test_a_rollout_that_is_not_there(run: Path, tmp_path: Path) -> None:
    """Would catch an error that does not help to find the right id."""
    with pytest.raises(ValueError, match=r"no rollout 'a@1'.*a@0"):
        inspect_rollout(run, "a@1")
    empty = make_run(tmp_path / "empty", steps=0)
    assert list(summarise(empty)) == []
    with pytest.raises(ValueError, match="no rollout yet"):
        inspect_rollout(empty, "x")


def test_steps_of_a_dead_branch_are_not_shown(run: Path) -> None:
    """Would catch the numbers of a step that a resume made void."""
    with RunFolder.resume(run) as folder:
        writer = RolloutLogWriter(folder.log, inline=True)
        writer.append(Trained(step=1, version=4, parent=0, rollout_ids=("b.0",), tokens=()))
        writer.close()
    steps = {row.id: row.step for row in summarise(run)}
    assert steps == {"a@0": None, "b.0": 1}
    assert inspect_rollout(run, "a@0").sequences[0][2].ratio is None


def test_a_retried_attempt_says_so(run: Path) -> None:
    """Would catch two attempts of a task that look like two results."""
    with RunFolder.resume(run) as folder:
        writer = RolloutLogWriter(folder.log, inline=True)
        writer.append(
            Finished(rollout=replace(make_rollout("b", np.random.default_rng(1), 1), id="b.1", attempt=1), position=2)
        )
        writer.close()
    assert {row.id: row.fate for row in summarise(run)} == {"a@0": "trained", "b.0": "retried", "b.1": "waiting"}


def test_failed_attempts_are_shown_with_their_tokens(run: Path) -> None:
    """Would catch sampled tokens of which nobody can say what became of them: those of an attempt that failed."""
    failed = replace(hand_made(), failure=FailureKind.INFRASTRUCTURE, failure_text="gone", stop_reason=StopReason.ERROR)
    with RunFolder.resume(run) as folder:
        writer = RolloutLogWriter(folder.log, inline=True)
        for name, rollout in (("c@0", replace(failed, id="c@0", task_id="c")), ("c@1", None), ("a@7", failed)):
            kind = FailureKind.INFRASTRUCTURE
            ended = AttemptEnded(rollout_id=name, failure=kind, failure_text="gone", retried=True, rollout=rollout)
            writer.append(ended)
        last = replace(hand_made(), id="c@2", task_id="c", attempt=2)
        writer.append(Finished(rollout=last, position=2))
        writer.close()
    inspected = inspect_rollout(run, "c@2")
    assert [(each.rollout_id, each.failure) for each in inspected.failed_attempts] == [
        ("c@0", "infrastructure (gone)"),
        ("c@1", "infrastructure (gone)"),
    ]
    assert [token.token_id for token in inspected.failed_attempts[0].sequences[0]] == [5, 6, 7, 8, 9, 4]
    lines = list(format_rollout(inspected))
    assert "failed attempt c@0  failure: infrastructure (gone)  played again" in lines
    assert "attempt 0  tokens 6 (3 sampled)" in lines
    assert "its tokens are not in the log" in lines
    assert [sum(f"<{token}>" in line for line in lines) for token in (7, 8, 4)] == [2, 2, 2]
    # One that failed can be asked for by its own id, and is in the list.
    assert inspect_rollout(run, "c@0").rollout.failure_text == "gone"
    assert {row.id: row.fate for row in summarise(run)}["c@0"] == "retried"


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "decision"),
    [
        ("dis", 0.7, 1.0, "low"),
        ("dis", 0.7001, 1.0, "kept"),
        ("dis", 6.0, -1.0, "high"),
        ("icepop", 0.7, 1.0, "kept"),
        ("icepop", 6.1, 1.0, "high"),
        ("none", 99.0, 1.0, "kept"),
        ("ppo_clip", 0.5, -1.0, "low"),
        ("ppo_clip", 0.5, 1.0, "kept"),
        ("ppo_clip", 2.0, 1.0, "high"),
        ("ppo_clip", 2.0, -1.0, "kept"),
        ("unknown", 1.0, 1.0, ""),
    ],
)
def test_what_each_loss_does_with_a_token(loss: str, ratio: float, advantage: float, decision: str) -> None:
    """Would catch a band that includes its bounds, or a clip that ignores the advantage's sign."""
    algorithm = {
        "policy_loss": loss, "ratio_low": 0.7, "ratio_high": 6.0, "clip_ratio_low": 0.8, "clip_ratio_high": 1.28
    }  # fmt: skip
    assert mask_decision(ratio, advantage, algorithm) == decision
    assert mask_decision(ratio, advantage, {}) == ""
