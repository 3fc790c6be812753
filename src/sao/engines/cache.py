"""Keys and values of many sessions, one row each, and the attention that reads them where they lie.

Legend: S rows, C columns (the longest context), n rows in use, q new tokens per row, K key heads, G query heads per
key head, D head width, L the longest context in use.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "sao_rows"
"""Name under which `transformers` finds `grouped_attention`."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `transformers`' calling convention that never copies keys for the query heads that share them.

    query (n, K*G, q, D), key and value (n, K, L, D), mask (n or 1, 1, q, L). Returns (n, q, K*G, D).
    """
    rows, heads, new, width = query.shape
    shared = key.shape[1]
    if new == 1 and heads != shared:
        # One query per row: the G heads of a group see the same keys and the same mask, so they pose as G queries.
        query = query.reshape(rows, shared, heads // shared, width)
        result = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
        return result.reshape(rows, 1, heads, width), None
    causal = attention_mask is None and new > 1
    result = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=heads != shared
    )
    return result.transpose(1, 2), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def check_supported(config: PreTrainedConfig) -> None:
    """Raise ValueError for a model whose layers do not all keep every past token."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"{config.model_type} has layers of type {sorted(kinds - {'full_attention'})}; the local engine caches full"
            " attention only: use a model of the Qwen3, Qwen3Moe or Llama family"
        )
    if getattr(config, "use_sliding_window", False) or (
        getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None)
    ):
        raise ValueError(f"{config.model_type} uses a sliding window; the local engine caches full attention only")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{config.model_type} is no decoder with an ordinary key and value cache")


def cache_argument(backbone: nn.Module) -> str:
    """Name of the forward argument that takes the cache: it differs between releases of `transformers`."""
    names = inspect.signature(backbone.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


class RowCache(Cache):
    """Preallocated keys and values; `place` says where the next forward writes and what it sees."""

    def __init__(self, model: PreTrainedModel, *, rows: int, columns: int) -> None:
        super().__init__(layers=[])
        config = model.config.get_text_config()
        check_supported(config)
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.columns = columns
        self._device = model.device
        # Zeros, not garbage: a masked NaN would still poison the weighted sum. The last column takes padding.
        self.store = torch.zeros(
            (config.num_hidden_layers, 2, rows, columns + 1, heads, width), dtype=model.dtype, device=model.device
        )
        self._flat = self.store.view(config.num_hidden_layers, 2, rows * (columns + 1), heads * width)
        self._places = torch.empty(0, dtype=torch.long)
        self._rows: slice | Tensor = slice(0, 0)
        self._longest = 0

    def place(self, rows: slice | Tensor, positions: Tensor, longest: int) -> None:
        """The next forward has tokens for `rows` at `positions` (n, q), and sees the first `longest` columns.

        Positions past the last column are padding. A slice of rows is read in place; an index tensor is gathered.
        """
        index = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        columns = positions.clamp(max=self.columns)
        self._places = (index[:, None] * (self.columns + 1) + columns).flatten().to(self._device)
        self._rows = rows if isinstance(rows, slice) else rows.to(self._device)
        self._longest = longest

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values (n, K, q, D) of one layer; returns all that are visible, (n, K, L, D)."""
        keys, values = self._flat[layer_idx]
        width = keys.shape[1]
        keys.index_copy_(0, self._places, key_states.transpose(1, 2).reshape(-1, width))
        values.index_copy_(0, self._places, value_states.transpose(1, 2).reshape(-1, width))
        stored = self.store[layer_idx][:, self._rows, : self._longest]
        return stored[0].transpose(1, 2), stored[1].transpose(1, 2)

    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` columns of one row over another."""
        self.store[:, :, target, :used] = self.store[:, :, source, :used]

    def swap(self, first: int, second: int, used: int) -> None:
        """Exchange the first `used` columns of two rows."""
        kept = self.store[:, :, first, :used].clone()
        self.store[:, :, first, :used] = self.store[:, :, second, :used]
        self.store[:, :, second, :used] = kept

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the next forward sees: all positions are given explicitly."""
        return self._longest

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        """The longest context."""
        return self.columns
