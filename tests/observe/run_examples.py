"""A run folder as a run of a given length would leave it, without the run."""

from pathlib import Path

import numpy as np

from sao.store.log import RolloutLogWriter
from sao.store.records import Admitted, Dropped, Finished, Published, TokenRecord, Trained
from sao.store.run_folder import RunFolder
from sao.types import Rollout, Sequence, Snapshot, StopReason, Task

BATCH = 4


def make_rollout(name: str, generator: np.random.Generator, version: int, turns: int = 2) -> Rollout:
    """Two tokens of observation and three of action per turn; the reward is 0 or 1 on the last."""
    length = 5 * turns
    mask = np.tile([False, False, True, True, True], turns)
    logprobs = np.where(mask, -generator.exponential(0.5, length), 0).astype(np.float32)
    rewards = np.zeros(length, np.float32)
    rewards[-1] = float(generator.random() < 0.5)
    sequence = Sequence(
        token_ids=generator.integers(0, 50, length).astype(np.int32),
        action_mask=mask,
        rollout_logprobs=logprobs,
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        rewards=rewards,
        turns=np.repeat(np.arange(turns), 5).astype(np.int32),
    )
    return Rollout(
        id=f"{name}.0",
        task_id=name,
        prompt_id=name,
        group_id=name,
        attempt=0,
        sequences=(sequence,),
        stop_reason=StopReason.FINISHED,
    )


def train_row(step: int, generator: np.random.Generator, *, critic: bool = True) -> dict[str, object]:
    """A row of metrics of a run that learns."""
    noise = generator.normal
    row: dict[str, object] = {"step": step, "version": step, "stage": "train"}
    reward = 0.9 - 0.5 * np.exp(-step / 60) + noise(0, 0.06)
    row |= {"rollout/reward": float(np.clip(reward, 0, 1)), "rollout/action_tokens": 6.0}
    row |= {"age/mean": 2 + noise(0, 0.2), "age/p90": 4.0, "age/max": 7.0, "age/queue": 1.0}
    row |= {"actor/entropy": 1.2 * np.exp(-step / 200), "actor/grad_norm": float(np.exp(noise(0, 0.3)))}
    row |= {"actor/masked_low_share": 0.004 + abs(noise(0, 0.001)), "actor/masked_high_share": 0.0005}
    row |= {"actor/ratio_p01": 0.8, "actor/ratio_p50": 1.0, "actor/ratio_p99": 1.3, "actor/ratio_max": 5.0}
    row |= {"actor/skipped": 0.0, "loop/trained": BATCH * step, "engine/generated_tokens": 30 * step}
    row |= {"engine/gap_same_mean": 3e-7, "engine/gap_older_mean": 2e-3}
    row |= {"time/clock": 1.5 * step, "time/wait_for_batch": 0.3, "time/step": 1.2, "engine/busy_seconds": 1.4 * step}
    row |= {"cpu/trainer": 2.0 * step, "memory/trainer_mb": 900.0}
    if critic:
        row |= {"critic/explained_variance": 0.5 - np.exp(-step / 20) + noise(0, 0.05), "critic/grad_norm": 3.0}
        row |= {"time/values": 0.2, "time/critic": 0.6, "time/actor": 0.4, "memory/critic_mb": 300.0}
    return row


def eval_row(step: int, mean: float, name: str = "chain") -> dict[str, object]:
    """An evaluation of 200 prompts."""
    values = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "prompts": 200, "failed": 0, "pass_at_1": mean}
    return {"step": step, "version": step, "stage": "eval"} | {
        f"eval/{name}/{key}": value for key, value in values.items()
    }


def make_run(path: Path, *, steps: int, critic: bool = True, evaluate: bool = True, log: bool = True) -> Path:
    """A run folder with metrics and, with `log`, rollouts of age 1; two rollouts are dropped."""
    generator = np.random.default_rng(0)
    with RunFolder.create(path) as run:
        run.write_config('name = "example"\n\n[algorithm]\nratio_low = 0.7\nratio_high = 6.0\n')
        writer = RolloutLogWriter(run.log, inline=True)
        if evaluate:
            run.write_metrics(eval_row(0, 0.4))
        writer.append(Published(snapshot=Snapshot(version=0, parent=None, location="", checksum="")))
        for step in range(1, steps + 1):
            if log:
                _log_step(writer, step, generator, critic)
            run.write_metrics(train_row(step, generator, critic=critic))
            if evaluate and step == steps:
                run.write_metrics(eval_row(step, 0.7))
        if log:
            for index in range(2):
                admit(writer, f"lost{index}", 0)
                writer.append(Dropped(rollout_id=f"lost{index}.0", reason="over_age"))
        writer.close()
    return path


def admit(writer: RolloutLogWriter, name: str, cursor: int) -> None:
    """Log that a task was admitted."""
    task = Task(id=name, prompt_id=name, question="?", answer="!")
    writer.append(
        Admitted(task=task, cursor=cursor, rollout_id=f"{name}.0", group_id=name, attempt=0, seed=0, clock_seconds=0.0)
    )


def _log_step(writer: RolloutLogWriter, step: int, generator: np.random.Generator, critic: bool) -> None:
    rollouts = [make_rollout(f"t{step}-{index}", generator, max(step - 2, 0)) for index in range(BATCH)]
    for index, rollout in enumerate(rollouts):
        admit(writer, rollout.task_id, BATCH * (step - 1) + index + 1)
        writer.append(Finished(rollout=rollout, position=BATCH * (step - 1) + index))
    tokens = tuple((token_record(rollout, generator, critic),) for rollout in rollouts)
    writer.append(Published(snapshot=Snapshot(version=step, parent=step - 1, location="", checksum="")))
    ids = tuple(rollout.id for rollout in rollouts)
    writer.append(Trained(step=step, version=step, parent=step - 1, rollout_ids=ids, tokens=tokens))


def token_record(rollout: Rollout, generator: np.random.Generator, critic: bool) -> TokenRecord:
    """Values that see the end come, and log-probs a little off the recorded ones."""
    (sequence,) = rollout.sequences
    mask, length = sequence.action_mask, len(sequence.token_ids)
    known = np.linspace(0.1, 0.9, length)
    values = known * rollout.reward + (1 - known) * 0.5 + generator.normal(0, 0.05, length)
    returns = np.where(mask, rollout.reward, 0).astype(np.float32)
    values = np.where(mask, values if critic else np.nan, 0).astype(np.float32)
    logprobs = np.where(mask, sequence.rollout_logprobs + generator.normal(0, 0.1, length), 0).astype(np.float32)
    return TokenRecord(actor_logprobs=logprobs, values=values, advantages=returns - values, returns=returns)
