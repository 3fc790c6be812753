"""Supervised fine-tuning on traces: the policy's own tokens are trained, everything else is context.

T tokens of an example.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from transformers import PreTrainedModel

from sao.models.packed_attention import use_packed_attention
from sao.models.scoring import action_logprobs
from sao.observe.metrics import Metric, last
from sao.pipeline.packing import pack
from sao.rollout.protocol import Renderer
from sao.training.fitting import FitConfig, fit
from sao.training.optimiser import Decay, Optimiser, Progress
from sao.training.passes import set_activation_checkpointing
from sao.training.tensors import forward_inputs, to_tensor
from sao.types import BoolArray, GenerationStop, IntArray, Message


@dataclass(frozen=True, kw_only=True)
class SftConfig(FitConfig):
    """One stage of supervised fine-tuning. Several stages are several calls, each with its own examples."""

    stage = "sft"

    lr: float = 2e-5
    """Peak learning rate. Usual for a pretrained model; small models from scratch need 1e-3 and more."""
    decay: Decay = "cosine"
    """How the rate falls to 0 after the warm-up."""
    logprob_chunk_tokens: int = 1024
    """Trained tokens whose logits exist at once. Bounds memory; changes no result but for rounding."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass: less memory, about a third more time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("above 0", "logprob_chunk_tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SftExample:
    """A trace as tokens."""

    token_ids: IntArray
    """(T,)"""
    action_mask: BoolArray
    """(T,); True where the policy is to learn the token; never at token 0."""


def render_trace(messages: Sequence[Message], renderer: Renderer, encode: Callable[[str], Sequence[int]]) -> SftExample:
    """A conversation as the tokens an episode would have had: its assistant messages are the actions.

    `encode` gives an assistant message's tokens, the stop token included. What follows the last assistant message is
    left out. Raises ValueError for a conversation that opens with an assistant message, has none, or two in a row.
    """
    places = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not places or places[0] == 0:
        found = ", ".join(message.role for message in messages[:4]) or "nothing"
        raise ValueError(f"a trace must be messages of the user or system and then of the assistant; it has {found}")
    for place, following in pairwise(places):
        if following == place + 1:
            raise ValueError(
                f"messages {place} and {following} of a trace are both the assistant's; join them into one"
            )
    token_ids = list(renderer.open(messages[: places[0]]))
    action_mask = [False] * len(token_ids)
    for place, following in zip(places, [*places[1:], None], strict=True):
        action = list(encode(messages[place].content))
        token_ids += action
        action_mask += [True] * len(action)
        if following is not None:
            observed = renderer.extend(action, GenerationStop.STOP_TOKEN, messages[place + 1 : following])
            token_ids += observed
            action_mask += [False] * len(observed)
    return SftExample(token_ids=np.array(token_ids, np.int32), action_mask=np.array(action_mask, np.bool_))


def fit_sft(
    actor: PreTrainedModel,
    examples: Sequence[SftExample],
    config: SftConfig,
    *,
    seed: int,
    progress: Progress | None = None,
) -> list[dict[str, Metric]]:
    """Train the actor in place on the mean negative log-likelihood of each batch's action tokens.

    Returns the metrics of every update. Raises ValueError if no example has an action token or one is longer than the
    model takes, and TrainerError after too many gradients in a row that were not finite.
    """
    usable = [example for example in examples if example.action_mask.any()]
    if not usable:
        raise ValueError(f"none of {len(examples)} examples has a token to train on; check the traces' assistant turns")
    longest = max(len(example.token_ids) for example in usable)
    capacity = getattr(actor.config.get_text_config(), "max_position_embeddings", None)
    if capacity is not None and longest > capacity:
        raise ValueError(f"an example has {longest} tokens, the model takes {capacity}; leave it out or shorten it")
    use_packed_attention(actor)
    set_activation_checkpointing(actor, config.activation_checkpointing)
    actor.eval().requires_grad_(True)
    optimiser = Optimiser(
        actor.named_parameters(), betas=config.betas, weight_decay=config.weight_decay, grad_clip=config.grad_clip
    )
    return fit(
        optimiser,
        usable,
        lambda batch: _add_gradient(actor, batch, config),
        config,
        seed=seed,
        progress=progress,
    )


def _add_gradient(actor: PreTrainedModel, batch: Sequence[SftExample], config: SftConfig) -> dict[str, Metric]:
    """Add the gradient of the batch's loss; the loss, and the number of trained tokens."""
    tokens = sum(int(example.action_mask.sum()) for example in batch)
    loss_sum = 0.0
    for micro in pack(batch, config.micro_batch_tokens):
        logprobs, _ = action_logprobs(
            actor,
            *forward_inputs(micro, actor.device),
            to_tensor(micro.predictor_index, actor.device),
            to_tensor(micro.target_ids, actor.device),
            chunk_tokens=config.logprob_chunk_tokens,
            with_entropy=False,
        )
        loss = -logprobs.sum() / tokens
        loss.backward()
        loss_sum += float(loss.detach())
    return {"sft/loss": last(loss_sum), "sft/tokens": last(tokens)}
