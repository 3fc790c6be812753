"""Log-probabilities of given tokens under a causal model, without ever holding the logits of a long sequence.

Legend: T tokens of a packed micro-batch, N scored tokens, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from sao.models.load import output_head
from sao.models.packed_attention import packed_mask


def hidden_states(
    backbone: nn.Module, token_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Last hidden states (1, T, H) of sequences packed into one row (1, T); position ids restart at each sequence.

    Without a cache `transformers` sees the restarts and keeps sequences apart; with one they would leak silently.
    `attention_mask` is for an attention function that needs to be told more; by default it follows from the restarts.
    """
    if token_ids.ndim != 2 or token_ids.shape[0] != 1 or token_ids.shape != position_ids.shape:
        raise ValueError(
            f"token ids {tuple(token_ids.shape)} and position ids {tuple(position_ids.shape)} must both be (1, T)"
        )
    mask = packed_mask(backbone, position_ids) if attention_mask is None else attention_mask
    outputs = backbone(input_ids=token_ids, position_ids=position_ids, attention_mask=mask, use_cache=False)
    return outputs.last_hidden_state


def action_logprobs(
    model: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor,
    predictor_index: Tensor,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = True,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(logits / temperature), and that distribution's entropy, in nats, fp32.

    token_ids, position_ids: (1, T), packed. predictor_index: (N,) place in 0..T-1 of the token before each target.
    target_ids: (N,). Returns logprobs (N,) and entropy (N,); the entropy has no gradient, and is 0 without
    `with_entropy`; `attention_mask` as for `hidden_states`. The head is applied to `chunk_tokens` targets at a
    time, and again in the backward pass.
    """
    if predictor_index.ndim != 1 or predictor_index.shape != target_ids.shape:
        raise ValueError(
            f"predictor index {tuple(predictor_index.shape)} and targets {tuple(target_ids.shape)} must both be (N,)"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    hidden = hidden_states(model.base_model, token_ids, position_ids, attention_mask)[0]
    hidden = hidden.index_select(0, predictor_index)
    head = output_head(model)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, len(target_ids), chunk_tokens):
        part = (hidden[start : start + chunk_tokens], target_ids[start : start + chunk_tokens])
        if torch.is_grad_enabled():
            scored = checkpoint(_score, head, *part, temperature, with_entropy, use_reentrant=False)
        else:
            scored = _score(head, *part, temperature, with_entropy)
        logprobs.append(scored[0])
        entropies.append(scored[1])
    if not logprobs:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty.clone()
    return torch.cat(logprobs), torch.cat(entropies)


def sequence_logprobs(model: PreTrainedModel, token_ids: Sequence[int], *, chunk_tokens: int = 1024) -> Tensor:
    """Log-prob (T-1,) of each token of one sequence after the first, given those before it; fp32, no gradient."""
    tokens = torch.tensor([list(token_ids)], dtype=torch.long, device=model.device)
    places = torch.arange(tokens.shape[1], device=model.device)
    with torch.no_grad():
        return action_logprobs(
            model, tokens, places[None], places[:-1], tokens[0, 1:], chunk_tokens=chunk_tokens, with_entropy=False
        )[0]


def _score(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    if not with_entropy:
        chosen = logits.gather(1, targets[:, None])[:, 0]
        return chosen - logits.logsumexp(1), logits.new_zeros(len(targets))
    logprobs = torch.log_softmax(logits, dim=1)
    # With a graph of its own, an entropy that nobody differentiates would keep every chunk's logits alive.
    entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy
