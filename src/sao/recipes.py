"""Systems by name: each a set of settings of the same functions and the same loop, not another trainer.

`recipe = "grpo-dis"` in a run's file puts the recipe's settings below the file's own keys, so that file and `--set`
win; a study puts them above its base (see study/plan.py). Rates, sizes and costs are left to whoever names a recipe.
"""

from dataclasses import dataclass

from sao.config_tree import did_you_mean

_PAGE_HEAD = """# Recipes

Every system that a run can name by `recipe = "NAME"`; written by `sao recipes --markdown`. A recipe is a set of
settings that lie below the keys of the run's own file, so that what the file or `--set` says wins; `sao recipes NAME`
shows one, and `sao study` compares them. Learning rates, sizes and costs belong to the run and are in none. Formulas
and sources of the parts: [algorithm.md](algorithm.md); every setting: [configuration.md](configuration.md).

So take out of a file what a recipe should decide: the demo's has `alpha` and `[value_pretraining]`, which every recipe
would run with; those without a critic, `sao-dis-only` and `sao-no-pretraining` need `--set value_pretraining=none`
there. `sao check` and the run's `events.log` name each setting that is not as the recipe has it. In a study it is the
other way round: the recipe wins over the base.

What is shared unless a recipe says otherwise: one optimiser step of the actor per batch, gamma 1, no KL and no entropy
term, and the loss divided by all action tokens of the batch, those without a gradient included.
"""

_RECORDED = "the log-probability that the engine recorded when it sampled the token"
_NOTHING = "nothing: the ratio is 1, as against the trainer's own log-probabilities when each batch is used once"
_CORRECTED = (
    "the recorded log-probability, by a factor without gradient; PPO's own ratio is against the trainer's log-probs at "
    "the batch's first update, so it is 1 and clips nothing while each batch is used once"
)
_PAPER = "SAO, arXiv 2607.07508"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One system."""

    name: str
    """What `recipe` in a configuration says."""
    settings: tuple[str, ...]
    """Overrides "section.key=value", each key once."""
    source: str
    """Where the system is described."""
    deltas: str
    """How it differs from the system it is compared with here, and from its source."""
    ratio_against: str
    """What the importance ratio of its policy loss is taken against."""


def _changed(settings: tuple[str, ...], *changes: str) -> tuple[str, ...]:
    """Settings with some replaced or added; "-key" takes one away, with all below it."""
    merged = dict(setting.split("=", 1) for setting in settings)
    for change in changes:
        key, _, value = change.partition("=")
        if key.startswith("-"):
            merged = {name: kept for name, kept in merged.items() if not f"{name}.".startswith(f"{key[1:]}.")}
        else:
            merged[key] = value
    return tuple(f"{key}={value}" for key, value in merged.items())


_SAO = (
    "loop.group_size=1",
    "baseline.kind=critic",
    "algorithm.advantage=skip_observation",
    "algorithm.policy_loss=dis",
    "algorithm.ratio_low=0.7",
    "algorithm.ratio_high=6.0",
    "algorithm.detach_ratio=true",
    "algorithm.denominator=action_tokens",
    "algorithm.alpha=1.5",
    "algorithm.lambda_critic=1.0",
    "algorithm.whiten=true",
    "trainer.critic_updates=2",
    "trainer.freeze=attention",
    "value_pretraining.fit.freeze=attention",
)
_WITHOUT_CRITIC = (
    "-algorithm.alpha", "-algorithm.lambda_critic", "-trainer", "-value_pretraining", "algorithm.advantage=given",
    "value_pretraining=none",
)  # fmt: skip
_VAPO = _changed(
    _SAO,
    "-algorithm.ratio_low",
    "-algorithm.ratio_high",
    "-algorithm.detach_ratio",
    "algorithm.policy_loss=ppo_clip",
    "algorithm.clip_ratio_low=0.8",
    "algorithm.clip_ratio_high=1.28",
    "algorithm.alpha=0.05",
)
_ONE_REWARD = _changed(_SAO, *_WITHOUT_CRITIC, "baseline.kind=running_mean", "baseline.window=128")
_GRPO_DIS = _changed(
    _SAO, *_WITHOUT_CRITIC, "baseline.kind=group_normalised", "loop.group_size=8", "algorithm.whiten=false"
)
_NO_BAND = ("-algorithm.ratio_low", "-algorithm.ratio_high", "-algorithm.detach_ratio")
_GRPO = _changed(_GRPO_DIS, *_NO_BAND, "algorithm.policy_loss=none")
_CLIP = ("algorithm.clip_ratio_low=0.8", "algorithm.clip_ratio_high=1.28")
_INCLUSIVE = _changed(_SAO, "algorithm.advantage=observation_inclusive", "algorithm.train_observation_values=false")

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="sao",
        settings=_SAO,
        source=_PAPER,
        deltas="The paper's method. Ours, where it is silent: no gradient through the ratio, the denominator, gamma 1, "
        "whitening with a floor, V = 0 beyond a truncated end.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-dis-only",
        settings=_changed(
            _SAO, "-value_pretraining", "trainer.critic_updates=1", "trainer.freeze=none", "value_pretraining=none"
        ),
        source=f"{_PAPER}, an arm of its main table, which it does not define",
        deltas="sao with a plain critic: K = 1, all its parameters trained, no value pretraining. The definition is "
        "ours.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-no-dis",
        settings=_changed(_SAO, *_NO_BAND, "algorithm.policy_loss=none"),
        source="ours: what is left of SAO without its correction for age",
        deltas="sao with ratio 1; all else as sao.",
        ratio_against=_NOTHING,
    ),
    Recipe(
        name="grpo",
        settings=_GRPO,
        source="GRPO, arXiv 2402.03300",
        deltas="Groups of 8, reward minus the group's mean over its deviation, no correction for age. Its source takes "
        "the mean over a rollout's tokens first, and a KL term; neither is here, so that grpo, grpo-clip and grpo-dis "
        "differ in the policy loss alone.",
        ratio_against=_NOTHING,
    ),
    Recipe(
        name="grpo-clip",
        settings=_changed(_GRPO, *_CLIP, "algorithm.policy_loss=ppo_clip"),
        source="GRPO, arXiv 2402.03300, with the bounds of DAPO, arXiv 2503.14476",
        deltas="grpo with PPO's clip to (0.8, 1.28), one-sided by the sign of the advantage.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="grpo-dis",
        settings=_GRPO_DIS,
        source=f"{_PAPER}, its stronger control",
        deltas="grpo with SAO's policy loss: tokens outside (0.7, 6.0) have no gradient.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="vapo",
        settings=_VAPO,
        source=f"VAPO, arXiv 2504.05118, as the arm without DIS of {_PAPER}",
        deltas="sao with alpha 0.05 and PPO's clip to (0.8, 1.28). Its source samples groups and adds a likelihood "
        "term on right answers; neither is here. Rollouts under 20 action tokens get lambda 0.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="vapo-long",
        settings=_changed(_VAPO, "algorithm.alpha=1.5"),
        source="ours: separates the missing DIS from the short lambda",
        deltas="vapo with alpha 1.5, which is sao with PPO's clip.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="running-mean",
        settings=_ONE_REWARD,
        source=f"{_PAPER}, the control of its online experiment",
        deltas="sao with the mean of the run's last 128 rewards in place of the critic.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="running-mean-per-prompt",
        settings=_changed(_ONE_REWARD, "baseline.kind=prompt_running_mean", "baseline.window=8"),
        source=f"{_PAPER}, its ablation of the critic",
        deltas="sao with the mean of the prompt's last 8 rewards in place of the critic. Needs prompts that come "
        "again (tasks.limit); a prompt's first rollout is compared with 0.5.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="step-mean",
        settings=_changed(_SAO, "algorithm.advantage=step_mean"),
        source=f"{_PAPER}, its ablation of the step level",
        deltas="sao with one step of the recursion per turn, whose value is the mean of its tokens' values; l counts "
        "steps.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="step-last",
        settings=_changed(_SAO, "algorithm.advantage=step_last"),
        source=f"{_PAPER}, its ablation of the step level",
        deltas="step-mean with the value of the turn's last token.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="ppo",
        settings=_changed(
            _SAO,
            *_NO_BAND,
            *_CLIP,
            "-algorithm.alpha",
            "algorithm.policy_loss=decoupled_ppo",
            "algorithm.alpha=none",
            "algorithm.lam=1.0",
            "trainer.critic_updates=1",
            "trainer.freeze=none",
        ),
        source="decoupled PPO, arXiv 2110.00641, as in AReaL, arXiv 2505.24298",
        deltas="A plain critic (K = 1, all parameters), lambda 1, and the ratio split in two. The proximal policy is "
        "the trainer's at the batch's first update.",
        ratio_against=_CORRECTED,
    ),
    Recipe(
        name="icepop",
        settings=_changed(
            _GRPO_DIS,
            *_CLIP,
            "-algorithm.detach_ratio",
            "algorithm.policy_loss=icepop",
            "algorithm.ratio_low=0.5",
            "algorithm.ratio_high=5.0",
        ),
        source="IcePop, arXiv 2510.18855",
        deltas="grpo with the recorded ratio as a factor, 0 outside [0.5, 5].",
        ratio_against=_CORRECTED,
    ),
    Recipe(
        name="spo",
        settings=_changed(
            _ONE_REWARD, *_NO_BAND, *_CLIP, "-baseline.window", "baseline.kind=spo", "algorithm.policy_loss=ppo_clip"
        ),
        source="SPO, arXiv 2509.13232",
        deltas="A Beta tracker per prompt in place of the critic, PPO's clip. Needs prompts that come again "
        "(tasks.limit). Its source begins with an offline estimate, here the prior is 0.5; the divergence that makes "
        "it forget is estimated from recorded log-probs.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="batch-mean",
        settings=_changed(
            _ONE_REWARD,
            "-baseline.window",
            "baseline.kind=batch_mean",
            "algorithm.ratio_low=0.0",
            "algorithm.ratio_high=4e8",
            "trainer.sequence_gate=0.01",
            "algorithm.denominator=trajectory_mean",
            "algorithm.whiten=false",
        ),
        source="FlashREINFORCE, github.com/yifanzhang-pro/FlashREINFORCE",
        deltas="Reward minus the batch's mean, each token weighted by its ratio without a band, mean over tokens and "
        "then over rollouts, and a whole rollout left out where the mean binary KL of its tokens is above 0.01. The "
        "limit and the direction, recorded policy to actor, are ours.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-k1",
        settings=_changed(_SAO, "trainer.critic_updates=1"),
        source=f"{_PAPER}, its ablation of K",
        deltas="sao with one critic update per step.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-full-critic",
        settings=_changed(_SAO, "trainer.freeze=none"),
        source=f"{_PAPER}, its ablation of freezing",
        deltas="sao with all of the critic trained in RL. Value pretraining stays as it is, so that both begin with "
        "the same critic.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-no-pretraining",
        settings=_changed(_SAO, "-value_pretraining", "value_pretraining=none"),
        source="ours: the paper pretrains the critic and does not say how much",
        deltas="sao with a critic whose values start at 0.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-observation-inclusive",
        settings=_INCLUSIVE,
        source="ours: the form that skipping observations replaces",
        deltas="sao with every token from the first to the last action as a step of the recursion; l counts them. The "
        "critic is fitted at action tokens alone, so that values at observations are never trained.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-observation-inclusive-trained",
        settings=_changed(_INCLUSIVE, "algorithm.train_observation_values=true"),
        source="ours: the same form, not as a straw man",
        deltas="sao-observation-inclusive with the critic fitted at observation tokens too.",
        ratio_against=_RECORDED,
    ),
    Recipe(
        name="sao-fixed-lambda",
        settings=_changed(_SAO, "algorithm.alpha=none", "algorithm.lam=0.95"),
        source="ours: the lambda of VC-PPO, arXiv 2503.01491",
        deltas="sao with lambda 0.95 whatever the length.",
        ratio_against=_RECORDED,
    ),
)


def recipe_names() -> tuple[str, ...]:
    """All names, in the order of the page."""
    return tuple(recipe.name for recipe in RECIPES)


def find_recipe(name: str) -> Recipe:
    """The recipe of a name. Raises ValueError with the nearest name for one that there is not."""
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise ValueError(f"recipe is {name!r}, which is none; {did_you_mean(name, recipe_names())}")


def recipe_lines(recipe: Recipe) -> list[str]:
    """One recipe as text: what it is, what its ratio is against, its settings."""
    return [
        f"source: {recipe.source}",
        f"deltas: {recipe.deltas}",
        f"ratio against: {recipe.ratio_against}",
        "settings:",
        *(f"    {setting}" for setting in recipe.settings),
    ]


def recipes_page() -> str:
    """docs/recipes.md: a section for each recipe."""
    lines = [_PAGE_HEAD]
    for recipe in RECIPES:
        lines += [
            f"## `{recipe.name}`",
            "",
            recipe.deltas,
            "",
            f"- source: {recipe.source}",
            f"- ratio against: {recipe.ratio_against}",
            f"- settings: {', '.join(f'`{setting}`' for setting in recipe.settings)}",
            "",
        ]
    return "\n".join(lines)
