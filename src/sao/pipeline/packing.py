"""From rollouts to arrays: padded rows for the method, packed micro-batches for the models.

This file holds the only next-token shift of the project: `predictor_index = scored_index - 1`.

B rows, T tokens (of a row, or of a micro-batch), S sequences, N scored tokens.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sao.types import OBSERVED, BoolArray, FloatArray, IntArray, Rollout, Sequence

Scalar = TypeVar("Scalar", bound=np.generic)
Item = TypeVar("Item")


class Packable(Protocol):
    """A token list and which of its tokens the policy sampled, each of shape (T,)."""

    @property
    def token_ids(self) -> IntArray:
        """Token ids."""
        ...

    @property
    def action_mask(self) -> BoolArray:
        """True where the policy sampled the token; never at token 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Several sequences laid end to end for one forward pass, with the place of every scored token."""

    token_ids: IntArray
    """(T,)"""
    position_ids: IntArray
    """(T,); restarts at 0 with each sequence, which is how the model tells them apart."""
    sequence_of_token: IntArray
    """(T,) index of the token's sequence in the list that was packed."""
    scored_index: IntArray
    """(N,) where the scored tokens stand; ascending."""
    predictor_index: IntArray
    """(N,) where the hidden state stands that predicts, and values, the scored token."""
    row: IntArray
    """(N,) row of the scored token in the padded arrays."""
    column: IntArray
    """(N,) column of the scored token in the padded arrays."""
    sequences: IntArray
    """(S,) indices of the packed sequences, in their order here."""
    last_index: IntArray
    """(S,) where the last token of each stands; its hidden state values what would come next."""

    @property
    def target_ids(self) -> IntArray:
        """(N,) ids of the scored tokens."""
        return self.token_ids[self.scored_index]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A batch as padded arrays. One row is one rollout's continued sequences end to end; a side branch has its own."""

    token_ids: IntArray
    """(B, T); 0 in the padding."""
    action_mask: BoolArray
    """(B, T); False in the padding."""
    predicted: BoolArray
    """(B, T); True where a token stands before it in its sequence, so that it has a value estimate."""
    rollout_logprobs: FloatArray
    """(B, T); 0 off actions."""
    policy_versions: IntArray
    """(B, T); -1 off actions."""
    rewards: FloatArray
    """(B, T); 0 off actions."""
    turns: IntArray
    """(B, T); grows along a row; the padding belongs to its last turn."""
    num_action_tokens: IntArray
    """(B,) of the whole rollout: l of the length-adaptive lambda."""
    rollout_of_row: IntArray
    """(B,) index of the rollout in the batch."""
    truncated: BoolArray
    """(B,) whether a limit cut the rollout at the end of this row; a side branch never is."""
    sequences: tuple[Sequence, ...]
    """All sequences of all rollouts, in order."""
    places: IntArray
    """(S, 2) row and first column of each sequence."""
    sequences_of_rollout: tuple[int, ...]
    """How many of `sequences` each rollout has."""

    def split(self, padded: NDArray[Scalar]) -> tuple[tuple[NDArray[Scalar], ...], ...]:
        """Cut an array (B, T) into one of shape (T,) per rollout and sequence."""
        pieces = iter(
            padded[row, column : column + len(sequence.token_ids)]
            for (row, column), sequence in zip(self.places.tolist(), self.sequences, strict=True)
        )
        return tuple(tuple(next(pieces) for _ in range(count)) for count in self.sequences_of_rollout)


def rows(rollouts: Many[Rollout]) -> Rows:
    """Lay rollouts out as padded rows. Raises ValueError where a sequence continues what it cannot continue."""
    chains: list[tuple[int, list[int]]] = []
    sequences: list[Sequence] = []
    for index, rollout in enumerate(rollouts):
        chains += [(index, [len(sequences) + member for member in chain]) for chain in _chains(rollout)]
        sequences.extend(rollout.sequences)
    first_row = [row == 0 or chains[row - 1][0] != index for row, (index, _) in enumerate(chains)]
    rollout_of_row = np.array([index for index, _ in chains], np.int32)
    places = np.zeros((len(sequences), 2), np.int32)
    for row, (_, chain) in enumerate(chains):
        starts = np.cumsum([0, *(len(sequences[member].token_ids) for member in chain[:-1])])
        places[chain] = np.stack([np.full(len(chain), row), starts], axis=1)
    width = max((int(column) + len(s.token_ids) for (_, column), s in zip(places, sequences, strict=True)), default=0)

    def padded(name: str, fill: int, dtype: type[Scalar]) -> NDArray[Scalar]:
        table = np.full((len(chains), width), fill, dtype)
        for (row, column), sequence in zip(places.tolist(), sequences, strict=True):
            table[row, column : column + len(sequence.token_ids)] = getattr(sequence, name)
        return table

    action_mask = padded("action_mask", False, np.bool_)
    predicted = np.zeros((len(chains), width), np.bool_)
    for (row, column), sequence in zip(places.tolist(), sequences, strict=True):
        predicted[row, column + 1 : column + len(sequence.token_ids)] = True
    turns = padded("turns", 0, np.int32)
    for row, (_, chain) in enumerate(chains):
        _number_turns(turns[row], action_mask[row], [sequences[member] for member in chain])
    return Rows(
        token_ids=padded("token_ids", 0, np.int32),
        action_mask=action_mask,
        predicted=predicted,
        rollout_logprobs=padded("rollout_logprobs", 0, np.float32),
        policy_versions=padded("policy_versions", OBSERVED, np.int32),
        rewards=padded("rewards", 0, np.float32),
        turns=turns,
        num_action_tokens=np.array([rollouts[index].num_action_tokens for index in rollout_of_row], np.int32),
        rollout_of_row=rollout_of_row,
        truncated=np.array([rollouts[i].stop_reason.truncated for i in rollout_of_row], np.bool_) & first_row,
        sequences=tuple(sequences),
        places=places,
        sequences_of_rollout=tuple(len(rollout.sequences) for rollout in rollouts),
    )


def _chains(rollout: Rollout) -> Iterator[list[int]]:
    """Indices of the rollout's sequences, each chain of continued ones together; the main one first."""
    successor: dict[int, int] = {}
    for index, sequence in enumerate(rollout.sequences):
        if not sequence.continues_parent:
            continue
        parent = sequence.parent
        if parent is None or not 0 <= parent < index or parent in successor:
            raise ValueError(
                f"rollout {rollout.id}: sequence {index} says it continues sequence {parent}; it must continue "
                "an earlier sequence that no other one continues"
            )
        successor[parent] = index
    for index, sequence in enumerate(rollout.sequences):
        if sequence.continues_parent:
            continue
        chain = [index]
        while chain[-1] in successor:
            chain.append(successor[chain[-1]])
        yield chain


def _number_turns(turns: IntArray, action_mask: BoolArray, chain: list[Sequence]) -> None:
    """Move a row's turns on, in place, where a continued sequence starts its numbering again."""
    column = 0
    for sequence in chain:
        end = column + len(sequence.token_ids)
        played, mine = turns[:column][action_mask[:column]], turns[column:end][action_mask[column:end]]
        if len(played) and len(mine) and mine.min() <= played.max():
            turns[column:end] += played.max() - mine.min() + 1
        column = end
    if column:
        turns[column:] = turns[column - 1]


def pack(
    sequences: Many[Packable], token_budget: int, *, places: IntArray | None = None, score_observations: bool = False
) -> list[MicroBatch]:
    """Fill micro-batches of at most `token_budget` tokens, longest sequence first, each into the first with room.

    A sequence is never cut: one longer than the budget gets a micro-batch of its own. Empty ones are left out.
    `places` (S, 2) says where each sequence starts in the padded rows; without it sequence i is row i. Scored are the
    action tokens, or every token that has one before it.
    """
    if token_budget < 1:
        raise ValueError(f"token budget is {token_budget}; it must be at least 1")
    lengths = [len(sequence.token_ids) for sequence in sequences]
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] == 0:
            continue
        chosen = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[chosen].append(index)
        room[chosen] -= lengths[index]
    if places is None:
        places = np.stack([np.arange(len(lengths)), np.zeros(len(lengths))], axis=1).astype(np.int32)
    return [_micro_batch(sequences, members, places, score_observations) for members in bins]


def _micro_batch(
    sequences: Many[Packable], members: list[int], places: IntArray, score_observations: bool
) -> MicroBatch:
    lengths = [len(sequences[i].token_ids) for i in members]
    position_ids = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    action_mask = np.concatenate([sequences[i].action_mask for i in members])
    if (action_mask & (position_ids == 0)).any():
        raise ValueError("a sequence starts with an action token; nothing precedes it, so nothing predicts it")
    scored = np.flatnonzero(position_ids > 0 if score_observations else action_mask).astype(np.int32)
    sequence_of_token = np.repeat(np.array(members, np.int32), lengths)
    return MicroBatch(
        token_ids=np.concatenate([sequences[i].token_ids for i in members]).astype(np.int32),
        position_ids=position_ids,
        sequence_of_token=sequence_of_token,
        scored_index=scored,
        predictor_index=scored - 1,
        row=places[sequence_of_token[scored], 0],
        column=places[sequence_of_token[scored], 1] + position_ids[scored],
        sequences=np.array(members, np.int32),
        last_index=(np.cumsum(lengths) - 1).astype(np.int32),
    )


def shuffled_batches(items: Many[Item], size: int, seed: int) -> Iterator[list[Item]]:
    """Endless batches, each epoch in an order of its own that depends on the seed; an epoch's last may be short."""
    epoch = 0
    while items:
        order = np.random.default_rng((seed, epoch)).permutation(len(items))
        for start in range(0, len(order), size):
            yield [items[index] for index in order[start : start + size]]
        epoch += 1
