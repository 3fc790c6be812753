"""How well values foretell returns, over all action tokens and by their place in the sequence."""

import math

from torch import Tensor

from sao.algorithm.diagnostics import explained_variance, quarters
from sao.observe.metrics import Metric, last


def value_quality(values: Tensor, returns: Tensor, action_mask: Tensor) -> dict[str, Metric]:
    """Explained variance and bias of a critic on a batch (B, T), and of each quarter of its sequences: `_q1` to `_q4`.

    NaN where there is nothing to explain. Raises ValueError for shapes that do not fit.
    """
    found = _quality(values, returns, action_mask)
    for number, quarter in enumerate(quarters(action_mask), 1):
        found |= {f"{name}_q{number}": metric for name, metric in _quality(values, returns, quarter).items()}
    return found


def _quality(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, Metric]:
    explained = explained_variance(values, returns, mask)  # refuses shapes that do not fit
    return {
        "critic/explained_variance": last(math.nan if explained is None else explained),
        "critic/value_bias": last(float((values - returns)[mask].mean())),
    }
