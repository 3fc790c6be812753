"""Rows and micro-batches: numbers worked by hand, and properties over made-up rollouts."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.pipeline.packing import pack, rows, shuffled_batches
from sao.types import Rollout, Sequence, StopReason


def sequence(mask: str, *, first_id: int = 10, turns: list[int] | None = None, **fields: object) -> Sequence:
    """One character per token: `o` observed, `a` sampled, `R` sampled and rewarded with 1."""
    action_mask = np.array([character in "aR" for character in mask], bool)
    return Sequence(
        token_ids=np.arange(first_id, first_id + len(mask), dtype=np.int32),
        action_mask=action_mask,
        rollout_logprobs=np.where(action_mask, -0.5, 0).astype(np.float32),
        policy_versions=np.where(action_mask, 3, -1).astype(np.int32),
        rewards=np.array([character == "R" for character in mask], np.float32),
        turns=np.array(turns or [0] * len(mask), np.int32),
        **fields,  # type: ignore[arg-type]
    )


def rollout(*sequences: Sequence, name: str = "r", stop: StopReason = StopReason.FINISHED) -> Rollout:
    return Rollout(
        id=name, task_id=name, prompt_id=name, group_id=name, attempt=0, sequences=sequences, stop_reason=stop
    )


def test_pack_by_hand():
    """A shift that is off by one, or that crosses into the neighbouring sequence."""
    packed = pack([sequence("oa"), sequence("ooaoR", first_id=20), sequence("oaa", first_id=30)], 7)
    assert [micro.sequences.tolist() for micro in packed] == [[1, 0], [2]]
    first = packed[0]
    assert first.token_ids.tolist() == [20, 21, 22, 23, 24, 10, 11]
    assert first.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert first.sequence_of_token.tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert first.scored_index.tolist() == [2, 4, 6]
    assert first.predictor_index.tolist() == [1, 3, 5]
    assert first.target_ids.tolist() == [22, 24, 11]
    assert first.row.tolist() == [1, 1, 0]
    assert first.column.tolist() == [2, 4, 1]
    assert first.last_index.tolist() == [4, 6]


def test_pack_with_observations_leaves_out_first_tokens():
    """A first token scored from the last token of the sequence packed before it."""
    packed = pack([sequence("ooa"), sequence("oa")], 8, score_observations=True)
    assert packed[0].scored_index.tolist() == [1, 2, 4]


def test_a_sequence_longer_than_the_budget_stands_alone():
    """A long trajectory that is cut, dropped, or loops for ever."""
    packed = pack([sequence("oaaaa"), sequence("oa"), sequence("oa")], 4)
    assert [len(micro.token_ids) for micro in packed] == [5, 4]


def test_an_action_without_a_predecessor_is_refused():
    """A first action token valued from another sequence's last hidden state (index -1 wraps around)."""

    class Bare:
        token_ids = np.array([1, 2], np.int32)
        action_mask = np.array([True, False])

    with pytest.raises(ValueError, match="starts with an action"):
        pack([Bare()], 8)


def test_a_budget_of_nothing_is_refused():
    """A budget of 0 that silently gives every sequence a micro-batch of its own."""
    with pytest.raises(ValueError, match="token budget is 0"):
        pack([sequence("oa")], 0)


def test_rows_by_hand():
    """Rewards or versions that slip against the tokens when a rollout has several sequences."""
    arrays = rows(
        [
            rollout(
                sequence("oaoa", turns=[0, 0, 1, 1]),
                sequence("oaa", first_id=20, parent=0, branch_at=1),
                sequence("oR", first_id=30, parent=0, continues_parent=True),
                stop=StopReason.MAX_TURNS,
            ),
            rollout(sequence("oR", first_id=40)),
        ]
    )
    assert arrays.token_ids.tolist() == [[10, 11, 12, 13, 30, 31], [20, 21, 22, 0, 0, 0], [40, 41, 0, 0, 0, 0]]
    assert arrays.action_mask.astype(int).tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert arrays.predicted.astype(int).tolist() == [[0, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert arrays.rewards.tolist() == [[0, 0, 0, 0, 0, 1], [0] * 6, [0, 1, 0, 0, 0, 0]]
    assert arrays.policy_versions[1].tolist() == [-1, 3, 3, -1, -1, -1]
    assert arrays.num_action_tokens.tolist() == [5, 5, 1]
    assert arrays.rollout_of_row.tolist() == [0, 0, 1]
    assert arrays.truncated.tolist() == [True, False, False]
    assert arrays.places.tolist() == [[0, 0], [1, 0], [0, 4], [2, 0]]
    split = arrays.split(arrays.token_ids)
    assert [[piece.tolist() for piece in of_rollout] for of_rollout in split] == [
        [[10, 11, 12, 13], [20, 21, 22], [30, 31]],
        [[40, 41]],
    ]


def test_turns_go_on_where_a_continued_sequence_counts_from_zero():
    """Two turns of a compacted rollout that step-level GAE would take for one."""
    again = rows([rollout(sequence("oaoa", turns=[0, 0, 1, 1]), sequence("oa", parent=0, continues_parent=True))])
    assert again.turns.tolist() == [[0, 0, 1, 1, 2, 2]]
    global_numbers = sequence("oa", turns=[5, 5], parent=0, continues_parent=True)
    going_on = rows([rollout(sequence("oaoa", turns=[0, 0, 1, 1]), global_numbers)])
    assert going_on.turns.tolist() == [[0, 0, 1, 1, 5, 5]]


def test_two_successors_are_refused():
    """Two sequences laid over each other in one row."""
    second, third = (sequence("oa", parent=0, continues_parent=True) for _ in range(2))
    with pytest.raises(ValueError, match="rollout r: sequence 2 says it continues sequence 0"):
        rows([rollout(sequence("oa"), second, third)])


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    made: list[Rollout] = []
    for index in range(draw(st.integers(1, 5))):
        parts = [sequence("o" + draw(st.text("oa", min_size=0, max_size=9)))]
        for number in range(1, draw(st.integers(1, 3))):
            parts.append(
                sequence(
                    "o" + draw(st.text("oa", max_size=5)),
                    parent=number - 1,
                    continues_parent=draw(st.booleans()),
                )
            )
        made.append(rollout(*parts, name=str(index)))
    return made


@settings(max_examples=60, deadline=None)
@given(rollouts(), st.integers(1, 40), st.booleans())
def test_every_scored_token_is_packed_once(made: list[Rollout], budget: int, observations: bool):
    """A token lost, scored twice, put at another token's place, or predicted from another sequence."""
    arrays = rows(made)
    found = np.zeros(arrays.token_ids.shape, int)
    for micro in pack(arrays.sequences, budget, places=arrays.places, score_observations=observations):
        assert len(micro.token_ids) <= budget or len(micro.sequences) == 1
        assert (micro.position_ids[micro.predictor_index] + 1 == micro.position_ids[micro.scored_index]).all()
        of = micro.sequence_of_token
        assert (of[micro.predictor_index] == of[micro.scored_index]).all()
        assert (arrays.token_ids[micro.row, micro.column] == micro.target_ids).all()
        np.add.at(found, (micro.row, micro.column), 1)
    expected = arrays.predicted if observations else arrays.action_mask
    assert (found == expected).all()
    assert int(arrays.action_mask.sum()) == sum(rollout.num_action_tokens for rollout in made)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(30, 60))
def test_packing_wastes_less_than_half(lengths: list[int], budget: int):
    """A packing that leaves micro-batches half empty while others could join them."""
    packed = pack([sequence("o" + "a" * (length - 1)) for length in lengths], budget)
    loads = [len(micro.token_ids) for micro in packed]
    assert all(first + second > budget for first, second in pairwise(loads))


def test_shuffled_batches_cover_each_epoch_once():
    """An item never trained on, or an order that ignores the epoch or the seed."""
    batches = shuffled_batches(list(range(5)), 2, seed=1)
    first, second = ([next(batches) for _ in range(3)] for _ in range(2))
    assert [len(batch) for batch in first] == [2, 2, 1]
    assert all(sorted(chain.from_iterable(epoch)) == [0, 1, 2, 3, 4] for epoch in (first, second))
    assert first != second
    again = shuffled_batches(list(range(5)), 2, seed=1)
    assert [next(again) for _ in range(3)] == first
