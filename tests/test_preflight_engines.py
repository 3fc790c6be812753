"""What engines will need, before a run starts."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_runs import small_config

from sao import preflight_engines
from sao.build import server_gpus
from sao.config import resolve
from sao.preflight_engines import (
    Finding,
    ModelSize,
    check_limits,
    check_memory,
    check_servers,
    check_types,
    trainer_bytes,
)

ROOT = Path(__file__).parents[1]
SERVED = ("clock=real", "engine.kind=vllm", "vllm.servers=['http://127.0.0.1:1']")


def bad(findings: Iterator[Finding]) -> str:
    return "; ".join(finding.text for finding in findings if not finding.good)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ((), False),
        ((*SERVED, "engine.dtype=bfloat16"), True),
        ((*SERVED, "engine.dtype=bfloat16", "engine.probe_tolerance=0.3"), False),
        ((*SERVED, "trainer.compute_dtype=bfloat16"), True),
        ((*SERVED, "engine.dtype=bfloat16", "trainer.compute_dtype=bfloat16"), True),
        (("engine.dtype=bfloat16",), True),
        (("clock=real", "engine.dtype=bfloat16", "trainer.compute_dtype=bfloat16"), False),
    ],
)
def test_a_tolerance_below_the_noise_of_the_types(overrides: tuple[str, ...], refused: bool):
    """Catches a run whose first weight update fails its probe, after fine-tuning and value pretraining."""
    assert ("engine.probe_tolerance is 0.001" in bad(check_types(small_config(*overrides)))) is refused


def test_a_replacement_that_the_loop_does_not_wait_for():
    """Catches limits that end a run while its last replica is being replaced, as each of them allows."""
    texts = [finding.text for finding in check_limits(small_config(*SERVED))]
    # 120 + 2 x 60 + 120 = 360 for an update; 300 for the pool to give up, and an update more.
    assert ["pool.load_timeout_s is 300 s, and a weight update may take 360" in text for text in texts] == [True, False]
    assert "loop.engine_timeout_s is 300 s" in texts[1]
    assert "may take 660" in texts[1]
    started = small_config("clock=real", "engine.kind=vllm", "engine.start_timeout_s=600", "pool.load_timeout_s=360")
    (text,) = [finding.text for finding in check_limits(started)]
    assert "may take 1320 (pool.load_timeout_s, engine.start_timeout_s" in text
    placed = small_config("clock=real", "engine.kind=vllm", "cluster.address=local", "cluster.place_timeout_s=100")
    text = list(check_limits(placed))[1].text
    # 300 for the pool, 180 to start, 100 to find a place, 360 for the update.
    assert "may take 940 (pool.load_timeout_s, engine.start_timeout_s, cluster.place_timeout_s, and" in text
    assert not list(check_limits(small_config(*SERVED, "pool.load_timeout_s=360", "loop.engine_timeout_s=720")))
    assert not list(check_limits(small_config()))


def test_memory_counts_what_trains_and_what_is_frozen():
    """Catches a frozen backbone counted with moments, and moments that are forgotten."""
    size = ModelSize(actor=1000, critic=900, frozen=300, cache=10)
    assert trainer_bytes(size) == 16 * 1600 + 4 * 300
    assert trainer_bytes(size, width=2) == 16 * 1600 + 2 * 300


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        # Trainer 26.8 kB; engine and evaluation's engine each 4 kB of weights and 17 x 129 tokens of 40 bytes.
        ((), 26_800 + 2 * (4_000 + 87_720)),
        (("clock=real", "engine.replicas=3"), 26_800 + 4 * (4_000 + 87_720)),
        (SERVED, 26_800 + 4_000 + 87_720),
        ((*SERVED, "vllm.evaluation_servers=['http://127.0.0.1:2']"), 26_800),
    ],
)
def test_memory_is_compared_with_what_is_free(overrides: tuple[str, ...], needed: int, monkeypatch: pytest.MonkeyPatch):
    """Catches a run that is killed for memory in its first step, and evaluation's engine forgotten in the sum."""
    if torch.cuda.is_available():
        pytest.skip("sums are of a machine without a GPU")
    size, config = ModelSize(actor=1000, critic=900, frozen=300, cache=10), small_config(*overrides)
    for free, good in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(preflight_engines, "_free_ram", lambda free=free: free)
        (finding,) = check_memory(config, size)
        assert finding.good is good
    monkeypatch.setattr(preflight_engines, "_free_ram", lambda: None)
    assert not list(check_memory(config, size))


def test_the_memory_of_this_machine_is_found():
    """Catches a unit of /proc/meminfo taken for another, so that every run is refused, or none."""
    if sys.platform != "linux":
        pytest.skip("/proc/meminfo is Linux's")
    free = preflight_engines._free_ram()
    assert free is not None
    assert 1e8 < free < 1e14


@pytest.mark.parametrize(
    ("address", "servers", "reason"),
    [
        ("203.0.113.7", "['http://127.0.0.1:1']", "none of this machine's"),
        ("127.0.0.1", "['http://10.0.0.5:1']", "is reached from this machine alone, and not from 10.0.0.5"),
        ("127.0.0.1", "['http://localhost:1']", ""),
    ],
)
def test_where_weights_are_sent_from(address: str, servers: str, reason: str, tmp_path: Path):
    """Catches a broadcast from an address that servers elsewhere cannot reach, found out after a time limit."""
    config = small_config(
        "clock=real", "engine.kind=vllm", "vllm.transport=gloo", f"vllm.transfer_address={address}",
        f"vllm.servers={servers}",
    )  # fmt: skip
    first = next(check_servers(config, tmp_path, tmp_path))
    assert first.good is not bool(reason)
    assert reason in first.text


@pytest.mark.parametrize(("gpus", "expected"), [(1, ["0"]), (3, ["1"]), (0, [""])])
def test_a_machine_with_gpus(gpus: int, expected: list[str], monkeypatch: pytest.MonkeyPatch):
    """Catches a server that is put on the trainer's GPU though another is idle, or refused on the only one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    shared = "vllm.extra_args=['--gpu-memory-utilization=0.3']"
    assert ["".join(each) for each in server_gpus(small_config("clock=real", "engine.kind=vllm", shared))] == expected


def longest_toml(page: str) -> str:
    return max(re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL), key=len)


@pytest.mark.parametrize("page", ["cluster.md", "one_gpu.md"])
def test_the_pages_configurations_hold(page: str, tmp_path: Path):
    """Catches a recipe that nobody can run here, with a key that was renamed or limits that contradict each other."""
    (tmp_path / "page.toml").write_text(longest_toml(page))
    config = resolve(tmp_path / "page.toml")
    assert not list(check_limits(config))
    assert not bad(check_types(config))
    if page == "one_gpu.md":
        assert longest_toml(page) == (ROOT / "experiments" / "one_gpu" / "config.toml").read_text()


def test_ray_gives_a_server_the_gpus_that_it_spans(tmp_path: Path):
    """Catches a server of several GPUs that finds none of them only when Ray has started it."""
    spans = ("clock=real", "engine.kind=vllm", "cluster.address=local", "vllm.extra_args=['-tp 2']")
    for gpus, refused in ((0, True), (1, True), (2, False)):
        config = small_config(*spans, f"cluster.engine_gpus={gpus}")
        said = bad(check_servers(config, tmp_path, tmp_path))
        assert (f"cluster.engine_gpus is {gpus}, and by vllm.extra_args a server spans 2" in said) is refused
