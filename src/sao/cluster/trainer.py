"""The trainer in actors, one for each rank, wherever there is room: as in processes of this machine.

    this process                                      each rank's actor
    one thread: request, its input put once  ------>  one at a time, in order
    one thread: news                         <------  signs of life, and how far value pretraining has come

Ranks on several machines meet over TCP at rank 0's node; on one machine in a private folder.
"""

import asyncio
import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from sao.cluster.actors import (
    ActorError,
    Home,
    Resident,
    Where,
    checked,
    end_actor,
    load_ray,
    no_room,
    start_actor,
    told,
)
from sao.cluster.settings import ClusterConfig
from sao.observe.metrics import Metric
from sao.training.optimiser import Progress
from sao.training.parallel import Place
from sao.training.protocol import TrainerError, TrainerLostError
from sao.training.requests import STOP_TIMEOUT_S, Failure, RankTrainer, answer, failure_of
from sao.training.service import MakeCore, TrainerService

_NEWS_S = 2.0
"""How long a rank keeps a question for news waiting."""
_WATCH = "watch"
"""Name of the thread of an actor that answers such questions while a step is computed."""


class _Rank(Resident):
    """Lives on a node and is one rank there."""

    def __init__(self) -> None:
        self._service: TrainerService | None = None
        self._first = True
        self._news: list[tuple[int, int, dict[str, Metric]]] = []
        self._changed = threading.Condition()

    def free_port(self, host: str) -> int:
        """A TCP port where ranks can meet."""
        with socket.socket() as probe:
            probe.bind((host, 0))
            return probe.getsockname()[1]

    def begin(self, make_core: MakeCore, place: Place | None, threads: int) -> Failure | None:
        """Meet the other ranks and build what trains."""
        self._first = place is None or place.rank == 0
        try:
            self._service = TrainerService(
                make_core, place, threads=threads, progress=self._note if self._first else None
            )
        except Exception as error:
            return failure_of(error)
        return None

    def ask(self, method: str, inputs: tuple[object, ...]) -> object:
        """One request."""
        assert self._service is not None
        return answer(self._service, method, inputs, first=self._first)

    def news(self, seen: int) -> list[tuple[int, int, dict[str, Metric]]]:
        """What value pretraining has come to after `seen` items; waits a little for some."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._news) > seen, timeout=_NEWS_S)
            return self._news[seen:]

    def stop(self) -> None:
        """Release the connections to the other ranks."""
        if self._service is not None:
            self._service.leave()

    def _note(self, done: int, total: int, metrics: dict[str, Metric]) -> None:
        with self._changed:
            self._news.append((done, total, metrics))
            self._changed.notify_all()


class RayTrainer(RankTrainer):
    """Implements `Trainer` over actors. They start with the constructor; requests may come at once."""

    def __init__(
        self,
        make_core: MakeCore,
        cluster: ClusterConfig,
        *,
        threads: int,
        timeout_s: float,
        progress: Progress | None = None,
        place: Place | None = None,
    ) -> None:
        """`place` as for ProcessTrainer: how many ranks there are, and how they compute. None: one, unsharded."""
        places: list[Place | None] = [None]
        if place is not None:
            places = [replace(place, rank=rank) for rank in range(place.num_ranks)]
        super().__init__(len(places), timeout_s=timeout_s, progress=progress)
        self._cluster = cluster
        self._meeting = tempfile.mkdtemp(prefix="sao-ranks-") if place and cluster.address == "local" else ""
        self._handles = [
            start_actor(_Rank, cluster.trainer, concurrency_groups={_WATCH: 1}) for _ in range(self._num_ranks)
        ]
        self.places: list[Where] = []
        """Where the ranks are, once they have been placed."""
        self._stopped = threading.Event()
        self._carrier = ThreadPoolExecutor(1, "sao-trainer-requests")
        self._watcher = threading.Thread(target=self._watch, name="sao-trainer-news", daemon=True)
        self._carrier.submit(self._begin, make_core, places, threads)

    async def stop(self) -> None:
        """End the actors."""
        with self._lock:
            self._end = self._end or TrainerError("the trainer was stopped")
        await asyncio.to_thread(self._stop)

    def _begin(self, make_core: MakeCore, places: Sequence[Place | None], threads: int) -> None:
        """Place the ranks and let them meet; any failure is that of every request."""
        ray = load_ray()
        try:
            self._place(ray)
            met = self._meet(ray, places)
            self._watcher.start()
            started = [
                handle.begin.remote(make_core, place, threads) for handle, place in zip(self._handles, met, strict=True)
            ]
            left = list(started)
            while left:  # as they come: a rank that failed is waited for by the others
                ready, left = ray.wait(left, num_returns=1)
                failure = ray.get(ready[0])
                if failure is not None:
                    rank = started.index(ready[0])
                    raise replace(failure, text=f"{self._name(rank)}: {failure.text}").error()
                self._started()
        except ray.exceptions.RayError as error:
            self._fail(TrainerLostError(f"the trainer was lost while it started: {told(error)}"))
        except Exception as error:  # of any kind: it is told to whoever asks the trainer
            self._fail(error)

    def _place(self, ray: Any) -> None:
        room = self._cluster.trainer
        try:
            answers = ray.get(
                [handle.where.remote(Home.here()) for handle in self._handles], timeout=self._cluster.place_timeout_s
            )
            self.places = [checked(answer, room) for answer in answers]
        except ray.exceptions.GetTimeoutError as error:
            count = f" ({self._num_ranks} of these)" if self._num_ranks > 1 else ""
            lost = no_room(replace(room, what=room.what + count), self._cluster.place_timeout_s)
            raise TrainerLostError(str(lost)) from error
        except ActorError as error:
            raise TrainerError(str(error)) from error

    def _meet(self, ray: Any, places: Sequence[Place | None]) -> list[Place | None]:
        """Places that know where the ranks meet."""
        interface, where = self._cluster.interface, f"file://{self._meeting}/ranks"
        if self._meeting:
            interface = interface or "lo"
        elif places[0] is not None:
            host = self.places[0].host
            where = f"tcp://{host}:{ray.get(self._handles[0].free_port.remote(host))}"
        return [place and replace(place, rendezvous=where, interface=interface) for place in places]

    def _send(self, number: int, method: str, inputs: tuple[object, ...]) -> None:
        self._carrier.submit(self._carry, number, method, inputs)

    def _carry(self, number: int, method: str, inputs: tuple[object, ...]) -> None:
        """One request to all ranks, until all have answered or are gone."""
        ray = load_ray()
        try:
            shared = ray.put(inputs)
        except Exception as error:  # pickling raises many kinds
            text = f"cannot send the request {method} to the trainer: {error}"
            self._deliver(number, Failure(text=text, kind=TrainerError))
            return
        if self._end is not None:
            return
        calls = {handle.ask.remote(method, shared): rank for rank, handle in enumerate(self._handles)}
        while calls and not self._stopped.is_set():
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=1.0)
            for call in ready:
                rank = calls.pop(call)
                try:
                    self._answered(number, rank, ray.get(call))
                except ray.exceptions.RayError as error:
                    self._lose(rank, error)

    def _watch(self) -> None:
        """Keep a question for news with each rank, which fails when the rank is gone."""
        ray = load_ray()
        seen = [0] * self._num_ranks
        calls = {self._ask_news(rank, 0): rank for rank in range(self._num_ranks)}
        while not self._stopped.is_set():
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=1.0)
            for call in ready:
                rank = calls.pop(call)
                try:
                    news = ray.get(call)
                except ray.exceptions.RayError as error:
                    return self._lose(rank, error)
                for item in news:
                    self._progressed(*item)
                seen[rank] += len(news)
                calls[self._ask_news(rank, seen[rank])] = rank

    def _ask_news(self, rank: int, seen: int) -> Any:
        return self._handles[rank].news.options(concurrency_group=_WATCH).remote(seen)

    def _lose(self, rank: int, error: BaseException) -> None:
        self._fail(TrainerLostError(f"{self._name(rank)} is gone: {told(error)}"))

    def _name(self, rank: int) -> str:
        where = f" ({self.places[rank]})" if self.places else ""
        return (
            f"the trainer{where}" if self._num_ranks == 1 else f"the trainer's rank {rank} of {self._num_ranks}{where}"
        )

    def _end_ranks(self) -> None:
        for handle in self._handles:
            end_actor(handle)

    def _stop(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            ray = load_ray()
            if self.places and ray.is_initialized():
                left = [handle.stop.remote() for handle in self._handles]
                ray.wait(left, num_returns=len(left), timeout=STOP_TIMEOUT_S)
            self._end_ranks()
            self._carrier.shutdown(wait=False, cancel_futures=True)
        if self._watcher.is_alive():
            self._watcher.join(STOP_TIMEOUT_S)
        if self._meeting:
            shutil.rmtree(self._meeting, ignore_errors=True)
