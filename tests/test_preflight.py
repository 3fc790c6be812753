"""What a run will need, before it starts."""

import json
import re
from pathlib import Path

import pytest
from chat_server import Answer, chat_server, completion, refusal
from small_runs import small_config

from sao.preflight import LOG_BYTES, preflight, run_folder_bytes


def test_disk_space_counts_the_plain_copy_of_a_sharded_actor() -> None:
    """Catches a run of several ranks that fills the disk which `sao check` found large enough."""
    # Actor, critic and two moments of each, three times; the actor alone, four times.
    assert run_folder_bytes(1000, sharded=False) == LOG_BYTES + 3 * 24_000 + 4 * 4_000
    # And the actor once more in each checkpoint.
    assert run_folder_bytes(1000, sharded=True) == LOG_BYTES + 3 * 28_000 + 4 * 4_000


def test_words_that_the_tokenizer_loses(tmp_path: Path) -> None:
    """Catches a run on own tasks whose policy sees only unknown tokens, and learns nothing."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"Add {i} please", "answer": "1"}) + "\n" for i in range(9)))
    told = preflight(small_config("tasks.source=file", f"tasks.path={tasks}", "environment.name=math_python"), tmp_path)
    bad = [finding.text for finding in told if not finding.good]
    assert any("2 words are unknown to the tokenizer" in text and "'Add', 'please'" in text for text in bad), bad


@pytest.mark.parametrize(
    ("answer", "good", "says"),
    [
        (completion('{"quality": 10, "style": 0}'), True, "judge: big marked an answer in"),
        (refusal(404), False, "the judge gave no marks.*knows no model 'big'.*environment.judge.model"),
        (refusal(401), False, "variable NO_SUCH_KEY, which is not set"),
        (completion("It is fine."), False, "is not one object"),
    ],
)
def test_a_judge_is_tried(answer: Answer, good: bool, says: str, tmp_path: Path) -> None:
    """Catches a green check of a run whose judge nobody can reach, or that has no key."""
    with chat_server(lambda *_: answer) as (url, _):
        judge = f'{{kind="model", base_url="{url}", model="big", api_key_variable="NO_SUCH_KEY", max_retries=0}}'
        config = small_config(
            "clock=real", "tasks.source=styles", "environment.name=styles", f"environment.judge={judge}"
        )
        (found,) = (each for each in preflight(config, tmp_path) if each.text.startswith(("judge", "the judge")))
    assert found.good == good
    assert re.search(says, found.text), found.text


def test_an_obstacle_is_told_once(tmp_path: Path) -> None:
    """Catches a list in which one mistake stands three times."""
    told = [finding.text for finding in preflight(small_config("tasks.source=file", "tasks.path=nowhere.jsonl"))]
    assert len(told) == len(set(told))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere_at_all:Game", "No module named"), ("json:Game", "no attribute"), ("json:__name__", "")],
)
def test_an_environment_that_is_not_there(name: str, reason: str, tmp_path: Path) -> None:
    """Catches a misspelt environment that is found out by the first rollout."""
    told = [
        finding.text for finding in preflight(small_config(f"environment.name={name}"), tmp_path) if not finding.good
    ]
    assert any(name in text and reason in text for text in told), told
