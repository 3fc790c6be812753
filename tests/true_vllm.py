"""Where tests find a true vLLM."""

import os

import pytest

PYTHON = os.environ.get("SAO_VLLM_PYTHON", "")
"""A Python that has vLLM; "" where there is none."""

MISSING = "SAO_VLLM_PYTHON names no Python with vLLM; scripts/install_vllm_cpu.sh makes one"

needs_vllm = pytest.mark.skipif(not PYTHON, reason=MISSING)
