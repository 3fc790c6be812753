"""Checks with which functions and settings begin: each raises ValueError with the offending value and what fits."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor


def check_shapes(*, action_mask: Tensor, **arrays: Tensor) -> None:
    """Raise ValueError unless the mask is bool (B, T) and every array has its shape; the message names both shapes."""
    if action_mask.ndim != 2 or action_mask.dtype != torch.bool:
        raise ValueError(f"action_mask is {action_mask.dtype} {tuple(action_mask.shape)}; it must be bool (B, T)")
    for name, array in arrays.items():
        if array.shape != action_mask.shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, the action mask {tuple(action_mask.shape)}")


def check_settings(config: Any, section: str, *, shares: Sequence[str] = (), above_zero: Sequence[str] = ()) -> None:
    """Raise ValueError for a choice that a dataclass does not list, a share outside [0, 1], or a number not above 0.

    Messages call a setting `section`.name. A number that is None is off, and passes.
    """
    for field in fields(config):
        value, choices = getattr(config, field.name), get_args(field.type)
        if get_origin(field.type) is Literal and value not in choices:
            raise ValueError(f"{section}.{field.name} is {value!r}; choose one of {', '.join(map(repr, choices))}")
    for name in shares:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{section}.{name} is {getattr(config, name)}; it must be in [0, 1]")
    for name in above_zero:
        if getattr(config, name) is not None and not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{section}.{name} is {getattr(config, name)}; it must be above 0")
