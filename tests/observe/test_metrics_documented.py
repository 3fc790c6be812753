"""docs/metrics.md names exactly what a run logs, and whatever reads metrics reads what is logged."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from small_runs import Silent, small_config

import sao
from sao.config import RunConfig, to_toml
from sao.observe.report import write_report
from sao.observe.run_data import RunData, read_run
from sao.stages import run_stages
from sao.store.run_folder import RunFolder

STAGES = "rollout|age|actor|critic|time|cpu|engine|loop|memory|sft|value_pretraining|eval"
SOURCE = {path: path.read_text() for path in Path(sao.__file__).parent.rglob("*.py")}
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
REAL_ONLY = {"cpu/trainer", "cpu/engine", "memory/trainer_mb"}
GPU_ONLY = {"memory/trainer_gpu_mb"}
COMMON = ("loop.steps=2", "value_pretraining.rollouts=8", "evaluation.tasks=2", "evaluation.pass_k=[1]")
PENALTIES = ("trainer.sequence_gate=1.0", "trainer.reference_kl=0.1")
MARKS = {"rollout/mark_<name>", "eval/<data_set>/mark_<name>"}
WITH_MARKS = ('tasks.source="styles"', 'environment.name="styles"', "rollout.max_turns=1")
WITH_SFT = (
    'tasks.source="chain"',
    "tasks.chain.max_steps=2",
    'environment.name="math_python"',
    'sft=[{demonstrations=40, fit={epochs=4, batch_size=8}}]',
)  # fmt: skip


@dataclass
class Listener(Silent):
    """Remembers which bars moved, and how many rows the file had when they did."""

    folder: Path
    bars: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    sft_rows: list[int] = field(default_factory=list)

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        self.bars.setdefault(stage, []).append((done, total))
        if stage.startswith("sft"):
            metrics = self.folder / "metrics.jsonl"
            self.sft_rows.append(metrics.read_text().count('"sft"') if metrics.is_file() else 0)


@dataclass
class Ran:
    """A run that ended, and what its reporter saw."""

    data: RunData
    seen: Listener


def ran(path: Path, config: RunConfig) -> Ran:
    with RunFolder.create(path) as folder:
        folder.write_config(to_toml(config))
        seen = Listener(path)
        run_stages(config, folder, seen)
    return Ran(read_run(path), seen)


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(
        tmp_path_factory.mktemp("virtual") / "run",
        small_config(*COMMON, *WITH_SFT, *PENALTIES),
    )


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(tmp_path_factory.mktemp("real") / "run", small_config(*COMMON, *WITH_MARKS, "clock=real"))


def documented() -> set[str]:
    return set(re.findall(rf"^\| `((?:{STAGES})/[^`]+)` \|", PAGE.read_text(), flags=re.MULTILINE))


def logged(rows: Iterable[Any]) -> set[str]:
    """Keys of rows, as the page spells them."""
    keys = {key for row in rows for key in row if "/" in key}
    keys = {re.sub(r"^(eval|rollout)/[^/]+/", r"\1/<data_set>/", key) for key in keys}
    keys = {re.sub(r"_q[1-4]$", "_q<n>", key) for key in keys}
    keys = {re.sub(r"/mark_\w+$", "/mark_<name>", key) for key in keys}
    return {re.sub(r"pass_at_\d+$", "pass_at_k", key) for key in keys}


def literals() -> dict[str, str]:
    """Keys written out in the source, and the file of each."""
    pattern = re.compile(rf"""["']((?:{STAGES})/[a-z0-9_]+)["']""")
    return {key: path.name for path, text in SOURCE.items() for key in pattern.findall(text)}


def test_the_page_names_what_a_run_logs(virtual: Ran, real: Ran) -> None:
    """Would catch a metric without a meaning, and the page's metric that nobody logs."""
    in_virtual, in_real = logged(virtual.data.rows), logged(real.data.rows) - GPU_ONLY
    assert in_virtual | in_real == documented() - GPU_ONLY
    assert in_real - in_virtual == REAL_ONLY | MARKS


def test_what_reads_metrics_reads_what_is_logged(virtual: Ran, real: Ran) -> None:
    """Would catch a figure, or a number on the terminal, of a key that was renamed or never logged."""
    known = logged(virtual.data.rows) | logged(real.data.rows) | GPU_ONLY
    written = literals()
    assert len(written) > 50
    assert not {key: file for key, file in written.items() if key not in known}


def test_both_processes_count_what_they_use_from_their_start(real: Ran) -> None:
    """Would catch core-seconds of one step summed up as if they were a counter: the report would show next to none."""
    for key in ("cpu/trainer", "cpu/engine"):
        steps, used = real.data.series(key)
        assert steps.tolist() == [1, 2]
        assert 0 < used[0] < used[1]
    text = write_report(real.data.path).read_text()
    total = sum(real.data.series(key)[1][-1] for key in ("cpu/trainer", "cpu/engine"))
    assert f"| core-seconds | {total:,.0f} |" in text


def test_the_first_step_counts_from_the_start_of_training(virtual: Ran) -> None:
    """Would catch value pretraining in the seconds, the throughput and the idle time of training."""
    first = virtual.data.stage("train")[0]
    assert first["time/clock"] == pytest.approx(first["time/wait_for_batch"] + first["time/step"])
    assert 0 < first["engine/busy_seconds"] <= first["time/clock"]


@pytest.mark.parametrize("which", ["virtual", "real"])
def test_value_pretraining_shows_how_far_it_is(which: str, request: pytest.FixtureRequest) -> None:
    """Would catch minutes of silence, in either kind of run."""
    bar = request.getfixturevalue(which).seen.bars["value pretraining"]
    assert bar == [(done, bar[0][1]) for done in range(1, bar[0][1] + 1)]


def test_sft_rows_are_written_as_they_come(virtual: Ran) -> None:
    """Would catch a stage that can be followed only once it is over."""
    assert virtual.seen.sft_rows[10:12] == [1, 1]
    assert [row["step"] for row in virtual.data.stage("sft")] == [10, 20]
