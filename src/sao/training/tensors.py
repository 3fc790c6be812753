"""From packed arrays to what models take.

T tokens of a micro-batch.
"""

import numpy as np
import torch
from torch import Tensor

from sao.pipeline.packing import MicroBatch


def to_tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on the device; integers become int64, which torch's indexing takes."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device, torch.int64 if tensor.dtype is torch.int32 else None)


def forward_inputs(micro: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and position ids of a micro-batch, (1, T) each."""
    return to_tensor(micro.token_ids, device)[None], to_tensor(micro.position_ids, device)[None]
