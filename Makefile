# One word per chore. Everything happens in .venv, made on first use; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup check test demo docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "sao needs Python 3.11 or newer; name one: make setup PYTHON=python3.12"; exit 1; }
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,sandbox,gguf,tensorboard]'
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2

demo: setup
	$(BIN)/sao train experiments/demo/config.toml

docs: setup
	$(BIN)/sao config --markdown > docs/configuration.md
	$(BIN)/sao recipes --markdown > docs/recipes.md

clean:
	rm -rf $(VENV) .venv-ray .venv-vllm .pytest_cache .ruff_cache .hypothesis build
