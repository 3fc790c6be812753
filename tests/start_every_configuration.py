"""Starts every configuration under experiments/ and examples/ for two steps, or those named; run by CI.

What a configuration needs and is not there (a data set, a model file) is said, and skips it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
VLLM_PYTHON = os.environ.get("SAO_VLLM_PYTHON", "")
SMALL = (
    "loop.steps=2", "loop.batch_size=8", "loop.concurrency=8", "loop.checkpoint_every=2", "evaluation.tasks=4",
    "evaluation.final_tasks=0", "evaluation.samples=1", "evaluation.pass_k=[1]",
)  # fmt: skip
"""Overrides for every configuration."""


def overrides(text: str) -> list[str]:
    """Shrink the stages that a configuration has."""
    changes = list(SMALL)
    stages = text.count("[[sft]]")
    for number in range(stages):
        changes += [f"sft.{number}.demonstrations=24", f"sft.{number}.fit.steps=2", f"sft.{number}.only_right=false"]
    if "[value_pretraining]" in text:
        changes += ["value_pretraining.rollouts=16", "value_pretraining.fit.steps=2"]
    if "group_size" in text:
        changes.append("loop.group_size=4")
    if 'kind = "vllm"' in text:
        changes.append(f"vllm.command={VLLM_PYTHON}")
    return changes


def needs(text: str) -> str:
    """What the configuration names and this checkout lacks; "" if nothing."""
    if 'kind = "vllm"' in text and not VLLM_PYTHON:
        return "vLLM (SAO_VLLM_PYTHON names no Python with it)"
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "path" and not Path(value.strip().strip('"')).exists():
            return value.strip()
    return ""


def main(*named: str) -> int:
    """Run each; the exit code is the number of failures."""
    failures = 0
    every = sorted([*ROOT.glob("experiments/**/*.toml"), *ROOT.glob("examples/**/*.toml")])
    for config in [Path(name).absolute() for name in named] or every:
        if "results" in config.parts:
            continue
        text, name = config.read_text(), config.relative_to(ROOT)
        if "[[arms]]" in text:
            continue  # A plan of a study.
        if missing := needs(text):
            print(f"skipped {name}: {missing} is not here")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            changes = [word for change in overrides(text) for word in ("--set", change)]
            started = time.monotonic()
            command = [sys.executable, "-m", "sao.cli", "train", str(config), "--folder", f"{scratch}/run", *changes]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
            good = result.returncode == 0
            print(f"{'started' if good else 'FAILED '} {name} ({time.monotonic() - started:.0f} s)", flush=True)
            if not good:
                failures += 1
                print(result.stdout[-2000:], result.stderr[-4000:])
    return failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
