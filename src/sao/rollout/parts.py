"""Builds what a rollout process needs, inside it and without torch."""

from pathlib import Path

from sao.clock import RealClock
from sao.engines.client import EngineClient
from sao.envs.select import EnvironmentConfig, TasksConfig, make_world
from sao.rollout.renderer import ToolRole, load_renderer
from sao.rollout.serve import WorkerParts


def worker_parts(
    environment: EnvironmentConfig,
    tasks: TasksConfig,
    tool_role: ToolRole,
    tokenizer: Path,
    address: str,
    secret: str,
    seed: int,
) -> WorkerParts:
    """Environments, renderer, and a client of the engine that listens at `address` for those who know the secret."""
    world = make_world(environment, tasks, RealClock(), seed=seed)
    renderer = load_renderer(str(tokenizer), tool_role=tool_role)
    engine = EngineClient(address, secret=secret)
    return WorkerParts(make_environment=world.make_environment, engine=engine, renderer=renderer, stop=world.stop)
