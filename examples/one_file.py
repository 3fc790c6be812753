"""Single-Rollout Asynchronous Optimization (SAO, arXiv 2607.07508) in one file: python examples/one_file.py

A tiny language model learns to follow a hidden chain of keys with a tool, by the paper's stages: supervised
fine-tuning on imperfect traces, value pretraining, then SAO. Many episodes are in flight at once and their tool calls
take time; as soon as 32 have finished, whichever they are, the actor is updated, and the rest go on under the new
weights. So one rollout holds tokens of several policies, each with the log-probability of the one that sampled it.

Left out, and in the library: real models, KV cache, packing, processes, durable log, sandbox, evaluation. The method's
functions are written for reading here; tests/test_one_file.py ties them to the library's. Needs torch only.
Entry t of an array is about token t. Shapes: B rollouts, T tokens.
"""

import copy
import math
import random
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------- the method


def length_adaptive_lambda(num_action_tokens: int, alpha: float) -> float:
    """The actor's lambda: the longer the rollout, the nearer to Monte Carlo."""
    return max(0.0, 1.0 - 1.0 / (alpha * num_action_tokens))


def skip_observation_gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (T,) of one rollout. Tool output is context, never a step: the loop passes it by."""
    advantages, next_value, next_advantage = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(action_mask.nonzero()[:, 0].tolist()):
        delta = float(rewards[t]) + gamma * next_value - float(values[t])
        advantages[t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = float(values[t])
    return advantages, torch.where(action_mask, advantages + values, 0.0)


def whiten(advantages: Tensor, action_mask: Tensor, floor: float = 0.1) -> Tensor:
    """Mean 0 and deviation 1 over the batch's action tokens; the floor keeps a nearly constant batch small."""
    chosen = advantages[action_mask]
    scaled = (advantages - chosen.mean()) / max(float(chosen.std(correction=0)), floor)
    return torch.where(action_mask, scaled, 0.0)


def dis_loss(
    actor_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, action_mask: Tensor,
    ratio_low: float, ratio_high: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """- sum f(r) A log pi / N. A token whose ratio left the band is out; N still counts it. Also gives the ratios."""
    log_ratio = torch.where(action_mask, actor_logprobs - rollout_logprobs, 0.0)
    ratio = log_ratio.clamp(-20, 20).exp().detach()  # detached: else the sign flips for tokens under probability 1/e
    kept = action_mask & (ratio_low < ratio) & (ratio < ratio_high)
    logprobs = torch.where(kept, actor_logprobs, 0.0)  # selected, not multiplied by 0: 0 * -inf is NaN
    return -(torch.where(kept, ratio * advantages, 0.0) * logprobs).sum() / action_mask.sum(), ratio


def value_loss(values: Tensor, returns: Tensor, action_mask: Tensor) -> Tensor:
    """0.5 * mean squared error over action tokens."""
    return 0.5 * torch.where(action_mask, values - returns, 0.0).square().sum() / action_mask.sum()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); NaN where all returns are equal: it is undefined, not 0."""
    return 1 - float((returns - values).var() / returns.var()) if returns.max() > returns.min() else math.nan


# ------------------------------------------------------------------------------------------------------ the model


class Block(nn.Module):
    """Causal self-attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"into": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.heads, self.norm, self.mlp_norm = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        parts = self.attention["into"](self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention["out"](mixed)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Token ids (B, T) to outputs (B, T, n): logits of the actor, or one value of the critic."""

    def __init__(self, vocabulary: int, width: int = 48, layers: int = 2, heads: int = 4, longest: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Outputs at t have seen tokens 0 to t."""
        return self.head(self.norm(self.blocks(self.tokens(token_ids) + self.places.weight[: token_ids.shape[1]])))


def before(outputs: Tensor) -> Tensor:
    """The one shift: what is said about token t was computed at token t - 1, before t was seen."""
    return F.pad(outputs[:, :-1], (0, 0, 1, 0))


def logprobs_of(actor: Model, token_ids: Tensor) -> Tensor:
    """(B, T) log-probability of each token given those before it."""
    return before(actor(token_ids)).log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]


def critic_from(actor: Model) -> Model:
    """A copy of the actor with a value head that starts at 0. Attention is frozen; everything else trains."""
    critic = copy.deepcopy(actor)
    critic.head = nn.Linear(actor.head.in_features, 1)
    nn.init.zeros_(critic.head.weight), nn.init.zeros_(critic.head.bias)
    for name, parameter in critic.named_parameters():
        parameter.requires_grad_("attention" not in name)
    return critic


# ------------------------------------------------------------------------------------------------ the environment

DIGITS = 8
CALL, ANSWER, END, START, GO, LAST, ERROR, PAD = range(DIGITS, DIGITS + 8)


class Chain:
    """`START k`; `CALL k END` shows the next key, `GO k` or `LAST k`, or fails: `ERROR`; `ANSWER k END` ends it.

    The last key is the right answer. A call of a wrong key fails, a right one fails now and then; there are 6 turns.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.at, self.turns = rng, 0, 0
        self.keys = [rng.randrange(DIGITS) for _ in range(rng.randint(2, 5))]

    def step(self, action: list[int]) -> tuple[list[int], float, bool]:
        """Observation, reward, done."""
        self.turns += 1
        at_end = self.at == len(self.keys) - 1
        if action[0] == ANSWER:
            return [], float(at_end and action[1] == self.keys[-1]), True
        if action[:2] != [CALL, self.keys[self.at]] or at_end or self.rng.random() < 0.1:
            return [ERROR], 0.0, self.turns == 6
        self.at += 1
        return [LAST if self.at == len(self.keys) - 1 else GO, self.keys[self.at]], 0.0, self.turns == 6

    def demonstrate(self) -> list[int]:
        """What a careless expert does next: a wrong key or an answer too early, now and then."""
        key = self.keys[self.at] if self.rng.random() > 0.35 else self.rng.randrange(DIGITS)
        return [ANSWER if self.at == len(self.keys) - 1 or self.rng.random() < 0.05 else CALL, key, END]


# --------------------------------------------------------------------------------------------- rollouts in flight


class Token(NamedTuple):
    """Written when the token came in, never reconstructed."""

    id: int
    is_action: bool = False
    logprob: float = 0.0
    version: int = -1


class Rollout:
    """One episode of one task."""

    def __init__(self, seed: str) -> None:
        self.chain = Chain(random.Random(seed))
        self.tokens, self.action = [Token(START), Token(self.chain.keys[0])], list[int]()
        self.waits, self.reward, self.done = 0, 0.0, False

    def act(self, token: Token) -> None:
        """Take a token of the policy; the third closes the action, and the environment answers after a while."""
        self.tokens.append(token)
        self.action.append(token.id)
        if len(self.action) == 3:
            observation, self.reward, self.done = self.chain.step(self.action)
            self.tokens += [Token(seen) for seen in observation if not self.done]
            self.action, self.waits = [], int(self.chain.rng.lognormvariate(1.0, 1.0))


class Flight:
    """Keeps `slots` rollouts running and hands out the finished ones in the order in which they finish."""

    def __init__(self, seed: int, slots: int) -> None:
        self.seeds = (f"{seed}/{index}" for index in range(10**9))
        self.generator = torch.Generator().manual_seed(seed)
        self.running, self.finished = [Rollout(next(self.seeds)) for _ in range(slots)], list[Rollout]()

    def take(self, number: int, actor: Model, version: int) -> list[Rollout]:
        """The next `number` finished rollouts. Those that still run stay in flight, and meet the next weights."""
        while len(self.finished) < number:
            self.tick(actor, version)
            self.finished += [rollout for rollout in self.running if rollout.done]
            self.running = [Rollout(next(self.seeds)) if rollout.done else rollout for rollout in self.running]
        batch, self.finished = self.finished[:number], self.finished[number:]
        return batch

    @torch.no_grad()
    def tick(self, actor: Model, version: int) -> None:
        """One token, at temperature 1, for every rollout that is not waiting for its tool."""
        ready = [rollout for rollout in self.running if not rollout.waits]
        for rollout in self.running:
            rollout.waits = max(0, rollout.waits - 1)
        if ready:
            ends = torch.tensor([len(rollout.tokens) - 1 for rollout in ready])
            logprobs = actor(arrays(ready)[0])[torch.arange(len(ready)), ends].log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
            chosen = logprobs.gather(1, ids)[:, 0].tolist()
            for rollout, token_id, logprob in zip(ready, ids[:, 0].tolist(), chosen, strict=True):
                rollout.act(Token(token_id, True, logprob, version))


def arrays(rollouts: list[Rollout]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, action mask, recorded log-probs, versions: (B, T) each, padded on the right."""
    longest = max(len(rollout.tokens) for rollout in rollouts)
    rows = [rollout.tokens + [Token(PAD)] * (longest - len(rollout.tokens)) for rollout in rollouts]
    ids, mask, logprobs, versions = (torch.tensor([[token[i] for token in row] for row in rows]) for i in range(4))
    return ids, mask, logprobs, versions


# ------------------------------------------------------------------------------------------------------- training


def descend(optimiser: torch.optim.Optimizer, loss: Tensor, clip: float) -> None:
    """One optimiser step."""
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], clip)
    optimiser.step()


def fine_tune(actor: Model, seed: int, steps: int) -> None:
    """Supervised: maximise the log-probability of the demonstrator's own tokens, not of what it was shown."""
    optimiser = torch.optim.Adam(actor.parameters(), 3e-3)
    for step in range(steps):
        traces = [Rollout(f"sft/{seed}/{step}/{index}") for index in range(64)]
        for trace in traces:
            while not trace.done:
                for token_id in trace.chain.demonstrate():
                    trace.act(Token(token_id, True))
        ids, mask, _, _ = arrays(traces)
        descend(optimiser, -logprobs_of(actor, ids)[mask].mean(), 1.0)


def targets(rollouts: list[Rollout], values: Tensor, mask: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Advantages under the length-adaptive lambda, returns under the critic's lambda 1: (B, T) each."""
    advantages, returns, rewards = torch.zeros_like(values), torch.zeros_like(values), torch.zeros_like(values)
    for row, rollout in enumerate(rollouts):
        rewards[row, mask[row].nonzero().max()] = rollout.reward  # on the last action token
        lam = length_adaptive_lambda(int(mask[row].sum()), alpha)
        advantages[row] = skip_observation_gae(rewards[row], values[row], mask[row], gamma=1.0, lam=lam)[0]
        returns[row] = skip_observation_gae(rewards[row], values[row], mask[row], gamma=1.0, lam=1.0)[1]
    return advantages, returns


def train(seed=0, updates=160, sft_steps=200, value_steps=100, slots=128, batch=32, alpha=1.5, show=20) -> list[float]:
    """All stages. Returns the mean reward of each SAO batch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor = Model(DIGITS + 8)
    fine_tune(actor, seed, sft_steps)
    print(f"fine-tuned on {64 * sft_steps} imperfect traces; next {batch * value_steps} rollouts for the critic")
    critic, flight, rewards, fits = critic_from(actor), Flight(seed, slots), list[float](), list[Tensor]()
    actor_optimiser = torch.optim.Adam(actor.parameters(), 1e-3, betas=(0.9, 0.95))
    critic_optimiser = torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.9, 0.95))
    for step in range(-value_steps, updates):  # the steps before 0 pretrain the critic; the policy stands still
        rollouts = flight.take(batch, actor, max(step, 0))
        ids, mask, rollout_logprobs, versions = arrays(rollouts)
        with torch.no_grad():  # values and targets are fixed before any update of the step
            values = before(critic(ids))[..., 0]
        advantages, returns = targets(rollouts, values, mask, alpha)
        rewards.append(sum(rollout.reward for rollout in rollouts) / batch)
        fits.append(torch.stack([values[mask], returns[mask]]))
        if step >= 0:
            if 0 < rewards[-1] < 1:  # where all rewards are equal, only the critic's noise would be scaled up
                advantages = whiten(advantages, mask)
            loss, ratio = dis_loss(logprobs_of(actor, ids), rollout_logprobs, advantages, mask, 0.7, 6.0)
            descend(actor_optimiser, loss, 1.0)  # the rollouts in flight go on under these weights
        for _ in range(2):  # K = 2, with a gradient clip of its own
            descend(critic_optimiser, value_loss(before(critic(ids))[..., 0], returns, mask), 10.0)
        if step >= 0 and (step % show == 0 or step == updates - 1):
            age, fit = (step - versions[mask]).float(), explained_variance(*torch.cat(fits[-show:], 1))
            masked = float(((ratio[mask] <= 0.7) | (ratio[mask] >= 6.0)).float().mean())
            print(f"update {step:4d}  reward {sum(rewards[-show:]) / len(rewards[-show:]):.2f}  "
                  f"age of tokens: mean {age.mean():.1f}, max {age.max():.0f}  masked {masked:.1%}  "
                  f"explained variance {fit:+.2f}  {time.process_time():.0f} s", flush=True)  # fmt: skip
    return rewards[value_steps:]


if __name__ == "__main__":
    train()
