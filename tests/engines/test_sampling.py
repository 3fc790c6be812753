"""Keyed draws: known numbers, exact distributions, independence of neighbours."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sao.engines.sampling import draw, keyed_uniforms, splitmix64

ONE = np.ones(1)


def draw_one(probabilities: list[float], uniform: float, temperature: float = 1.0, top_p: float = 1.0):
    logits = torch.tensor([probabilities]).log()
    ids, logprobs = draw(logits, np.array([uniform]), np.array([temperature]), np.array([top_p]))
    return int(ids[0]), float(logprobs[0])


def test_splitmix64_gives_the_published_numbers():
    """Catches a wrong constant or shift, which still looks random: reference outputs for seed 0."""
    states = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(states).tolist() == expected


def test_neighbouring_seeds_and_indices_are_independent():
    """Catches a key in which seed and index add up, so that one rollout repeats another one's draws a token later."""
    seeds, indices = np.meshgrid(np.arange(-40, 40), np.arange(60), indexing="ij")
    uniforms = keyed_uniforms(seeds.ravel(), indices.ravel())
    assert len(np.unique(uniforms)) == uniforms.size
    assert abs(uniforms.mean() - 0.5) < 0.02
    assert abs(uniforms.var() - 1 / 12) < 0.005
    table = uniforms.reshape(seeds.shape)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 1), (0.19, 1), (0.21, 2), (0.69, 2), (0.71, 4), (1 - 2**-53, 4)]
)
def test_inverse_cdf_by_hand(uniform: float, expected: int):
    """Catches an off-by-one in the search and the draw of a token of probability 0 at either end."""
    token, logprob = draw_one([0.0, 0.2, 0.5, 0.0, 0.3, 0.0], uniform)
    assert token == expected
    assert logprob == pytest.approx(np.log([0.0, 0.2, 0.5, 0.0, 0.3][expected]), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.999])
def test_temperature_zero_takes_the_best_with_certainty(uniform: float):
    """Catches a division by zero, and a log-prob that is not of the distribution sampled from."""
    assert draw_one([0.2, 0.5, 0.3], uniform, temperature=0.0) == (1, 0.0)


def test_temperature_by_hand():
    """Catches multiplying instead of dividing: at T = 0.5 probabilities 0.2, 0.8 become 1/17, 16/17."""
    assert draw_one([0.2, 0.8], 0.05, temperature=0.5) == (0, pytest.approx(np.log(1 / 17), abs=1e-5))
    assert draw_one([0.2, 0.8], 0.07, temperature=0.5) == (1, pytest.approx(np.log(16 / 17), abs=1e-5))


def test_top_p_by_hand():
    """Catches a nucleus without the token that crosses the mark: 0.5 + 0.3 >= 0.7, renormalised to 5/8 and 3/8."""
    assert draw_one([0.2, 0.5, 0.3], 0.99, top_p=0.7) == (2, pytest.approx(np.log(3 / 8), abs=1e-5))
    assert draw_one([0.2, 0.5, 0.3], 0.62, top_p=0.7) == (1, pytest.approx(np.log(5 / 8), abs=1e-5))
    assert draw_one([0.2, 0.5, 0.3], 0.5, top_p=1e-9) == (1, 0.0)


def test_a_row_does_not_depend_on_its_neighbours_settings():
    """Catches a mixed batch in which one greedy or nucleus row changes the distribution of the plain ones."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    uniforms = np.array([0.3, 0.3, 0.6, 0.9])
    ids, logprobs = draw(logits, uniforms, np.array([1.0, 0.0, 0.7, 1.0]), np.array([1.0, 1.0, 0.5, 0.8]))
    for row, (temperature, top_p) in enumerate([(1.0, 1.0), (0.0, 1.0), (0.7, 0.5), (1.0, 0.8)]):
        alone = draw(logits[row : row + 1], uniforms[row : row + 1], ONE * temperature, ONE * top_p)
        assert alone[0][0] == ids[row]
        assert alone[1][0] == pytest.approx(logprobs[row], abs=1e-6)


def test_frequencies_match_probabilities():
    """Catches a biased draw: 40,000 keyed draws, every frequency within five standard deviations."""
    probabilities = np.array([0.01, 0.04, 0.15, 0.3, 0.5])
    count = 40_000
    uniforms = keyed_uniforms(np.full(count, 7), np.arange(count))
    logits = torch.from_numpy(np.log(probabilities)).float().expand(count, -1)
    ids, _ = draw(logits, uniforms, np.ones(count), np.ones(count))
    frequencies = np.bincount(ids, minlength=5) / count
    assert (np.abs(frequencies - probabilities) < 5 * np.sqrt(probabilities * (1 - probabilities) / count)).all()


def test_logits_that_are_not_finite_show_in_the_logprob():
    """Catches a silent draw from broken weights (and an index error that would hide the cause)."""
    _, logprobs = draw(torch.full((1, 5), torch.nan), np.array([0.5]), ONE, ONE)
    assert not np.isfinite(logprobs).any()


@given(st.lists(st.floats(-80, 80), min_size=1, max_size=30), st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_has_probability(logits: list[float], uniform: float):
    """Catches a draw of an impossible token, whose log-prob of -inf would poison every ratio."""
    table = torch.tensor([[*logits, -torch.inf]])
    ids, logprobs = draw(table, np.array([uniform]), ONE, ONE)
    assert np.isfinite(logprobs).all()
    assert logprobs[0] == pytest.approx(torch.log_softmax(table, 1)[0, ids[0]].item(), abs=1e-5)
