"""The smallest configuration in which every part is real: a toy game, a tiny transformer, tokens, log and trainer."""

from pathlib import Path

from sao.config import RunConfig, from_tree, to_toml
from sao.loop import Outcome
from sao.observe.metrics import Metrics
from sao.stages import run_stages
from sao.store.run_folder import RunFolder

TREE = {
    "name": "small",
    "clock": "virtual",
    "tasks": {"source": "guess"},
    "environment": {"name": "guess"},
    "model": {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        "max_positions": 128,
    },
    "trainer": {"actor_lr": 1e-3, "critic_lr": 1e-3},
    "engine": {"max_sessions": 16, "max_context": 128},
    "rollout": {"max_turns": 3, "max_tokens": 100, "max_action_tokens_per_turn": 16, "cut_turn": "step"},
    "loop": {"steps": 4, "batch_size": 6, "concurrency": 8, "max_batches_ahead": 2, "checkpoint_every": 2},
    "evaluation": {"every_steps": 100, "tasks": 8},
}


class Silent:
    """A reporter for tests."""

    def say(self, text: str) -> None:
        pass

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        pass

    def row(self, step: int, version: int, stage: str, metrics: Metrics) -> None:
        pass


def small_config(*overrides: str) -> RunConfig:
    """The smallest configuration, changed."""
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in TREE.items()}
    return from_tree(tree, overrides)


def run_small(path: Path, config: RunConfig) -> Outcome | None:
    """A whole run in a new folder."""
    with RunFolder.create(path) as folder:
        folder.write_config(to_toml(config))
        return run_stages(config, folder, Silent())
