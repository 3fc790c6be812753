"""Places: held from admission to release, never leaked, whole groups in the order of completion."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pipeline_examples import make_rollout, make_task

from sao.pipeline.admission import Admission, Member


def members_of(group_id: str, size: int) -> list[Member]:
    """A group as it is admitted."""
    ids = [group_id] if size == 1 else [f"{group_id}#{index}" for index in range(size)]
    return [
        Member(task=make_task(name), group_id=group_id, index=index, attempt=0, cursor=1, admitted=0.0)
        for index, name in enumerate(ids)
    ]


def rollout_of(member: Member):
    """What playing the member gives."""
    return make_rollout(member.key, group_id=member.group_id, attempt=member.attempt)


@dataclass
class Ledger:
    """The same bookkeeping, done the slow and plain way: a state for every member."""

    state: dict[str, str] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    taken: list[list[str]] = field(default_factory=list)

    def keys(self, group_id: str) -> list[str]:
        return [key for key, member in self.members.items() if member.group_id == group_id]

    def groups(self) -> list[str]:
        return list(dict.fromkeys(member.group_id for member in self.members.values()))

    def add(self, member: Member) -> None:
        self.members[member.key], self.state[member.key] = member, "pending"
        self.pending.append(member.key)

    def finish(self, key: str) -> None:
        self.state[key] = "finished"
        group_id = self.members[key].group_id
        if all(self.state[other] == "finished" for other in self.keys(group_id)):
            self.ready.append(group_id)

    def remove(self, group_id: str) -> None:
        for key in self.keys(group_id):
            del self.members[key], self.state[key]
            if key in self.pending:
                self.pending.remove(key)
        if group_id in self.ready:
            self.ready.remove(group_id)


class AdmissionMachine(RuleBasedStateMachine):
    """Everything that can happen to places, in any order, a crash included."""

    @initialize(
        group=st.sampled_from([1, 2, 3]), groups=st.integers(1, 3), ahead=st.integers(0, 2), retries=st.integers(0, 2)
    )
    def begin(self, group: int, groups: int, ahead: int, retries: int) -> None:
        self.settings = {
            "batch_size": group * groups, "group_size": group, "max_batches_ahead": ahead, "max_retries": retries,
        }  # fmt: skip
        self.size, self.retries = group, retries
        self.admission = Admission(**self.settings)
        self.ledger = Ledger()
        self.number = 0

    def running(self) -> list[str]:
        return [key for key, state in self.ledger.state.items() if state == "running"]

    def pick(self, data: st.DataObject, keys: list[str]) -> str:
        return data.draw(st.sampled_from(sorted(keys)))

    @rule()
    def admit(self) -> None:
        if self.admission.room:
            members = members_of(f"t{self.number}", self.size)
            self.number += 1
            self.admission.admit(members)
            for member in members:
                self.ledger.add(member)

    @precondition(lambda self: self.ledger.pending)
    @rule()
    def start(self) -> None:
        expected = self.ledger.pending.pop(0)
        assert self.admission.start() == self.ledger.members[expected]
        self.ledger.state[expected] = "running"

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = self.pick(data, self.running())
        member = self.ledger.members[key]
        self.admission.finish(member, rollout_of(member))
        self.ledger.finish(key)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = self.pick(data, self.running())
        member = self.ledger.members[key]
        again = self.admission.retry(member)
        assert (again is not None) == (member.failures < self.retries)
        if again is not None:
            assert next(iter(self.admission.pending)) == key
            assert (again.key, again.attempt, again.failures) == (key, member.attempt + 1, member.failures + 1)
            self.ledger.members[key], self.ledger.state[key] = again, "pending"
            self.ledger.pending.insert(0, key)
        else:
            self.lose_group(member.group_id)

    @precondition(lambda self: any(state != "finished" for state in self.ledger.state.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        key = self.pick(data, [key for key, state in self.ledger.state.items() if state != "finished"])
        self.lose_group(self.ledger.members[key].group_id)

    def lose_group(self, group_id: str) -> None:
        unfinished, finished = self.admission.lose(group_id)
        keys = self.ledger.keys(group_id)
        assert {member.key for member in unfinished} == {key for key in keys if self.ledger.state[key] != "finished"}
        assert {rollout.task_id for rollout in finished} == {
            key for key in keys if self.ledger.state[key] == "finished"
        }
        self.ledger.remove(group_id)
        assert self.admission.lose(group_id) == ([], []), "losing it again changes nothing"

    @rule(partial=st.booleans())
    def take(self, partial: bool) -> None:
        wanted = self.settings["batch_size"] // self.size
        count = min(wanted, len(self.ledger.ready)) if partial or len(self.ledger.ready) >= wanted else 0
        chosen, self.ledger.ready = self.ledger.ready[:count], self.ledger.ready[count:]
        batch = self.admission.take(partial=partial)
        assert [rollout.task_id for rollout in batch] == [key for group in chosen for key in self.ledger.keys(group)]
        if chosen:
            self.ledger.taken.append(chosen)

    @precondition(lambda self: self.ledger.taken)
    @rule()
    def release(self) -> None:
        groups = self.ledger.taken.pop(0)
        self.admission.release([rollout_of(self.ledger.members[key]) for g in groups for key in self.ledger.keys(g)])
        for group in groups:
            self.ledger.remove(group)

    @precondition(lambda self: self.ledger.ready)
    @rule(data=st.data())
    def drop_ready(self, data: st.DataObject) -> None:
        group = self.pick(data, self.ledger.ready)
        unwanted = self.ledger.keys(group)[-1]
        dropped = self.admission.drop_ready(lambda rollout: rollout.task_id == unwanted)
        assert sorted(rollout.task_id for rollout in dropped) == sorted(self.ledger.keys(group))
        self.ledger.remove(group)

    @rule()
    def crash(self) -> None:
        """What was taken and not committed is ready again; what was not finished is played again."""
        order = [*(group for taken in self.ledger.taken for group in taken), *self.ledger.ready]
        complete = [key for group in order for key in self.ledger.keys(group)]
        other = [key for key, state in self.ledger.state.items() if state == "finished" and key not in complete]
        finished = [rollout_of(self.ledger.members[key]) for key in (*complete, *other)]
        pending = [key for key, state in self.ledger.state.items() if state != "finished"]
        self.admission = Admission(**self.settings)
        members = [self.ledger.members[key] for key in pending]
        assert self.admission.restore(members, finished) == []
        self.ledger.taken, self.ledger.ready, self.ledger.pending = [], order, pending
        for key in pending:
            self.ledger.state[key] = "pending"

    @invariant()
    def places_are_those_of_the_groups(self) -> None:
        if not hasattr(self, "admission"):
            return
        held = len(self.ledger.groups()) * self.size
        assert self.admission.held == held <= self.admission.capacity
        assert self.admission.room == (held + self.size <= self.admission.capacity)
        assert self.admission.waiting == len(self.ledger.ready) * self.size
        assert list(self.admission.pending) == self.ledger.pending
        assert set(self.admission.running) == set(self.running())
        assert self.admission.empty == (not self.ledger.pending and not self.running())


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def admission(**changes: int) -> Admission:
    return Admission(**{"batch_size": 4, "group_size": 1, "max_batches_ahead": 1, "max_retries": 1, **changes})


def test_a_batch_that_groups_cannot_fill_is_refused() -> None:
    """Catches a loop that waits for ever for the last two of ten places."""
    with pytest.raises(ValueError, match="batch size 10 is not a multiple of group size 4"):
        admission(batch_size=10, group_size=4)


def test_an_interruption_is_no_failure() -> None:
    """Catches a run that was resumed three times and then gives a rollout no second try."""
    one = admission(max_retries=1)
    member = Member(task=make_task("t"), group_id="t", index=0, attempt=7, cursor=1, admitted=0.0)
    assert one.restore([member], []) == []
    assert one.retry(one.start())
    assert not one.retry(one.start())


def test_an_ending_of_a_lost_group_changes_nothing() -> None:
    """Catches a straggler of a dropped group that comes back to life, or a KeyError."""
    pair = admission(group_size=2)
    first, second = members_of("t", 2)
    pair.admit([first, second])
    pair.start(), pair.start()
    pair.lose("t")
    pair.finish(second, rollout_of(second))
    assert not pair.retry(second)
    assert (pair.held, pair.waiting, pair.empty) == (0, 0, True)


def test_what_can_never_be_whole_again_is_named() -> None:
    """Catches a group without a member that holds its places for ever after a resume."""
    trio = admission(batch_size=6, group_size=3)
    finished = [make_rollout("a#0", group_id="a"), make_rollout("b#1", group_id="b")]
    pending = [*members_of("a", 3)[1:], members_of("b", 3)[0]]
    assert trio.restore(pending, finished) == ["b#1@0", "b#0@0"]
    assert trio.held == 3
    assert list(trio.pending) == ["a#1", "a#2"]


def test_a_restored_group_keeps_the_order_of_its_members() -> None:
    """Catches members sorted as text, 10 before 2, so that a resumed run trains another batch."""
    large = admission(batch_size=12, group_size=12)
    assert large.restore([], [make_rollout(f"t#{index}", group_id="t") for index in range(11, -1, -1)]) == []
    assert [rollout.task_id for rollout in large.take()] == [f"t#{index}" for index in range(12)]


def test_a_restore_beyond_the_capacity_admits_nothing_until_places_are_free() -> None:
    """Catches a smaller batch after a resume that loses rollouts, or admits on top of too many."""
    small = admission(batch_size=2, max_batches_ahead=0)
    assert small.restore([], [make_rollout(f"t{index}") for index in range(5)]) == []
    assert (small.held, small.capacity, small.room) == (5, 2, False)
    for _ in range(2):
        small.release(small.take())
    assert (small.held, small.room) == (1, True)
    assert small.take() == ()
    assert [rollout.task_id for rollout in small.take(partial=True)] == ["t4"]


def test_in_order_a_restore_takes_the_order_of_admission() -> None:
    """Catches batches of short rollouts after a resume, and an earlier source's rollouts that nobody waits for."""
    three = admission(batch_size=2, max_batches_ahead=2, in_order=True)
    finished = [make_rollout(name) for name in ("d", "earlier", "b")]
    assert three.restore([*members_of("a", 1), *members_of("c", 1)], finished, ["a", "b", "c", "d"]) == []
    assert three.take() == ()
    first = three.start()
    three.finish(first, rollout_of(first))
    assert [rollout.task_id for rollout in three.take()] == ["earlier", "a"]
    assert three.take() == ()
    second = three.start()
    three.finish(second, rollout_of(second))
    assert [rollout.task_id for rollout in three.take()] == ["b", "c"]


def test_in_order_a_batch_waits_for_those_that_were_admitted_first() -> None:
    """Catches a batch that leaves out the slowest, and one that never comes since what was taken counts as missing."""
    three = admission(batch_size=2, max_batches_ahead=2, in_order=True)
    for name in "abcde":
        three.admit(members_of(name, 1))
    started = {member.key: member for member in (three.start() for _ in range(5))}
    taken = []
    for name in "dbca":
        three.finish(started[name], rollout_of(started[name]))
        if batch := three.take():
            taken.append([rollout.task_id for rollout in batch])
    assert taken == [["a", "b"]]
    assert three.full
    assert [rollout.task_id for rollout in three.take()] == ["c", "d"]
    assert (three.take(), three.take(partial=True)) == ((), ())
    three.finish(started["e"], rollout_of(started["e"]))
    assert not three.full
    assert [rollout.task_id for rollout in three.take(partial=True)] == ["e"]
