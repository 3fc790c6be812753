"""What arms of a seed have in common is made once: the fine-tuned policy, and its rollouts for value pretraining.

Prepared parts lie under the work folder, named by a hash of the settings they depend on, so that a changed setting
makes a new part. A run starts as a folder that holds them already, and goes on as `sao resume` would: its configuration
is the arm's own, so that `sao train` of it alone gives the same run.

    WORK/prepared/sft-HASH/          a run that stopped after fine-tuning
    WORK/prepared/rollouts-HASH/     a run that stopped after value pretraining
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sao.build import describe_machine
from sao.config import RunConfig, to_toml
from sao.envs.math_python import ToolLatency
from sao.store.run_folder import RunFolder

STARTED_FROM = "started_from"
"""Key of environment.json: a hash of each part that the run was given. Floating point differs between processors, so a
part that is made again on another machine is another policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that several runs start from."""

    name: str
    """Of its folder: what it is, and the hash of what it depends on."""
    seed: int
    """Of the runs that share it, for people."""
    command: str
    """Of `sao`, that makes it from `config`."""
    config: RunConfig
    """What to run."""
    needs: str = ""
    """Name of the part it starts from; "" for none."""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name.split('-')[0]} of seed {self.seed}"


def parts_of(config: RunConfig) -> list[Part]:
    """The parts that a run starts from, in the order in which they are made."""
    parts: list[Part] = []
    if config.sft:
        parts.append(_sft(config))
    stage = config.value_pretraining
    if stage is not None and not stage.logged:
        parts.append(_rollouts(config, needs=parts[-1].name if parts else ""))
    return parts


def _sft(config: RunConfig) -> Part:
    # Demonstrations do not depend on how long a tool takes.
    math_python = replace(config.environment.math_python, latency=ToolLatency())
    depends = (
        config.seed, config.tasks, replace(config.environment, math_python=math_python), config.tokenizer,
        config.model, config.sft, config.sft_threads, config.rollout.max_turns,
    )  # fmt: skip
    return Part(name=f"sft-{_hash(depends)}", seed=config.seed, command="sft", config=_plain(config))


def _rollouts(config: RunConfig, *, needs: str) -> Part:
    stage = config.value_pretraining
    assert stage is not None
    depends = (
        needs, config.seed, config.clock, config.tasks, config.environment, config.tokenizer, config.model,
        config.engine, config.engine_cost, config.rollout, config.loop.concurrency, config.loop.max_retries,
        stage.rollouts,
    )  # fmt: skip
    # One update is enough: the rollouts are what is wanted, and each arm fits its own critic to them.
    config = replace(config, value_pretraining=replace(stage, fit=replace(stage.fit, steps=1)))
    name = f"rollouts-{_hash(depends)}"
    return Part(name=name, seed=config.seed, command="pretrain-value", config=_plain(config), needs=needs)


def _plain(config: RunConfig) -> RunConfig:
    """Without what a part's own run does not need."""
    return replace(config, sinks=(), name="prepared")


def _hash(depends: Sequence[object]) -> str:
    plain = [asdict(part) if hasattr(part, "__dataclass_fields__") else part for part in depends]  # type: ignore[call-overload]
    plain = [[asdict(stage) for stage in part] if isinstance(part, tuple) else part for part in plain]
    text = json.dumps(plain, sort_keys=True, default=list)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def part_config(part: Part, prepared: Path) -> RunConfig:
    """The configuration that makes a part, starting from the policy that it needs."""
    if not part.needs:
        return part.config
    policy, config = prepared / part.needs, part.config
    tokenizer = policy / "tokenizer"
    named = config.tokenizer.path or config.model.path
    return replace(
        config,
        sft=(),
        model=replace(config.model, path=str(policy / "sft" / "model"), gguf_file=""),
        tokenizer=replace(config.tokenizer, path=str(tokenizer) if tokenizer.is_dir() else named),
    )


def begin_run(config: RunConfig, run: Path, prepared: Path, command: Sequence[str]) -> None:
    """A run folder at `run` that holds the prepared parts of the configuration; it appears whole or not at all.

    `command` is what people typed, for the record.
    """
    draft = run.with_name(run.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    with RunFolder.create(draft) as folder:
        folder.write_config(to_toml(config))
        folder.write_environment(
            describe_machine(config, list(command)) | {STARTED_FROM: started_from(config, prepared)}
        )
        for part in parts_of(config):
            for name in _given(part):
                if (prepared / part.name / name).is_dir():
                    shutil.copytree(prepared / part.name / name, draft / name)
    draft.rename(run)


def started_from(config: RunConfig, prepared: Path) -> dict[str, str]:
    """By name, a hash of each prepared part that a run of the configuration is given."""
    return {part.name: _fingerprint(part, prepared / part.name) for part in parts_of(config)}


def _given(part: Part) -> tuple[Path, ...]:
    """Folders of a part that runs start with."""
    if part.command == "sft":
        return Path("tokenizer"), Path("sft") / "model"
    return (Path("value_pretraining") / "log",)


def _fingerprint(part: Part, folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in _given(part):
        for path in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
