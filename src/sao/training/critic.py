"""The value network: the actor's backbone with a scalar head, its attention (or all of the backbone) frozen.

T tokens of a micro-batch, N scored tokens.
"""

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sao.models.packed_attention import use_packed_attention
from sao.models.scoring import hidden_states

Freeze = Literal["attention", "backbone", "none"]

ATTENTION_NAMES = ("attn", "attention")
"""A module with one of these in its own name is attention (`self_attn`, `linear_attn`), unless it is a norm."""


def attention_modules(backbone: nn.Module) -> dict[str, nn.Module]:
    """The outermost attention modules, by class and by name: full, sliding and linear attention alike."""
    found: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        own_name, class_name = name.rpartition(".")[2].lower(), type(module).__name__
        if "norm" in own_name or class_name.lower().endswith("norm") or any(name.startswith(f"{f}.") for f in found):
            continue
        if any(part in own_name for part in ATTENTION_NAMES) or class_name.endswith("Attention"):
            found[name] = module
    return found


def decoder_layers(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers: children of the longest module list that stands nearest to the root."""
    lists = [(name, module) for name, module in backbone.named_modules() if isinstance(module, nn.ModuleList)]
    if lists:
        name, layers = min(lists, key=lambda item: (item[0].count("."), -len(item[1])))
        yield from ((f"{name}.{index}", layer) for index, layer in enumerate(layers))


class Critic(nn.Module):
    """V of the state before a token, read from the hidden state of the token before it. Without dropout.

    The head starts at zero, so that V = 0 until it is trained and the backbone moves from the second update on.
    """

    def __init__(self, backbone: PreTrainedModel, *, freeze: Freeze = "attention") -> None:
        super().__init__()
        self.backbone = backbone.eval()
        use_packed_attention(backbone)
        device = next(backbone.parameters()).device
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.set_freeze(freeze)

    @classmethod
    def from_actor(cls, actor: PreTrainedModel, *, freeze: Freeze = "attention") -> "Critic":
        """A critic on a copy of the actor's backbone."""
        backbone = actor.base_model
        assert isinstance(backbone, PreTrainedModel)
        return cls(copy.deepcopy(backbone), freeze=freeze)

    def set_freeze(self, freeze: Freeze) -> None:
        """Train all parameters but the attention modules', the head alone, or all.

        Raises ValueError if a layer has no attention module to freeze; the message says what was looked for.
        """
        self.freeze: Freeze = freeze
        self.requires_grad_(True)
        if freeze != "attention":
            self.backbone.requires_grad_(freeze == "none")
            return
        found = attention_modules(self.backbone)
        without = [
            f"{name} ({type(layer).__name__}: {', '.join(child for child, _ in layer.named_children())})"
            for name, layer in decoder_layers(self.backbone)
            if not any(module_name.startswith(f"{name}.") for module_name in found)
        ]
        if without or not any(True for module in found.values() for _ in module.parameters()):
            raise ValueError(
                "the critic's attention is to be frozen, but no module whose name contains "
                f"{' or '.join(map(repr, ATTENTION_NAMES))} or whose class name ends with 'Attention' was found in "
                f"{'; '.join(without[:4]) or type(self.backbone).__name__}"
                f"{f' and {len(without) - 4} more layers' if len(without) > 4 else ''}; "
                "set trainer.freeze = 'none' (and value_pretraining.fit.freeze) for this model"
            )
        for module in found.values():
            module.requires_grad_(False)

    @property
    def num_parameters(self) -> int:
        """Parameters, frozen ones included."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def frozen_share(self) -> float:
        """Share of the parameters that do not train."""
        return sum(p.numel() for p in self.parameters() if not p.requires_grad) / self.num_parameters

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        predictor_index: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Values (N,) fp32 of what follows the hidden states at `predictor_index` (N,).

        `token_ids` and `position_ids` (1, T) hold packed sequences, whose positions restart at 0; `attention_mask` as
        for `hidden_states`.
        """
        hidden = hidden_states(self.backbone, token_ids, position_ids, attention_mask)
        values = self.head(hidden[0].index_select(0, predictor_index).float())
        return values.squeeze(-1).clone()  # FSDP hangs its hooks on what is returned, which must not be a view.
