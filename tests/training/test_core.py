"""One training step on real tiny transformers: order, sums over micro-batches, and what may go wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_toys import make_actor, make_batch, make_core, make_rollout, make_sequence, weights

from sao.algorithm.sao import AlgorithmConfig
from sao.pipeline.packing import pack, rows
from sao.training.core import TrainerCore
from sao.training.critic import Critic
from sao.training.passes import actor_pass, critic_pass
from sao.training.protocol import TrainerError
from sao.training.settings import TrainerConfig
from sao.training.tensors import forward_inputs, to_tensor
from sao.types import Batch, FailureKind, StopReason

CPU = torch.device("cpu")


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def play(core: TrainerCore, batches: list[Batch], *, critic_first: bool = False) -> list[dict[str, float]]:
    found = []
    for batch in batches:
        core.begin(batch)
        for update in (
            (core.critic_update, core.actor_update) if critic_first else (core.actor_update, core.critic_update)
        ):
            update()
        found.append({key: metric.value for key, metric in core.report().metrics.items()})
    return found


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_actor_first_equals_critic_first(architecture: str):
    """Values or targets taken after an update of the same step, or randomness that both updates share."""
    batches = [make_batch(step=step, seed=step) for step in (1, 2, 3)]
    one, other = make_core(architecture), make_core(architecture)
    first, second = play(one, batches), play(other, batches, critic_first=True)
    assert first == second
    for mine, theirs in ((one.actor, other.actor), (one.critic, other.critic)):
        assert mine is not None
        assert theirs is not None
        pairs = zip(weights(mine).values(), weights(theirs).values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def _step_gradients(core: TrainerCore, algorithm: AlgorithmConfig, budget: int, chunk: int):
    """Losses and gradients of actor and critic on one batch, through a core with this budget."""
    assert core.critic is not None
    config = replace(core.config, micro_batch_tokens=budget, logprob_chunk_tokens=chunk)
    fresh = TrainerCore(actor=core.actor, critic=core.critic, config=config, algorithm=algorithm)
    fresh.begin(BATCH)
    step = fresh._begun()
    core.actor.zero_grad()
    core.critic.zero_grad()
    done = fresh._actor_pass(step, fresh._actor_denominator(step), train=True)
    value_loss = fresh._critic_pass(step)
    return done.loss, value_loss, gradients(core.actor), gradients(core.critic)


BATCH = make_batch(count=7, seed=5)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@settings(max_examples=8, deadline=None)
@given(
    budget=st.integers(1, 200),
    chunk=st.integers(1, 64),
    denominator=st.sampled_from(["action_tokens", "kept_tokens", "trajectory_mean"]),
)
def test_micro_batches_add_up(architecture: str, budget: int, chunk: int, denominator: str):
    """A loss averaged per micro-batch, or per chunk: the gradient then depends on the packing, several-fold."""
    core = CORES[architecture]
    algorithm = AlgorithmConfig(denominator=denominator)  # type: ignore[arg-type]
    expected = _step_gradients(core, algorithm, 10**6, 10**6)
    found = _step_gradients(core, algorithm, budget, chunk)
    assert found[:2] == pytest.approx(expected[:2], abs=1e-5)
    for mine, whole in zip(found[2:], expected[2:], strict=True):
        assert mine.keys() == whole.keys()
        for name, gradient in whole.items():
            assert torch.allclose(mine[name], gradient, atol=2e-6, rtol=1e-3), name


CORES = {name: make_core(name) for name in ("qwen3", "qwen3_moe")}
for _core in CORES.values():
    torch.manual_seed(2)
    torch.nn.init.normal_(_core.critic.head.weight, std=0.1)  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_packed_logprobs_equal_separate_ones(architecture: str):
    """Sequences that leak into each other when packed, and logits that differ when computed in chunks."""
    actor = make_actor(architecture)
    arrays = rows(BATCH.rollouts)
    inputs = {
        "rollout_logprobs": to_tensor(arrays.rollout_logprobs, CPU),
        "advantages": torch.ones(arrays.rewards.shape),
        "denominator": 1.0,
        "algorithm": AlgorithmConfig(policy_loss="none"),
        "train": False,
    }
    packed = actor_pass(actor, pack(arrays.sequences, 10**6, places=arrays.places), chunk_tokens=10**6, **inputs)
    single = actor_pass(actor, pack(arrays.sequences, 1, places=arrays.places), chunk_tokens=3, **inputs)
    assert torch.allclose(packed.logprobs, single.logprobs, atol=1e-5)
    assert packed.diagnostics.entropy_sum == pytest.approx(single.diagnostics.entropy_sum, rel=1e-4)
    for row, sequence in enumerate(arrays.sequences):
        logits = actor(input_ids=to_tensor(sequence.token_ids, CPU)[None]).logits[0]
        plain = torch.log_softmax(logits[:-1], -1).gather(1, to_tensor(sequence.token_ids, CPU)[1:, None])[:, 0]
        expected = torch.where(torch.from_numpy(sequence.action_mask)[1:], plain, 0.0)
        assert torch.allclose(single.logprobs[row, 1 : len(expected) + 1], expected, atol=1e-5)


def test_reported_tokens_are_those_before_the_update():
    """Records whose log-probs or values are of the updated weights, or are put at the wrong tokens."""
    core = make_core(algorithm=AlgorithmConfig(whiten=False))
    play(core, [make_batch(seed=3)])
    batch = make_batch(step=2, seed=4)
    assert core.critic is not None
    sequence = batch.rollouts[1].sequences[0]
    tokens, positions = to_tensor(sequence.token_ids, CPU)[None], torch.arange(len(sequence.token_ids))[None]
    with torch.no_grad():
        logits = torch.log_softmax(core.actor(input_ids=tokens).logits[0], -1)
        values = core.critic(tokens, positions, torch.arange(len(sequence.token_ids)))
    core.begin(batch)
    core.actor_update()
    core.critic_update()
    found = core.report().tokens[1][0]
    places = np.flatnonzero(sequence.action_mask)
    expected = logits[torch.from_numpy(places) - 1, tokens[0, places]]
    assert found.actor_logprobs[places] == pytest.approx(expected.tolist(), abs=1e-5)
    assert found.values[places] == pytest.approx(values[torch.from_numpy(places) - 1].tolist(), abs=1e-5)
    assert found.returns[places] == pytest.approx(1.0, abs=1e-5)
    last = places[-1]
    assert found.advantages[last] == pytest.approx(1.0 - found.values[last], abs=1e-5)
    off = ~sequence.action_mask
    assert not any(array[off].any() for array in (found.actor_logprobs, found.values, found.advantages, found.returns))


def test_a_batch_with_nothing_kept_changes_nothing_and_is_finite():
    """0/0 in a micro-batch, or a batch, whose tokens are all outside the band."""
    core = make_core(algorithm=AlgorithmConfig(denominator="kept_tokens", ratio_low=0.999999, ratio_high=1.000001))
    before = weights(core.actor)
    (found,) = play(core, [make_batch()])
    assert found["actor/grad_norm"] == 0
    assert found["actor/loss"] == 0
    assert found["actor/skipped"] == 0
    assert found["actor/masked_low_share"] + found["actor/masked_high_share"] == pytest.approx(1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(core.actor).items())


def test_a_constant_batch_is_not_whitened_and_has_no_explained_variance():
    """Critic noise scaled to unit variance, and an explained variance of 0 that looks like a poor critic."""
    core = make_core(algorithm=AlgorithmConfig(alpha=None))
    rng = np.random.default_rng(0)
    batch = Batch(step=1, rollouts=tuple(make_rollout(i, (make_sequence(rng, 12, reward=1.0),)) for i in range(4)))
    (found,) = play(core, [batch])
    assert found["actor/whitened"] == 0
    assert math.isnan(found["critic/explained_variance"])
    assert found["actor/advantage_mean"] == pytest.approx(1.0)
    branch = make_sequence(rng, 9, parent=0, branch_at=1)
    first = replace(batch.rollouts[0], sequences=(*batch.rollouts[0].sequences, branch))
    (found,) = play(core, [Batch(step=2, rollouts=(first, *batch.rollouts[1:]))])
    assert found["actor/whitened"] == 0, "a side branch's row holds no reward, but its rollout does"


def test_skipped_steps_are_counted_and_end_the_run():
    """A NaN gradient that reaches the weights, or skipping for ever without a word."""
    core = make_core(max_skipped_in_a_row=2)
    play(core, [make_batch(step=1)])
    assert core.critic is not None
    before, norm = weights(core.actor), core.critic.backbone.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(float("nan"))
    core.begin(make_batch(step=2))
    assert core.actor_update() == "not_finite"
    with torch.no_grad():
        norm.copy_(kept)
    core.critic_update()
    assert core.report().metrics["actor/skipped"].value == 1
    assert all(torch.equal(weight, before[name]) for name, weight in weights(core.actor).items())
    core.begin(make_batch(step=3))
    assert core.actor_update() == ""
    assert core.counters.actor_skipped == []
    core.counters.actor_skipped = [7]
    with torch.no_grad():
        norm.fill_(float("nan"))
    core.begin(make_batch(step=8))
    with pytest.raises(TrainerError, match=r"actor's gradient was not finite in steps 7, 8.*max_skipped_in_a_row is 2"):
        core.actor_update()


def test_critic_only_steps_leave_the_actor_alone():
    """A warm-up of the critic that also moves, and publishes, the actor."""
    core = make_core(critic_only_steps=2, actor_warmup_steps=2)
    before = weights(core.actor)
    for step in (1, 2):
        core.begin(make_batch(step=step))
        assert core.actor_update() == "critic_only"
        core.critic_update()
        report = core.report()
        assert "actor/lr" not in report.metrics
        assert report.tokens[0][0].actor_logprobs.any()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(core.actor).items())
    assert core.counters.critic_updates == 4
    rates = [found["actor/lr"] for found in play(core, [make_batch(step=3), make_batch(step=4)])]
    assert rates == pytest.approx([5e-4, 1e-3])
    assert core.counters.actor_updates == 2


def test_given_advantages_need_no_critic():
    """A critic that is built, paid for and ignored; or advantages given to the wrong rollouts."""
    algorithm = AlgorithmConfig(advantage="given", whiten=False, policy_loss="none")
    core = make_core(algorithm=algorithm)
    assert core.critic is None
    batch = replace(make_batch(count=3), advantages=(0.5, -1.0, 2.0))
    core.begin(batch)
    core.actor_update()
    core.critic_update()
    report = core.report()
    assert not any(key.startswith("critic/") for key in report.metrics)
    for advantage, rollout, tokens in zip((0.5, -1.0, 2.0), batch.rollouts, report.tokens, strict=True):
        assert tokens[0].advantages == pytest.approx(np.where(rollout.sequences[0].action_mask, advantage, 0))
    with pytest.raises(ValueError, match="gave None advantages for 3 rollouts"):
        core.begin(make_batch(count=3))
    with pytest.raises(ValueError, match="'given' takes no critic"):
        TrainerCore(actor=core.actor, critic=Critic.from_actor(core.actor), config=TrainerConfig(), algorithm=algorithm)


@pytest.mark.parametrize(("gate", "share"), [(100.0, 0.0), (1e-9, 1.0)])
def test_a_gate_on_rollouts_keeps_them_in_the_denominator(gate: float, share: float):
    """Catches a gate that lets through what it should not, and one whose gated tokens are no longer counted."""
    core = make_core(sequence_gate=gate)
    core.begin(make_batch())
    before = core._begun().targets.advantages.clone()
    core.actor_update()
    step = core._begun()
    assert step.metrics["actor/gated_share"].value == share
    assert torch.equal(step.targets.advantages, before * (1 - share))
    assert core._actor_denominator(step) == float(step.action_mask.sum())
    assert (step.metrics["actor/grad_norm"].value == 0) == (share == 1)


def test_a_reference_pulls_the_actor_back_and_stays_where_it_is():
    """Catches a reference that moves with the actor, and a penalty that pushes away."""
    gaps: dict[float, float] = {}
    for weight in (1e-9, 30.0):
        core = make_core(reference_kl=weight, actor_lr=1e-2)
        assert core.reference is not None
        start = weights(core.reference)
        for number in range(4):
            core.begin(make_batch(step=number + 1))
            core.actor_update()
            step = core._begun()
            if number == 0:
                assert step.metrics["actor/reference_kl"].value == 0, "the first update is the start's own"
            core.critic_update()
            core.report()
        assert step.reference_logprobs is not None
        gaps[weight] = float((step.actor_logprobs - step.reference_logprobs)[step.action_mask].square().mean())
        assert all(torch.equal(start[name], now) for name, now in weights(core.reference).items())
    assert gaps[30.0] < 0.5 * gaps[1e-9]


def test_without_a_penalty_there_is_no_reference():
    """Catches memory, and a forward pass, spent on what nobody asked for."""
    core = make_core()
    core.begin(make_batch())
    core.actor_update()
    assert core.reference is None
    assert "actor/reference_kl" not in core._begun().metrics


def test_untrainable_rollouts_are_refused():
    """An infrastructure failure trained on as reward 0."""
    batch = make_batch(count=2)
    failed = replace(batch.rollouts[1], failure=FailureKind.INFRASTRUCTURE)
    with pytest.raises(ValueError, match="rollout r1 cannot be trained on: infrastructure"):
        make_core().begin(replace(batch, rollouts=(batch.rollouts[0], failed)))


def _rewarding_nothing(stop: StopReason) -> Batch:
    rng = np.random.default_rng(1)
    main, branch = make_sequence(rng, 10), make_sequence(rng, 9, parent=0, branch_at=1)
    return Batch(step=1, rollouts=(make_rollout(0, (main, branch), stop=stop),))


@pytest.mark.parametrize(("stop", "expected"), [(StopReason.MAX_TURNS, 0.25), (StopReason.FINISHED, 0.0)])
def test_only_a_truncated_main_row_is_bootstrapped(stop: StopReason, expected: float):
    """A finished rollout, or a side branch, that goes on with the critic's value beyond its end."""
    core = make_core(algorithm=AlgorithmConfig(bootstrap_truncated=True, whiten=False))
    assert core.critic is not None
    torch.nn.init.constant_(core.critic.head.bias, 0.25)
    batch = _rewarding_nothing(stop)
    core.begin(batch)
    main, branch = core.report().tokens[0]
    mask = [sequence.action_mask for sequence in batch.rollouts[0].sequences]
    assert main.returns[mask[0]] == pytest.approx(expected, abs=1e-6)
    assert branch.returns[mask[1]] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("train_observations", [False, True])
def test_observation_inclusive_scores_observations(train_observations: bool):
    """Observation tokens whose value stays 0, so that the naive form is a straw man."""
    algorithm = AlgorithmConfig(
        advantage="observation_inclusive", train_observation_values=train_observations, alpha=None, whiten=False
    )
    core = make_core(algorithm=algorithm)
    assert core.critic is not None
    torch.nn.init.constant_(core.critic.head.bias, 0.5)
    batch = make_batch(count=2, lengths=(14, 11))
    core.begin(batch)
    step = core._begun()
    lengths = [14, 11]
    for row, length in enumerate(lengths):
        assert step.values[row, :length].tolist() == [0.5] * length
        mask = step.action_mask[row].nonzero()[:, 0]
        span = int(mask[-1] - mask[0]) + 1
        assert int(step.value_mask[row].sum()) == (span if train_observations else len(mask))
    core.actor_update()
    core.critic_update()
    assert math.isfinite(core.report().metrics["critic/loss"].value)


def test_step_level_advantages_run():
    """Turns that the trainer does not hand on."""
    for name in ("step_mean", "step_last"):
        (found,) = play(make_core(algorithm=AlgorithmConfig(advantage=name)), [make_batch()])  # type: ignore[arg-type]
        assert math.isfinite(found["critic/grad_norm"])


def test_activation_checkpointing_changes_no_gradient():
    """A switch that does nothing in evaluation mode, or that turns dropout on."""
    cores = [make_core(activation_checkpointing=enabled) for enabled in (False, True)]
    found = [play(core, [make_batch()])[0] for core in cores]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert cores[1].actor.model.layers[0].training
    assert not cores[1].actor.model.layers[0].self_attn.training
    calls = []
    cores[1].actor.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    play(cores[1], [make_batch(step=2, lengths=(9,))])
    assert len(calls) == 2  # once forward, and once more in the backward pass


def test_critic_updates_reach_the_returns():
    """A critic whose loss does not fall on a batch it sees again and again."""
    core = make_core(critic_updates=20, critic_lr=3e-3)
    first, second = play(core, [make_batch(step=1), make_batch(step=2)])
    assert second["critic/loss_after"] < 0.5 * first["critic/loss"]
    assert core.counters.critic_updates == 40


def test_policy_gradient_by_hand():
    """A sign, a shift or a denominator that is wrong: compared with the formula on full logits."""
    algorithm = AlgorithmConfig(whiten=False, ratio_low=0.5, ratio_high=2.0)
    core = make_core(algorithm=algorithm)
    core.begin(BATCH)
    step = core._begun()
    core._actor_pass(step, core._actor_denominator(step), train=True)
    found = gradients(core.actor)
    core.actor.zero_grad()
    loss = torch.zeros(())
    count = sum(rollout.num_action_tokens for rollout in BATCH.rollouts)
    for row, rollout in enumerate(BATCH.rollouts):
        sequence = rollout.sequences[0]
        logits = core.actor(input_ids=to_tensor(sequence.token_ids, CPU)[None]).logits[0]
        for place in np.flatnonzero(sequence.action_mask):
            logprob = torch.log_softmax(logits[place - 1], -1)[sequence.token_ids[place]]
            ratio = float(logprob.detach().exp()) / math.exp(sequence.rollout_logprobs[place])
            if 0.5 < ratio < 2.0:
                loss = loss - ratio * step.targets.advantages[row, place] * logprob / count
    loss.backward()
    for name, gradient in gradients(core.actor).items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-3), name


def test_value_gradient_by_hand():
    """A critic's loss that is averaged over something else than the batch's action tokens."""
    core = make_core()
    assert core.critic is not None
    core.begin(BATCH)
    step = core._begun()
    assert core._critic_pass(step) == pytest.approx(
        0.5 * float(step.targets.returns.square().sum()) / step.action_mask.sum()
    )
    (micro,) = pack(step.arrays.sequences, 10**6, places=step.arrays.places)
    found = gradients(core.critic)
    core.critic.zero_grad()
    values = core.critic(*forward_inputs(micro, CPU), to_tensor(micro.predictor_index, CPU))
    (0.5 * (values - step.targets.returns[micro.row, micro.column]).square().mean()).backward()
    for name, gradient in gradients(core.critic).items():
        assert torch.allclose(found[name], gradient, atol=1e-6), name


def test_a_micro_batch_without_a_scored_token_is_passed_over():
    """A backward pass through nothing."""
    core = make_core(micro_batch_tokens=1)
    rng = np.random.default_rng(0)
    silent = make_sequence(rng, 1)
    batch = Batch(step=1, rollouts=(make_rollout(0, (make_sequence(rng, 9, reward=1.0), silent)),))
    (found,) = play(core, [batch])
    assert math.isfinite(found["actor/grad_norm"])
    step = rows(batch.rollouts)
    empty = pack([silent], 4)
    assert core.critic is not None
    zeros = torch.zeros(step.rewards.shape)
    loss = critic_pass(
        core.critic,
        empty,
        returns=zeros,
        value_mask=zeros.bool(),
        initial_values=zeros,
        denominator=1.0,
        algorithm=core.algorithm,
    )
    assert loss == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("actor_lr", 0.0),
        ("critic_updates", 0),
        ("betas", (0.9, 1.0)),
        ("actor_grad_clip", math.inf),
        ("sequence_gate", 0.0),
        ("reference_kl", -0.1),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object):
    """A run that starts with K = 0, or a rate of 0, and learns nothing."""
    with pytest.raises(ValueError, match=f"trainer.{field} is"):
        TrainerConfig(**{field: value})  # type: ignore[arg-type]
