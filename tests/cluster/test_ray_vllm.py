"""A run on Ray whose engine is a true vLLM server; SAO_VLLM_PYTHON names a Python with vLLM."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from ray_processes import of_kind
from real_runs import AtStep, wait_for
from small_runs import small_config
from test_runs import check_history
from true_vllm import PYTHON, needs_vllm

from sao.cluster.settings import ClusterConfig
from sao.config import to_toml
from sao.stages import run_stages
from sao.store.files import read_json_lines
from sao.store.run_folder import RunFolder

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray"), needs_vllm]

HERE = ClusterConfig(address="local", engine_cpus=0.1, trainer_cpus=0.1, worker_cpus=0.1, place_timeout_s=600)


def test_a_server_below_an_actor_is_killed_and_replaced(tmp_path: Path) -> None:
    """Catches a server that no actor can start or end, weights that do not reach it there, and a run that does not
    outlive it."""
    path, killed = tmp_path / "run", list[int]()
    # vLLM's CPU attention needs a head of 32 or more; importing vLLM takes long.
    config = small_config(
        "clock=real", "loop.steps=4", "evaluation.every_steps=1000000", "worker_processes=1", "model.head_dim=32",
        "engine.kind=vllm", f"vllm.command={PYTHON}", "vllm.kv_cache_mb=64",
        "vllm.connect_timeout_s=60", "vllm.probe_timeout_s=300", "engine.start_timeout_s=600",
        "engine.load_timeout_s=300", "pool.health_timeout_s=60", "loop.engine_timeout_s=900",
    )  # fmt: skip
    config = replace(config, cluster=HERE)

    def kill() -> None:
        # Its keeper, which started it, has the same words in its command line.
        killed.append(of_kind("vllm", os.getpid())[-1])
        os.kill(killed[0], signal.SIGKILL)

    with RunFolder.create(path) as folder:
        folder.write_config(to_toml(config))
        outcome = run_stages(config, folder, AtStep({1: kill}))
    assert outcome is not None
    assert (outcome.steps, outcome.reason) == (4, "steps done")
    check_history(path, steps=4)
    rows = [row for row in read_json_lines(path / "metrics.jsonl").rows if row["stage"] == "train"]
    assert rows[-1]["engine/taken_out"] >= 1
    assert rows[-1]["engine/probe_gap"] < 1e-4
    left = ("vllm", "engine actor", "worker", "rank")
    wait_for(lambda: not any(of_kind(kind, os.getpid()) for kind in left), "the actors and servers to end", 120)
