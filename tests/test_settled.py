"""What a run that goes on may change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sao.config import RunConfig
from sao.stages import check_settled
from sao.store.run_folder import RunFolder


@pytest.mark.parametrize("change", [{"device": "cuda"}, {"dtype": "bfloat16"}, {"attention": "eager"}])
def test_what_is_read_with_the_weights_may_change(change: dict[str, Any], tmp_path: Path) -> None:
    """Catches a run that cannot go on on another machine."""
    folder = RunFolder.create(tmp_path / "run")
    config = RunConfig()
    check_settled(config, replace(config, model=replace(config.model, **change)), folder)


def test_what_has_done_its_work_may_not(tmp_path: Path) -> None:
    """Catches a setting that would be taken and change nothing."""
    folder = RunFolder.create(tmp_path / "run")
    config = RunConfig()
    with pytest.raises(ValueError, match="model is settled"):
        check_settled(config, replace(config, model=replace(config.model, hidden_size=48)), folder)
