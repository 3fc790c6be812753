"""Every command, once, for real, on the smallest configuration."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import Result, refused, sao, small_toml
from test_runs import check_history

from sao.config import RunConfig, resolve, to_markdown
from sao.envs.traces import read_traces
from sao.stages import logged_rollouts
from sao.store.log import read
from sao.store.records import Finished
from sao.store.run_folder import RunFolder

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parent.parent
INLINE = ("--set", "worker_processes=0")
"""Episodes on the loop of this process: a start less."""


def good(*words: object) -> Result:
    result = sao(*words)
    assert result.code == 0, result
    return result


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sao rollout` of the starting policy: a log and traces."""
    folder = tmp_path_factory.mktemp("collected")
    config = small_toml(folder)
    result = good("rollout", config, "--out", folder / "out", "--count", 12, *INLINE)
    assert f"12 traces in {folder / 'out' / 'traces.jsonl'}" in result.out
    return folder / "out"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory, collected: Path) -> Path:
    """A run done stage by stage: `sao pretrain-value`, which fine-tunes first, then `sao resume`."""
    folder = tmp_path_factory.mktemp("staged")
    config = small_toml(
        folder,
        f"value_pretraining.logged={collected / 'log'}",
        "value_pretraining.rollouts=8",
        "value_pretraining.fit.steps=2",
        "sft_threads=1",
    )
    text = config.read_text().replace("sft = []\n", "")
    config.write_text(f'{text}\n[[sft]]\ntraces = "{collected}/traces.jsonl"\n[sft.fit]\nsteps = 3\n')
    result = good("pretrain-value", config, "--folder", folder / "run")
    assert f"stopped after value_pretraining; go on with: sao resume {folder / 'run'}" in result.out
    assert "value pretraining on 8 rollouts" in result.out
    rows = [json.loads(line)["stage"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == ["sft", "value_pretraining"]
    assert "ended after 4 steps: steps done" in good("resume", folder / "run").out
    return folder / "run"


def test_rollouts_can_be_trained_on(collected: Path) -> None:
    """Catches a log or traces that the stages they are made for cannot read."""
    assert len(logged_rollouts(collected / "log")) == 12
    assert len([record for record in read(collected / "log") if isinstance(record, Finished)]) == 12
    traces = list(read_traces(collected / "traces.jsonl"))
    assert len(traces) == 12
    assert traces[0].messages[0].content == "guess a number from 1 to 9"
    assert {message.role for message in traces[0].messages} >= {"user", "assistant"}


def test_what_was_played_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hours of rollouts without their traces, in a folder that is then refused."""

    def at_rollouts(self: object, stage: str, done: int, total: int, note: str = "") -> None:
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("sao.progress.ConsoleReporter.progress", at_rollouts)
    result = sao("rollout", small_toml(tmp_path), "--out", tmp_path / "out", "--count", 500, *INLINE)
    assert result.code == 130, result
    traces = list(read_traces(tmp_path / "out" / "traces.jsonl"))
    assert 3 <= len(traces) < 500
    assert f"{len(traces)} traces of the {len(traces)} rollouts played so far are in" in result.out


def test_a_run_in_stages(staged: Path) -> None:
    """Catches a stage that is done twice, or not at all, when a run goes on after it."""
    check_history(staged, steps=4)
    folder = RunFolder.open(staged)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["stage"] for row in rows if row["stage"] != "train"] == ["sft", "value_pretraining", "eval", "eval"]
    assert (staged / "sft" / "model" / "model.safetensors").is_file()
    assert (staged / "report" / "report.md").is_file()
    assert json.loads(folder.environment.read_text())["core_seconds"] > 0
    assert "sft done: 3 updates" in folder.events.read_text()


def test_sft_alone(tmp_path: Path, collected: Path) -> None:
    """Catches `sao sft` that goes on to training or cannot be gone on from, and a resume with useless settings."""
    config = small_toml(tmp_path, "sft_threads=1")
    text = config.read_text().replace("sft = []\n", "")
    config.write_text(f'{text}\n[[sft]]\ntraces = "{collected}/traces.jsonl"\n[sft.fit]\nsteps = 2\n')
    result = good("sft", config, "--folder", tmp_path / "run")
    assert f"stopped after sft; go on with: sao resume {tmp_path / 'run'}" in result.out
    assert (tmp_path / "run" / "sft" / "model" / "model.safetensors").is_file()
    assert RunFolder.open(tmp_path / "run").latest_checkpoint() is None
    saved = (tmp_path / "run" / "config.toml").read_bytes()
    said = refused("resume", tmp_path / "run", "--set", "model.hidden_size=64")
    assert "model is settled" in said
    assert "Start a new run" in said
    said = refused("resume", tmp_path / "run", "--set", "tasks.source=file", "--set", "tasks.path=nowhere.jsonl")
    assert "nowhere.jsonl" in said
    assert (tmp_path / "run" / "config.toml").read_bytes() == saved, "a change that was refused was kept"


def test_check(tmp_path: Path) -> None:
    """Catches a preflight that fails where nothing is wrong, or that says nothing."""
    result = good("check", small_toml(tmp_path))
    assert len(result.out.splitlines()) > 8
    assert all(line.startswith("ok") for line in result.out.splitlines())


def test_config_and_its_page() -> None:
    """Catches docs/configuration.md out of date: `sao config --markdown > docs/configuration.md`."""
    assert "loop.batch_size" in good("config").out
    page = good("config", "--markdown").out
    assert page == to_markdown()
    assert page == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert "| `wrong_operand` | `0.0` |" in page, "the default of the stage, not of the expert's own class"


def test_eval_of_a_run_and_of_a_configuration(tmp_path: Path, staged: Path) -> None:
    """Catches an evaluation of other weights, and one that is lost because its file exists already."""
    result = good("eval", staged, "--out", tmp_path / "run.json", "--set", "evaluation.samples=2", *INLINE)
    assert "guess-evaluation" in result.out
    assert "mean@2" in result.out
    saved = json.loads((tmp_path / "run.json").read_text())
    assert len(saved["outcomes"]) == 16
    assert saved["rows"]["eval/guess-evaluation/prompts"] == 8
    assert sao("eval", staged, "--out", tmp_path / "run.json").code == 2
    result = good("eval", small_toml(tmp_path), *INLINE, "--set", "evaluation.tasks=3")
    assert "guess-evaluation" in result.out
    assert "mean@1" in result.out


def test_inspect(staged: Path) -> None:
    """Catches a list, or a token-by-token view, that a real run breaks."""
    lines = good("inspect", staged).out.splitlines()
    assert len(lines) > 24
    consumed = RunFolder.open(staged).latest_checkpoint()
    assert consumed is not None
    name = consumed.manifest.consumed[0]
    shown = good("inspect", staged, name, "--every-token").out
    assert name in shown
    assert "version" in shown
    result = sao("inspect", staged, "guess-train/zzz@0")
    assert result.code == 2
    assert "no rollout 'guess-train/zzz@0'" in result.err


def test_report_of_a_dead_run(staged: Path) -> None:
    """Catches a report that can only be written by the run itself."""
    (staged / "report" / "report.md").unlink()
    assert str(staged / "report" / "report.md") in good("report", staged).out
    assert "guess" in (staged / "report" / "report.md").read_text()


def test_a_run_folder_holds_the_configuration_that_was_used(staged: Path) -> None:
    """Catches a folder whose configuration does not reproduce the run."""
    config = resolve(RunFolder.open(staged).config)
    assert isinstance(config, RunConfig)
    assert (config.name, config.loop.steps, config.sft[0].fit.steps) == ("small", 4, 3)


def test_an_interrupt_while_libraries_load_says_nothing() -> None:
    """Catches a page of traceback for a Ctrl-C in the first seconds of a command."""
    command = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", "from sao.entry import main; main()"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert command.stderr is not None
    for line in command.stderr:  # -X importtime writes a line per module as it is loaded
        if "numpy" in line:
            break
    command.send_signal(signal.SIGINT)
    rest = command.stderr.read()
    assert command.wait(60) == -signal.SIGINT
    assert "Traceback" not in rest
