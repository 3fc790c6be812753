"""What users get wrong, and what goes wrong around them, at the command: a clear message, exit code 2, nothing lost."""

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command import refused, sao, small_toml
from real_runs import AtStep, finish
from small_runs import run_small, small_config
from test_orchestrator import START, ListLog, TimedEngine
from test_runs import check_history
from transformers import MambaConfig

from sao.build import make_renderer, prepare_tokenizer
from sao.clock import VirtualClock, run_virtual
from sao.config import to_toml
from sao.engines.scripted import ScriptedEngine
from sao.envs.protocol import Step
from sao.envs.tokenizer import save_tokenizer
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.loop import LoopConfig, LoopError, Outcome, Parts, Start
from sao.orchestrator import Orchestrator
from sao.pipeline.baselines import CriticBaseline
from sao.rollout.worker import LocalWorker, RolloutConfig
from sao.stages import run_stages
from sao.store.log import read
from sao.store.records import AttemptEnded, Dropped
from sao.store.run_folder import Manifest, RunFolder
from sao.training.scripted import ScriptedTrainer
from sao.types import Message, Task

# Configurations that cannot work are refused by `sao check` and by `sao train`, which then leaves no folder behind.


def refused_everywhere(folder: Path, config: Path, *words: object) -> str:
    said = refused("check", config, *words)
    assert refused("train", config, "--folder", folder / "run", *words)
    assert not (folder / "run").exists(), "a refused run left a folder that is in the way of the next try"
    return said


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    """Catches a crash deep in the template engine, or a template that is made up."""
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    config = small_toml(tmp_path, f"tokenizer.path={tmp_path / 'tokenizer'}")
    said = refused_everywhere(tmp_path, config)
    assert "has no chat template" in said
    assert "chat_template.jinja" in said


def test_a_task_file_with_a_broken_line(tmp_path: Path) -> None:
    """Catches "Expecting ',' delimiter: line 1 column 32" for the third line of a thousand."""
    good = json.dumps({"question": "1 + 1?", "answer": "2"})
    (tmp_path / "tasks.jsonl").write_text(f'{good}\n\n{{"question": "2 + 2?" "answer": 4}}\n{good}\n')
    config = small_toml(tmp_path, "tasks.source=file", f"tasks.path={tmp_path / 'tasks.jsonl'}")
    said = refused_everywhere(tmp_path, config)
    assert f"{tmp_path / 'tasks.jsonl'}, line 3: not JSON" in said
    assert "2 + 2?" in said


def test_traces_with_a_broken_line(tmp_path: Path) -> None:
    """Catches a mistake that shows after the model was loaded, or that is skipped."""
    (tmp_path / "traces.jsonl").write_text('{"task_id": "a", "messages": [], "reward": 1}\n')
    config = small_toml(tmp_path)
    config.write_text(config.read_text().replace("sft = []", "") + f'\n[[sft]]\ntraces = "{tmp_path}/traces.jsonl"\n')
    assert 'line 1: field "messages" must be a list that is not empty' in refused_everywhere(tmp_path, config)


def test_a_model_without_the_layers_to_freeze(tmp_path: Path) -> None:
    """Catches a freeze that matches nothing: the whole critic would train, or none of it."""
    save_tokenizer(tmp_path / "model")
    MambaConfig(
        vocab_size=200, hidden_size=16, num_hidden_layers=2, state_size=4, architectures=["MambaForCausalLM"]
    ).save_pretrained(str(tmp_path / "model"))
    config = small_toml(tmp_path, f"model.path={tmp_path / 'model'}")
    said = refused_everywhere(tmp_path, config)
    assert "no module whose name contains 'attn' or 'attention'" in said
    assert "MambaBlock" in said
    assert "set trainer.freeze = 'none'" in said


@pytest.mark.parametrize("override", ["rollout.temperature=0.7", "rollout.top_p=0.9"])
def test_sampling_that_would_make_the_ratio_meaningless(tmp_path: Path, override: str) -> None:
    """Catches training on log-probs of another distribution than the one that was sampled from."""
    said = refused_everywhere(tmp_path, small_toml(tmp_path), "--set", override)
    assert override.replace("=", " = ") in said
    assert "importance ratio" in said
    assert "set both to 1 for training" in said


def test_a_batch_that_admission_can_never_fill(tmp_path: Path) -> None:
    """Catches a run that trains on one partial batch and ends, or waits for ever."""
    lines = [json.dumps({"question": f"{number}?", "answer": "2"}) for number in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    (tmp_path / "held_out.jsonl").write_text(lines[0])
    source = (
        "tasks.source=file", f"tasks.path={tmp_path / 'tasks.jsonl'}", "tasks.cycle=false", "evaluation.tasks=1",
        f'evaluation_tasks=[{{source="file", path="{tmp_path / "held_out.jsonl"}"}}]',
    )  # fmt: skip
    said = refused_everywhere(tmp_path, small_toml(tmp_path, *source))
    assert "ends before its first full batch of 6 prompts" in said
    assert "lower loop.batch_size" in said
    # Groups of two make four prompts a batch of eight, which is enough.
    grouped = ("loop.batch_size=8", "loop.group_size=2")
    assert "batches of 8" in sao("check", small_toml(tmp_path, *source, *grouped)).out
    said = refused_everywhere(tmp_path, small_toml(tmp_path), "--set", "loop.group_size=4")
    assert "loop.batch_size 6 is not a multiple of loop.group_size 4" in said
    assert "Try batch_size = 4" in said


def test_a_run_folder_that_exists(tmp_path: Path) -> None:
    """Catches a run that overwrites another, or mixes with it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("of somebody else")
    said = refused("train", small_toml(tmp_path), "--folder", tmp_path / "run")
    assert f"run folder {tmp_path / 'run'} already exists" in said
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.path=/no/such/model"], "/no/such/model"),
        (["tasks.source=gsm8k", "tasks.path=/no/such/data"], "GSM8K is not at /no/such/data/train.jsonl"),
        (["value_pretraining.logged=/no/such/log"], "rollouts logged in /no/such/log are not there"),
        (["rollout.max_tokens=8"], "prompts: up to 10 tokens in the first 20 tasks, of 8 for a rollout"),
        (["engine.max_context=1000"], "the model knows 128, engine.max_context is 1000"),
        (["evaluation.tasks=0"], "evaluation.tasks is 0, but data set 0 (guess-evaluation) has no end; give a number"),
        (["tasks.split=train"], "evaluation: guess-train is what is trained on"),
        (["evaluation_tasks=[{source='guess', split='train'}]"], "evaluation: guess-train is what is trained on"),
    ],
)
def test_what_can_be_known_before_the_start_is(tmp_path: Path, changes: list[str], said: str) -> None:
    """Catches an hour of training before a mistake of the configuration shows."""
    assert said in refused_everywhere(tmp_path, small_toml(tmp_path, *changes))


def test_stages_that_a_configuration_does_not_have(tmp_path: Path) -> None:
    """Catches a stage that does nothing and says that it is done."""
    config = small_toml(tmp_path)
    assert "has no [[sft]] stage" in refused("sft", config, "--folder", tmp_path / "run")
    assert "has no [value_pretraining] section" in refused("pretrain-value", config, "--folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_words_that_are_no_command_and_files_that_are_not_there(tmp_path: Path) -> None:
    """Catches a trace, or exit code 0, for a typing mistake."""
    assert "No such command 'trian'" in refused("trian", "x.toml")
    assert f"cannot read the configuration {tmp_path}/none.toml" in refused("train", tmp_path / "none.toml")
    assert f"there is no run folder at {tmp_path}/none" in refused("resume", tmp_path / "none")
    assert f"{tmp_path} is no run folder" in refused("report", tmp_path)
    assert "did you mean loop.batch_size" in refused("check", small_toml(tmp_path), "--set", "loop.batchsize=2")


# Checkpoints.


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run_small(path, small_config("loop.steps=4"))
    return path


def copy_of(run: Path, folder: Path) -> Path:
    for file in run.rglob("*"):
        if file.is_file():
            target = folder / "run" / file.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return folder / "run"


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "name", ["manifest.json", "trainer/actor/model.safetensors", "trainer/critic_optimiser.safetensors"]
)
@pytest.mark.parametrize(("harm", "word"), [(spoil, "is damaged"), (Path.unlink, "is missing")])
def test_a_missing_or_corrupt_checkpoint_file(
    finished_run: Path, tmp_path: Path, name: str, harm: Callable[[Path], None], word: str
) -> None:
    """Catches a resume that goes on with other weights, or silently from an older checkpoint."""
    run = copy_of(finished_run, tmp_path)
    older, newest = RunFolder.open(run).checkpoint_paths()
    harm(newest / name)
    said = refused("resume", run)
    assert f"checkpoint file {newest / name} {word}" in said
    assert f"`sao resume {run} --checkpoint {older}`" in said
    assert f"checkpoint file {newest / name} {word}" in refused("eval", run)


def test_an_older_checkpoint_goes_on_where_the_newest_is_damaged(finished_run: Path, tmp_path: Path) -> None:
    """Catches advice that does not work."""
    run = copy_of(finished_run, tmp_path)
    older, newest = RunFolder.open(run).checkpoint_paths()
    spoil(newest / "trainer" / "critic.safetensors")
    result = sao("resume", run, "--checkpoint", older, "--set", "loop.steps=5")
    assert result.code == 0, result
    check_history(run, steps=5)
    assert "steps = 5" in (run / "config.toml").read_text(), "what was changed is the run's from now on"


def test_checkpoints_that_were_deleted(finished_run: Path, tmp_path: Path) -> None:
    """Catches a resume that starts over in the same folder: versions would be used twice, tasks admitted twice."""
    run = copy_of(finished_run, tmp_path)
    for checkpoint in RunFolder.open(run).checkpoint_paths():
        checkpoint.rename(tmp_path / checkpoint.name)
    before = (run / "metrics.jsonl").read_bytes()
    assert "holds no checkpoint, but training was logged" in refused("resume", run)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert f"there is no checkpoint at {tmp_path}/none" in refused("resume", run, "--checkpoint", tmp_path / "none")
    assert f"there is no checkpoint at {tmp_path}/none" in refused("eval", run, "--checkpoint", tmp_path / "none")


# Numbers that are not finite.


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_gradients_that_are_not_finite_are_skipped_and_end_the_run(tmp_path: Path) -> None:
    """Catches weights that become NaN, or a run that goes on without learning anything.

    A critic's rate of 1e38 makes its values overflow after the first update, and with them every later target.
    """
    run, rate = tmp_path / "run", ("trainer.critic_lr=1e38", "trainer.critic_warmup_steps=0", "loop.checkpoint_every=9")
    said = refused("train", small_toml(tmp_path, *rate), "--folder", run)
    assert "gradient was not finite in steps 1, 2, 3" in said
    assert "trainer.max_skipped_in_a_row is 3. Lower the learning rate" in said
    assert f"sao resume {run}" in said
    assert [row["actor/skipped"] for row in metrics(run) if row["stage"] == "train"] == [0, 1]
    result = sao("resume", run, "--set", "trainer.critic_lr=1e-3")
    assert result.code == 0, result
    check_history(run, steps=4)


def test_skipped_steps_are_counted_and_make_no_version(tmp_path: Path) -> None:
    """Catches a version published for weights that did not change."""
    rate = ("trainer.critic_lr=1e38", "trainer.critic_warmup_steps=0", "trainer.max_skipped_in_a_row=100")
    outcome = run_small(tmp_path / "run", small_config(*rate))
    assert outcome == Outcome(steps=4, version=1, reason="steps done")
    rows = [row for row in metrics(tmp_path / "run") if row["stage"] == "train"]
    assert [row["loop/skipped_steps"] for row in rows] == [0, 1, 2, 3]
    assert [row["version"] for row in rows] == [1, 1, 1, 1]


def test_weights_that_run_away_are_named(tmp_path: Path) -> None:
    """Catches a probe that fails at the engine, and blames the engine."""
    said = refused("train", small_toml(tmp_path, "trainer.actor_lr=1e38"), "--folder", tmp_path / "run")
    assert "the actor's log-probs are not finite as version 1" in said
    assert "Lower trainer.actor_lr" in said


class Unruly(GuessEnvironment):
    """Every n-th game pays NaN."""

    def __init__(self, every: int) -> None:
        super().__init__(GuessConfig())
        self._every = every

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self._broken = int(task.id.rpartition("/")[2]) % self._every == 0
        return await super().reset(task)

    async def step(self, action: Message) -> Step:
        return Step(reward=math.nan, done=True) if self._broken else await super().step(action)


async def unruly_run(tokenizer: Path, every: int, log: ListLog) -> tuple[Outcome, ScriptedTrainer]:
    """A real worker plays games with a scripted engine; the loop is the real one."""
    clock = VirtualClock()
    renderer = make_renderer(small_config(), tokenizer)
    five = renderer.encode_action("5")
    engine = ScriptedEngine(lambda tokens, session: five, clock, token_seconds=0.1)
    trainer = ScriptedTrainer(clock=clock, actor_seconds=1.0)
    worker = LocalWorker(lambda: Unruly(every), engine, renderer, clock, RolloutConfig(max_turns=2))

    async def commit(manifest: Manifest) -> None:
        pass

    parts = Parts(
        clock=clock, source=GuessTasks(GuessConfig()), worker=worker, engine=TimedEngine(),  # type: ignore[arg-type]
        trainer=trainer, baseline=CriticBaseline(), log=log, commit=commit, evaluate=None, evaluate_every=10,
        emit=lambda *row: None, prune=lambda versions: None,
    )  # fmt: skip
    config = LoopConfig(steps=5, batch_size=4, concurrency=4, max_batches_ahead=1, max_retries=1)
    return await Orchestrator(parts, config, Start(), START, seed=0).run(), trainer


def test_a_reward_that_is_nan_is_never_trained(tmp_path: Path) -> None:
    """Catches NaN replaced by 0 and trained: it is the environment's failure, retried, counted and dropped."""
    tokenizer, log = prepare_tokenizer(small_config(), tmp_path / "tokenizer"), ListLog()
    outcome, trainer = run_virtual(unruly_run(tokenizer, 5, log))
    assert outcome.reason == "steps done"
    broken = [record for record in log.of(AttemptEnded) if "a reward of nan; it must be finite" in record.failure_text]
    assert len(broken) == len(log.of(AttemptEnded)) > 4
    assert {int(name.split("@")[0].rpartition("/")[2]) % 5 for name in trainer.consumed} == {1, 2, 3, 4}
    assert {record.rollout_id.split("@")[1] for record in log.of(Dropped)} == {"1"}


def test_rewards_that_are_all_nan_stop_the_run(tmp_path: Path) -> None:
    """Catches a run that works through its tasks with a reward function that is broken."""
    tokenizer = prepare_tokenizer(small_config(), tmp_path / "tokenizer")
    with pytest.raises(LoopError, match=r"100% of the last attempts failed.*a reward of nan; it must be finite"):
        run_virtual(unruly_run(tokenizer, 1, ListLog()))


# Ctrl-C, in virtual time; test_faults.py has it in real time.


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def begin(path: Path, actions: dict[int, Callable[[], None]], *overrides: str) -> Outcome | None:
    config = small_config("loop.steps=1000", "loop.checkpoint_every=4", *overrides)
    with RunFolder.create(path) as folder:
        folder.write_config(to_toml(config))
        return run_stages(config, folder, AtStep(actions))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_commits_the_step_under_way(how: signal.Signals, tmp_path: Path) -> None:
    """Catches Ctrl-C, or a scheduler's SIGTERM, that loses steps, in virtual time too."""
    outcome = begin(tmp_path / "run", {6: lambda: signal.raise_signal(how)})
    assert outcome is not None
    assert outcome.reason == "stopped"
    checkpoint = RunFolder.open(tmp_path / "run").latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.manifest.step == outcome.steps >= 6
    check_history(tmp_path / "run", steps=finish(tmp_path / "run"))


def test_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """Catches a run that cannot be stopped when a step takes hours, and one that is lost by it."""
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "run", {6: lambda: (interrupt(), interrupt())})
    checkpoint = RunFolder.open(tmp_path / "run").latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.manifest.step >= 4
    assert list(read(tmp_path / "run" / "log"))
    check_history(tmp_path / "run", steps=finish(tmp_path / "run"))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_training_says_how_to_go_on(how: signal.Signals, tmp_path: Path) -> None:
    """Catches exit code 1, a trace, or silence, while a run is still being prepared."""
    config = small_toml(tmp_path, "value_pretraining.rollouts=6")
    run = tmp_path / "run"

    def at_rollouts(self: object, stage: str, done: int, total: int, note: str = "") -> None:
        signal.raise_signal(how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sao.progress.ConsoleReporter.progress", at_rollouts)
        result = sao("train", config, "--folder", run)
    assert result.code == 130
    assert f"stopped; go on with: sao resume {run}" in result.out
    result = sao("resume", run)
    assert result.code == 0, result
    check_history(run, steps=4)


def test_a_fault_leaves_its_trace_in_the_run_folder(tmp_path: Path) -> None:
    """Catches a fault of this program that is one line for the user and nothing for who is to repair it."""
    run = tmp_path / "run"

    def broken(*_: object) -> None:
        raise ValueError("a number is not a number")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sao.stages.Orchestrator.run", broken)
        said = refused("train", small_toml(tmp_path), "--folder", run)
    assert "a number is not a number" in said
    events = (run / "events.log").read_text()
    assert "Traceback" in events
    assert "in broken" in events


def test_a_pool_may_be_evaluated_beside_fresh_tasks(tmp_path: Path) -> None:
    """Catches a gap between training and held-out tasks that cannot be measured."""
    sets = "evaluation_tasks=[{source='guess'}, {source='guess', split='train', limit=4}]"
    result = sao("check", small_toml(tmp_path, sets))
    assert result.code == 0, result
    assert "guess-train is what is trained on, as a data set apart" in result.out
