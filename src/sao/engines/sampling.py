"""Drawing tokens by inverse CDF with one keyed uniform number each, so that a draw does not depend on its neighbours.

Legend: n rows, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output of SplitMix64 for each state (Steele, Lea and Flood 2014), element by element."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keyed_uniforms(seeds: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, token index) (n,), the same whatever else is drawn."""
    keys = splitmix64(seeds.view(np.uint64)) + indices.view(np.uint64) * _GOLDEN
    return (splitmix64(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logits: Tensor, uniforms: NDArray[np.float64], temperature: NDArray[np.float64], top_p: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sample a token per row of logits (n, V); returns ids (n,) and log-probs (n,) of the distribution sampled from.

    That is softmax(logits / temperature), cut to its top_p nucleus and renormalised; temperature 0 puts all weight on
    the most likely token, so its log-prob is 0. A token of probability 0 is never drawn. Logits that are not finite
    give log-probs that are not.
    """
    if logits.shape[0] != len(uniforms):
        raise ValueError(f"logits {tuple(logits.shape)} and uniforms {uniforms.shape} differ in rows")
    logits = logits.float()
    if (temperature != 1.0).any() or (top_p != 1.0).any():
        logits = _tempered(logits, torch.from_numpy(temperature), torch.from_numpy(top_p))
    logprobs = torch.log_softmax(logits, dim=1)
    cumulative = logprobs.exp().cumsum(dim=1, dtype=torch.float64)
    whole = cumulative[:, -1:]
    aim = torch.from_numpy(uniforms).to(logits.device)[:, None] * whole
    aim = torch.minimum(aim, torch.nextafter(whole, torch.zeros_like(whole)))
    # The first place that passes the aim has a probability above 0, because the place before it did not pass.
    ids = torch.searchsorted(cumulative, aim, right=True).clamp_(max=logits.shape[1] - 1)
    chosen = logprobs.gather(1, ids)
    return ids[:, 0].cpu().numpy(), chosen[:, 0].cpu().numpy()


def _tempered(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    temperature = temperature.to(logits.device, torch.float32)[:, None]
    greedy = temperature == 0.0
    logits = logits / torch.where(greedy, 1.0, temperature)
    best = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.argmax(1, keepdim=True), True)
    logits = logits.masked_fill(greedy & ~best, -torch.inf)
    cut = torch.nonzero(top_p != 1.0)[:, 0].to(logits.device)
    if len(cut):
        ordered, places = torch.sort(logits[cut].softmax(1), dim=1, descending=True, stable=True)
        before = ordered.cumsum(1) - ordered
        outside = before >= top_p.to(logits.device, torch.float32)[cut, None]
        outside[:, 0] = False
        removed = torch.zeros_like(outside).scatter_(1, places, outside)
        logits = logits.index_copy(0, cut, logits[cut].masked_fill(removed, -torch.inf))
    return logits
