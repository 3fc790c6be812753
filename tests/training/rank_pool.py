"""Processes that stand by to be ranks: forked from one that has imported torch, since an import takes seconds."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from sao.training.parallel import Place, ShardedRanks

LIMIT_S = 120.0


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            place, work, inputs = connection.recv()
        except EOFError:
            return
        try:
            ranks = ShardedRanks(place)
            try:
                answer = True, work(ranks, *inputs)
            finally:
                ranks.leave()
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


class RankPool:
    """`run` does work on the first `num_ranks` of them; results by rank."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["training_toys", "sao.training.service"])
        self._folder = tempfile.TemporaryDirectory(prefix="sao-test-ranks-")
        self._runs = 0
        self._connections: list[Connection] = []
        self.processes = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self.processes.append(process)

    def run(
        self,
        work: Callable[..., Any],
        *inputs: object,
        num_ranks: int = 2,
        sequence_ranks: int = 1,
        compute_dtype: str = "float32",
    ) -> list[Any]:
        self._runs += 1
        for rank, connection in enumerate(self._connections[:num_ranks]):
            place = Place(
                rank=rank,
                num_ranks=num_ranks,
                rendezvous=f"file://{self._folder.name}/{self._runs}",
                sequence_ranks=sequence_ranks,
                compute_dtype=compute_dtype,  # type: ignore[arg-type]
                device="cpu",
                interface="lo",
                timeout_s=LIMIT_S,
            )
            connection.send((place, work, inputs))
        answers = []
        for rank, connection in enumerate(self._connections[:num_ranks]):
            assert connection.poll(LIMIT_S), f"rank {rank} gave no answer"
            answers.append(connection.recv())
        for good, answer in answers:
            assert good, answer
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
