"""What fine-tuning and value pretraining share: settings, the order of examples, and what follows a bad gradient."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sao.observe.metrics import Metric, last
from sao.pipeline.packing import shuffled_batches
from sao.training.optimiser import Decay, Optimiser, Progress, learning_rate
from sao.training.protocol import TrainerError

Example = TypeVar("Example")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of every stage that fits a fixed set of examples before RL."""

    stage = ""
    """No setting. Name of the stage: its section of the configuration, and the first half of its metrics' keys."""

    epochs: int = 1
    """Passes over the examples; `steps` overrides it where it is not 0."""
    steps: int = 0
    """Updates in all; 0 takes the number from `epochs`."""
    batch_size: int = 32
    """Examples per update."""
    lr: float = 2e-5
    """Peak learning rate."""
    warmup_steps: int = 10
    """Updates over which the rate rises."""
    decay: Decay = "linear"
    """How the rate falls to 0 after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments; as in the trainer."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one forward pass. Bounds memory; changes no result but for rounding."""
    max_skipped_in_a_row: int = 3
    """Updates in a row with a gradient that is not finite after which the stage stops."""

    def __post_init__(self) -> None:
        self._require("above 0", "batch_size", "lr", "grad_clip", "micro_batch_tokens", "max_skipped_in_a_row")
        self._require("0 or more", "epochs", "steps", "warmup_steps", "weight_decay")
        if not self.epochs and not self.steps:
            raise ValueError(f"{self.stage}.fit.epochs and {self.stage}.fit.steps are 0, so nothing would be fitted")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"{self.stage}.fit.betas is {self.betas}; both must be in [0, 1)")

    def _require(self, least: str, *names: str) -> None:
        for name in names:
            number = getattr(self, name)
            if not math.isfinite(number) or number < 0 or (number == 0 and least == "above 0"):
                raise ValueError(f"{self.stage}.fit.{name} is {number}; it must be finite, {least}")

    def num_steps(self, num_examples: int) -> int:
        """Updates in all."""
        return self.steps or self.epochs * math.ceil(num_examples / self.batch_size)


def fit(
    optimiser: Optimiser,
    examples: Sequence[Example],
    add_gradient: Callable[[Sequence[Example]], dict[str, Metric]],
    config: FitConfig,
    *,
    seed: int,
    progress: Progress | None,
) -> list[dict[str, Metric]]:
    """One update per batch; `add_gradient` adds a batch's gradient and gives its metrics. The metrics of every update.

    An update whose gradient is not finite is skipped and counted. Raises TrainerError after too many in a row.
    """
    num_steps, stage = config.num_steps(len(examples)), config.stage
    history: list[dict[str, Metric]] = []
    skipped = in_a_row = 0
    for step, batch in zip(range(num_steps), shuffled_batches(examples, config.batch_size, seed), strict=False):
        rate = learning_rate(
            config.lr, step, warmup_steps=config.warmup_steps, decay=config.decay, total_steps=num_steps
        )
        found = add_gradient(batch)
        outcome = optimiser.step(rate)
        skipped += not outcome.applied
        in_a_row = 0 if outcome.applied else in_a_row + 1
        if in_a_row >= config.max_skipped_in_a_row:
            raise TrainerError(
                f"the gradient was not finite in the last {in_a_row} of {step + 1} updates of {stage}, so they were "
                f"skipped; {stage}.fit.max_skipped_in_a_row is {config.max_skipped_in_a_row}. Lower {stage}.fit.lr"
            )
        metrics = found | {
            f"{stage}/lr": last(rate),
            f"{stage}/grad_norm": last(outcome.grad_norm),
            f"{stage}/skipped": last(skipped),
        }
        history.append(metrics)
        if progress is not None:
            progress(step + 1, num_steps, metrics)
    return history
