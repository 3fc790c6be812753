"""[cluster] without Ray: what is refused, and what a run asks for."""

import importlib
from collections import Counter
from types import SimpleNamespace

import pytest
from small_runs import small_config

from sao.build import cluster_rooms
from sao.cluster import connect
from sao.cluster.actors import load_ray
from sao.cluster.settings import ClusterConfig, Room


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"address": "ray://10.0.0.1:10001"}, "client mode is not supported"),
        ({"address": "10.0.0.1"}, "host:port"),
        ({"engine_cpus": -1.0}, r"cluster\.engine_cpus is -1"),
        ({"trainer_on": "GPU"}, "Ray counts itself"),
        ({"place_timeout_s": 0.0}, r"cluster\.place_timeout_s"),
    ],
)
def test_bad_settings(settings: dict, complaint: str) -> None:
    """Catches a mistake that Ray would answer with a trace, or with waiting for ever."""
    with pytest.raises(ValueError, match=complaint):
        ClusterConfig(**settings)


def test_virtual_time_has_no_cluster() -> None:
    """Catches a run whose settings are silently left out."""
    with pytest.raises(ValueError, match="virtual time"):
        small_config("cluster.address=local")


def test_what_a_run_asks_for() -> None:
    """Catches a cluster that is too small and found so only when the first evaluation starts."""
    config = small_config(
        "clock=real", "cluster.address=auto", "engine.replicas=3", "trainer.ranks=2", "worker_processes=4",
        "cluster.engine_gpus=2", "cluster.engine_on=big",
    )  # fmt: skip
    engine = Room(what="an engine replica", cpus=1, gpus=2, label="big")
    counts = Counter(cluster_rooms(config))
    assert counts == {engine: 4, config.cluster.trainer: 2, config.cluster.worker: 8}
    assert str(engine) == "an engine replica: 1 CPUs, 2 GPUs, a node with 'big'"


def test_running_vllm_servers_need_no_room() -> None:
    """Catches GPUs asked for twice: servers that run already hold theirs."""
    config = small_config(
        "clock=real", "cluster.address=auto", "engine.kind=vllm", 'vllm.servers=["http://127.0.0.1:1"]',
        'vllm.evaluation_servers=["http://127.0.0.1:2"]',
    )  # fmt: skip
    assert not [room for room in cluster_rooms(config) if "engine" in room.what]


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ImportError."""

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[ray\]'"):
        load_ray()


def test_a_dead_address_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ten minutes of Ray's own tries."""
    monkeypatch.setattr(connect, "load_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    config = ClusterConfig(address="127.0.0.1:1")
    said = r"cannot join the Ray cluster at 127\.0\.0\.1:1: .*refused"
    with pytest.raises(connect.ClusterError, match=said), connect.cluster(config, ()):
        pass
