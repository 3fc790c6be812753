"""Whole runs with every part real: determinism, the synchronous limit, and life after a stop."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import Silent, run_small, small_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import sao.envs.toy
from sao.build import make_engine, make_trainer, make_worker, prepare_model, prepare_tokenizer
from sao.clock import VirtualClock, run_virtual
from sao.config import RunConfig, to_toml
from sao.envs.select import make_source
from sao.evaluate import EvaluationConfig
from sao.models.load import load_folder
from sao.observe.metrics import last
from sao.rollout.worker import rollout_seed
from sao.stages import run_stages
from sao.store.log import read
from sao.store.records import Finished, Published
from sao.store.replay import Fate, replay
from sao.store.run_folder import RunFolder
from sao.types import Batch, Rollout, Task


def actor_of(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunFolder.open(folder).latest_checkpoint()
    assert checkpoint is not None
    return load_folder(checkpoint.path / "trainer" / "actor").state_dict()


def test_a_virtual_run_repeated_gives_the_same_metrics_file(tmp_path: Path) -> None:
    """Catches a shared random generator, a wall-clock field, or an order that depends on the machine."""
    config = small_config("value_pretraining.rollouts=12", "evaluation.every_steps=2")
    for name in ("first", "second"):
        run_small(tmp_path / name, config)
    first = (tmp_path / "first" / "metrics.jsonl").read_bytes()
    assert len(first.splitlines()) >= 4 + 2
    assert first == (tmp_path / "second" / "metrics.jsonl").read_bytes()


async def plain_synchronous_loop(config: RunConfig, folder: Path) -> None:
    """The synchronous method with the same engine, worker and trainer, and without the orchestrator."""
    clock = VirtualClock()
    tokenizer = prepare_tokenizer(config, folder / "tokenizer")
    trainer = make_trainer(config, clock, prepare_model(config, tokenizer, folder / "start"), folder / "snapshots")
    engine = await make_engine(config, clock, await trainer.publish_initial(0, None))
    worker, _ = await make_worker(config, clock, engine, tokenizer, purpose="training")
    source = make_source(config.tasks, "train", seed=config.seed)
    slots = asyncio.Semaphore(config.loop.concurrency)
    for step in range(1, config.loop.steps + 1):
        finished: list[Rollout] = []

        async def play(task: Task, finished: list[Rollout] = finished) -> None:
            async with slots:
                seed = rollout_seed(config.seed, task.id, 0)
                finished.append(await worker.run(task, group_id=task.id, attempt=0, seed=seed))

        size = config.loop.batch_size
        tasks = [source.at(index) for index in range((step - 1) * size, step * size)]
        await asyncio.gather(*(play(task) for task in tasks if task is not None))
        update = await trainer.update_actor(Batch(step=step, rollouts=tuple(finished)), version=step, parent=step - 1)
        assert update.snapshot is not None
        await engine.load(update.snapshot)
        await trainer.update_critic()
    (folder / "end").mkdir()
    await trainer.save(str(folder / "end"))
    await engine.stop()


def test_the_trained_model_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    """Catches a model that is handed over without the tokenizer and the template it was trained with."""
    run_small(tmp_path / "run", small_config("loop.steps=1"))
    checkpoint = RunFolder.open(tmp_path / "run").latest_checkpoint()
    assert checkpoint is not None
    folder = checkpoint.path / "trainer" / "actor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, own = (
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer"),
    )
    said = [{"role": "user", "content": "1 2"}]
    tokens = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert tokens == own.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(tokens, return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], model.config.vocab_size)


def test_zero_batches_ahead_equals_the_plain_synchronous_loop_bit_for_bit(tmp_path: Path) -> None:
    """Catches anything in the asynchronous path that changes what is trained, on what, or in which order."""
    config = small_config("loop.max_batches_ahead=0", "loop.checkpoint_every=4")
    run_small(tmp_path / "run", config)
    (tmp_path / "plain").mkdir()
    run_virtual(plain_synchronous_loop(config, tmp_path / "plain"))
    checkpoint = RunFolder.open(tmp_path / "run").latest_checkpoint()
    assert checkpoint is not None
    ours, plain = checkpoint.path / "trainer", tmp_path / "plain" / "end"
    for name in ("actor/model", "critic", "actor_optimiser", "critic_optimiser"):
        one, other = (load_file(folder / f"{name}.safetensors") for folder in (ours, plain))
        assert one.keys() == other.keys()
        assert one
        assert [key for key in one if not torch.equal(one[key], other[key])] == [], name
    counters = [json.loads((folder / "trainer.json").read_text())["counters"] for folder in (ours, plain)]
    assert counters[0] == counters[1]
    trained, start = actor_of(tmp_path / "run"), load_folder(tmp_path / "plain" / "start").state_dict()
    assert any(not torch.equal(trained[name], start[name]) for name in trained), "nothing was trained"


def test_a_run_in_virtual_time_resumes_to_the_last_step(tmp_path: Path) -> None:
    """Catches a resume that loses waiting rollouts, reuses a version, or trains something twice."""
    config = small_config("loop.steps=3", "loop.checkpoint_every=2")
    run_small(tmp_path / "run", config)
    longer = small_config("loop.steps=7", "loop.checkpoint_every=2")
    with RunFolder.resume(tmp_path / "run") as folder:
        run_stages(longer, folder, Silent())
    check_history(tmp_path / "run", steps=7)


def check_history(path: Path, *, steps: int) -> None:
    """The invariants of design.md section 4."""
    folder = RunFolder.open(path)
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None
    manifest = checkpoint.manifest
    assert manifest.step == steps
    assert len(set(manifest.consumed)) == len(manifest.consumed), "a rollout was trained twice"
    records = list(read(folder.log))
    published = [record.snapshot.version for record in records if isinstance(record, Published)]
    edges = {(record.snapshot.version, record.snapshot.parent) for record in records if isinstance(record, Published)}
    assert len({version for version, _ in edges}) == len(edges), f"a version number was used twice: {published}"
    finished = Counter(record.rollout.id for record in records if isinstance(record, Finished))
    assert max(finished.values()) == 1
    assert set(manifest.consumed) <= set(finished)
    state = replay(folder.log, consumed=manifest.consumed, step=manifest.step, version=manifest.version, ended=True)
    assert [step.step for step in state.steps] == list(range(1, steps + 1))
    assert [each for step in state.steps for each in step.rollout_ids] == list(manifest.consumed)
    assert set(state.fates.values()) <= set(Fate)
    assert state.quarantined <= 1
    assert state.cursor >= len({each.split("@")[0] for each in manifest.consumed})


def test_a_collapse_may_take_several_evaluations() -> None:
    """Catches a run that ends at one dip, or at two that are not in a row."""
    config = EvaluationConfig(stop_below=0.25, stop_from_step=20, stop_in_a_row=2)
    collapsed = config.collapse_rule()
    means = {0: 0.0, 10: 0.0, 20: 0.1, 30: 0.5, 40: 0.0, 50: 0.2}
    said = {step: collapsed(step, {"eval/overall/mean": last(mean)}) for step, mean in means.items()}
    assert [step for step, ends in said.items() if ends] == [50]
    resumed = config.collapse_rule({10: 0.0, 20: 0.5, 30: 0.1})
    assert not config.collapse_rule({10: 0.0})(20, {"eval/overall/mean": last(0.0)})
    assert resumed(40, {"eval/overall/mean": last(0.0)})


def test_a_run_that_collapses_ends_there(tmp_path: Path) -> None:
    """Catches hours spent on a dead policy, a run without its last evaluation, and a rule that acts before its step."""
    rule = ("evaluation.every_steps=2", "evaluation.final_tasks=10", "loop.steps=12", "evaluation.stop_from_step=3")
    outcome = run_small(tmp_path / "run", small_config(*rule, "evaluation.stop_below=1.1"))
    assert outcome is not None
    assert outcome.reason == "collapsed"
    assert 4 <= outcome.steps < 12
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [(row["step"], row["eval/overall/prompts"]) for row in rows if row["stage"] == "eval"]
    assert evaluated[:3] == [(0, 10.0), (2, 8.0), (4, 8.0)]
    assert evaluated[-1] == (outcome.steps, 10.0)
    assert f"ended at step {outcome.steps}: collapsed" in (tmp_path / "run" / "events.log").read_text()
    latest = RunFolder.open(tmp_path / "run").latest_checkpoint()
    assert latest is not None
    assert latest.manifest.step == outcome.steps


def test_a_run_above_the_rule_goes_on(tmp_path: Path) -> None:
    """Catches a rule that ends a run whose evaluation is at the bound, or that has none."""
    for name, rule in (("none", ()), ("low", ("evaluation.stop_below=-0.5",))):
        outcome = run_small(tmp_path / name, small_config("evaluation.every_steps=1", *rule))
        assert outcome is not None
        assert (outcome.reason, outcome.steps) == ("steps done", 4)


class StopsAtTheLastEvaluation(Silent):
    """Ends the run in the middle of the evaluation after the last step, which takes five tasks."""

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        if (stage, total, done) == ("evaluation at step 2", 5, 3):
            raise RuntimeError("the machine was switched off")


def test_a_last_evaluation_that_was_cut_off_is_done_on_resume(tmp_path: Path) -> None:
    """Catches a run whose last evaluation stays on the few tasks of those between, because a row of it was there."""
    ends = ("tasks.limit=12", "tasks.cycle=false", "loop.steps=50")
    config = small_config(*ends, "evaluation.every_steps=2", "evaluation.tasks=2", "evaluation.final_tasks=5")
    path = tmp_path / "run"
    with RunFolder.create(path) as folder:
        folder.write_config(to_toml(config))
        with pytest.raises(RuntimeError, match="switched off"):
            run_stages(config, folder, StopsAtTheLastEvaluation())

    def evaluations() -> list[tuple[int, int, int]]:
        rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        keys = ("step", "eval/at_an_end", "eval/guess-evaluation/prompts")
        return [tuple(row[key] for key in keys) for row in rows if row["stage"] == "eval"]  # type: ignore[misc]

    assert evaluations() == [(0, 1, 5), (2, 0, 2)]
    for _ in range(2):
        with RunFolder.resume(path) as folder:
            outcome = run_stages(config, folder, Silent())
        assert outcome is not None
        assert (outcome.steps, outcome.reason) == (2, "source exhausted")
        assert evaluations() == [(0, 1, 5), (2, 0, 2), (2, 1, 5)]


def test_an_environment_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a name of the user's module that is refused, or that rollout processes do not find."""
    text = (Path(sao.envs.toy.__file__)).read_text().replace("self, config: GuessConfig", "self")
    (tmp_path / "mine.py").write_text(text.replace("config.max_guesses", "GuessConfig().max_guesses"))
    monkeypatch.syspath_prepend(tmp_path)
    for clock in ("virtual", "real"):
        config = small_config("environment.name=mine:GuessEnvironment", f"clock={clock}", "loop.steps=2")
        outcome = run_small(tmp_path / clock, config)
        assert outcome is not None
        assert outcome.steps == 2
        assert replay(tmp_path / clock / "log").counts["trained"] == 12
