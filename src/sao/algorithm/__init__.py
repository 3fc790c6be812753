"""The method: pure functions over tensors. Imports torch only."""

from sao.algorithm.advantages import (
    group_centred,
    group_normalised,
    leave_one_out,
    length_adaptive_lambda,
    observation_inclusive_gae,
    skip_observation_gae,
    step_gae,
    whiten,
)
from sao.algorithm.diagnostics import PolicyDiagnostics, explained_variance, ratio_quantiles
from sao.algorithm.losses import (
    decoupled_ppo_policy_loss,
    dis_policy_loss,
    icepop_policy_loss,
    ppo_clip_policy_loss,
    reinforce_policy_loss,
    value_loss,
)
from sao.algorithm.sao import AlgorithmConfig, Targets, actor_loss, critic_loss, targets

__all__ = [
    "AlgorithmConfig",
    "PolicyDiagnostics",
    "Targets",
    "actor_loss",
    "critic_loss",
    "decoupled_ppo_policy_loss",
    "dis_policy_loss",
    "explained_variance",
    "group_centred",
    "group_normalised",
    "icepop_policy_loss",
    "leave_one_out",
    "length_adaptive_lambda",
    "observation_inclusive_gae",
    "ppo_clip_policy_loss",
    "ratio_quantiles",
    "reinforce_policy_loss",
    "skip_observation_gae",
    "step_gae",
    "targets",
    "value_loss",
    "whiten",
]
