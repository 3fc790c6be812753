"""Places: how many rollouts may be in the system, who holds one, and which finished ones make a batch.

Pure bookkeeping without waiting. A member (one rollout of one group; a single rollout is a group of one) goes

    admitted -> pending -> running -> finished -> ready -> taken -> released
                  ^           |
                  +-- retry --+--> lost: its whole group is dropped

and holds a place from `admit` to `release`, or until its group is dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from sao.rollout.worker import rollout_id
from sao.types import Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout to play."""

    task: Task
    """What is played; each member of a group has an id of its own."""
    group_id: str
    """Shared by rollouts of one prompt that are compared; the task's id for single ones."""
    index: int
    """Place within the group."""
    attempt: int
    """0 for the first try; one more after each failure or interruption."""
    cursor: int
    """Tasks taken from the source when this one was admitted, itself included."""
    admitted: float
    """Seconds of the clock."""
    failures: int = 0
    """Infrastructure failures so far; interruptions by a stop or a crash are none."""

    @property
    def key(self) -> str:
        """The member across its attempts."""
        return self.task.id

    @property
    def rollout_id(self) -> str:
        """This attempt."""
        return rollout_id(self.task.id, self.attempt)


@dataclass(slots=True)
class _Group:
    members: list[str]
    finished: dict[str, Rollout] = field(default_factory=dict)


class Admission:
    """Who is in the system. All collections keep the order of events; no operation is slower for what others hold."""

    def __init__(
        self, *, batch_size: int, group_size: int, max_batches_ahead: int, max_retries: int, in_order: bool = False
    ) -> None:
        """`in_order`: a batch is of the groups that were admitted first, whichever ended first."""
        if batch_size % group_size:
            raise ValueError(
                f"batch size {batch_size} is not a multiple of group size {group_size}; change one of them"
            )
        self.batch_size = batch_size
        self.group_size = group_size
        self.capacity = (max_batches_ahead + 1) * batch_size
        self.max_retries = max_retries
        self.in_order = in_order
        self.pending: OrderedDict[str, Member] = OrderedDict()
        self.running: dict[str, Member] = {}
        self._groups: dict[str, _Group] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._taken: set[str] = set()

    @property
    def held(self) -> int:
        """Places taken."""
        return len(self._groups) * self.group_size

    @property
    def waiting(self) -> int:
        """Rollouts in complete groups, ready for a batch."""
        return len(self._ready) * self.group_size

    @property
    def full(self) -> bool:
        """Whether `take` gives a whole batch."""
        return len(self._next()) * self.group_size == self.batch_size

    @property
    def room(self) -> bool:
        """Whether the places allow one more group."""
        return self.held + self.group_size <= self.capacity

    @property
    def empty(self) -> bool:
        """Whether nothing more can become ready by itself."""
        return not self.pending and not self.running

    def admit(self, members: list[Member]) -> None:
        """Take the places of one whole group."""
        assert len(members) == self.group_size, "a group is admitted whole"
        group_id = members[0].group_id
        assert group_id not in self._groups, f"group {group_id} is admitted already"
        self._groups[group_id] = _Group([member.key for member in members])
        self.pending.update((member.key, member) for member in members)

    def restore(self, pending: Iterable[Member], finished: Iterable[Rollout], order: Iterable[str] = ()) -> list[str]:
        """Take back what a stopped run had admitted: members to play again, and rollouts not yet consumed.

        `order`: groups by their first admission. Places may exceed the capacity for a while, after a change of the
        configuration. Returns the ids of rollouts whose group can never be whole again; the caller drops them, counted.
        """
        finished = list(finished)
        pending = list(pending)
        keys: dict[str, list[str]] = {}
        for group_id, key in [(r.group_id, r.task_id) for r in finished] + [(m.group_id, m.key) for m in pending]:
            keys.setdefault(group_id, []).append(key)
        whole = {group_id for group_id, members in keys.items() if len(members) == self.group_size}
        places = {group_id: place for place, group_id in enumerate(order)}
        for group_id in sorted(keys, key=lambda group_id: places.get(group_id, -1)):
            if group_id in whole:
                # Keys of a group differ by their index, so the shorter is the smaller: 2 before 10.
                self._groups[group_id] = _Group(sorted(keys[group_id], key=lambda key: (len(key), key)))
        self.pending.update((member.key, member) for member in pending if member.group_id in whole)
        for rollout in finished:
            if rollout.group_id in whole:
                self._finish(rollout)
        lost = [rollout.id for rollout in finished if rollout.group_id not in whole]
        return lost + [member.rollout_id for member in pending if member.group_id not in whole]

    def start(self) -> Member:
        """Move the first pending member to running."""
        _, member = self.pending.popitem(last=False)
        self.running[member.key] = member
        return member

    def finish(self, member: Member, rollout: Rollout) -> None:
        """A member ended well; its group becomes ready when all have."""
        if self.running.pop(member.key, None) is not None:
            self._finish(rollout)

    def _finish(self, rollout: Rollout) -> None:
        group = self._groups[rollout.group_id]
        group.finished[rollout.task_id] = rollout
        if len(group.finished) == len(group.members):
            self._ready[rollout.group_id] = None

    def retry(self, member: Member) -> Member | None:
        """A member failed through no fault of the policy: queue its next attempt, first in line, if a try is left."""
        if member.failures >= self.max_retries or member.key not in self.running:
            return None
        del self.running[member.key]
        again = replace(member, attempt=member.attempt + 1, failures=member.failures + 1)
        self.pending[member.key] = again
        self.pending.move_to_end(member.key, last=False)
        return again

    def lose(self, group_id: str) -> tuple[list[Member], list[Rollout]]:
        """Drop a whole group and free its places; returns its unfinished members, to cancel, and finished rollouts."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return [], []
        waiting = [self.pending.pop(key) for key in group.members if key in self.pending]
        playing = [self.running.pop(key) for key in group.members if key in self.running]
        self._ready.pop(group_id, None)
        return waiting + playing, list(group.finished.values())

    def drop_ready(self, unwanted: Callable[[Rollout], bool]) -> list[Rollout]:
        """Drop ready groups with an unwanted member and free their places; returns their rollouts."""
        dropped: list[Rollout] = []
        for group_id in list(self._ready):
            if any(unwanted(rollout) for rollout in self._groups[group_id].finished.values()):
                dropped += self.lose(group_id)[1]
        return dropped

    def take(self, *, partial: bool = False) -> tuple[Rollout, ...]:
        """The next batch, or () while there are too few; `partial` takes what is there.

        In the order of completion (of groups), or of admission. Places stay held until `release`.
        """
        group_ids = self._next()
        if len(group_ids) * self.group_size < self.batch_size and not partial:
            return ()
        rollouts: list[Rollout] = []
        for group_id in group_ids:
            del self._ready[group_id]
            group = self._groups[group_id]
            rollouts += [group.finished[key] for key in group.members]
            self._taken.add(group_id)
        return tuple(rollouts)

    def _next(self) -> list[str]:
        """Groups of the next batch that are ready."""
        ready: Iterable[str] = self._ready
        if self.in_order:
            ready = takewhile(self._ready.__contains__, (group for group in self._groups if group not in self._taken))
        return list(islice(ready, self.batch_size // self.group_size))

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Free the places of a trained batch."""
        for group_id in {rollout.group_id: None for rollout in rollouts}:
            self._taken.remove(group_id)
            del self._groups[group_id]
