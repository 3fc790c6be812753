"""Two Ray nodes on this machine, and the death of every kind of part."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]


def test_a_run_outlives_its_parts_and_a_node(tmp_path: Path) -> None:
    """Catches a death that is noticed late, a part that is not replaced on another node, and anything that is lost."""
    script = Path(__file__).with_name("two_nodes.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "trial")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("noticed after") == 4
    assert "nothing was lost" in done.stdout
