"""How well values foretell returns, by hand."""

import math

import pytest
import torch

from sao.training.value_quality import value_quality


def test_quality_by_place_by_hand() -> None:
    """Catches a bias with the wrong sign, and quarters that are mixed up."""
    returns = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    values = torch.tensor([[0.5, 0.5, 1.0, 1.0], [0.5, 0.5, 0.0, 0.25]])
    found = {name: metric.value for name, metric in value_quality(values, returns, torch.ones(2, 4).bool()).items()}
    assert found["critic/value_bias"] == pytest.approx(0.25 / 8)
    assert [found[f"critic/value_bias_q{quarter}"] for quarter in (1, 2, 3, 4)] == [0.0, 0.0, 0.0, 0.125]
    assert [found[f"critic/explained_variance_q{quarter}"] for quarter in (1, 3)] == pytest.approx([0.0, 1.0])
    assert found["critic/explained_variance_q4"] == pytest.approx(1 - (0.125**2) / 0.25)


def test_what_is_not_there_is_no_number() -> None:
    """Catches a quarter without tokens that reports 0, and shapes that broadcast."""
    mask = torch.tensor([[True, False, False]])
    found = {name: metric.value for name, metric in value_quality(torch.ones(1, 3), torch.zeros(1, 3), mask).items()}
    assert found["critic/value_bias_q1"] == 1.0
    assert all(math.isnan(found[f"critic/{name}_q4"]) for name in ("value_bias", "explained_variance"))
    with pytest.raises(ValueError, match="values has shape"):
        value_quality(torch.ones(1, 2), torch.zeros(1, 3), mask)
