"""Causal language models and tokenizers: from a folder, a hub name or a GGUF file, or built small from a config."""

import math
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sao.store.files import FREE_SPACE, is_full

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Device = Literal["auto", "cpu", "cuda"]

# Small models load in milliseconds and snapshots are written at every step: their bars would drown the run's output.
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which causal language model to train: an existing one (`path`), or a small one built with random weights."""

    path: str = ""
    """Folder or hub name of a `transformers` model; empty builds one from the fields below."""
    gguf_file: str = ""
    """Name of a GGUF file inside `path`; its weights are dequantised. Needs the extra `gguf`."""
    architecture: Literal["qwen3", "qwen3_moe"] = "qwen3"
    """Family of a built model: dense, or mixture of experts (the paper's)."""
    vocab_size: int = 0
    """Tokens of a built model; 0 takes the tokenizer's."""
    hidden_size: int = 64
    """Width of a built model."""
    num_layers: int = 2
    """Decoder layers of a built model."""
    num_heads: int = 4
    """Query heads of a built model."""
    num_kv_heads: int = 2
    """Key and value heads of a built model; divides num_heads."""
    head_dim: int = 32
    """Width of a head of a built model; even, because rotary embeddings rotate pairs."""
    intermediate_size: int = 128
    """Width of the MLP, or of each expert, of a built model."""
    num_experts: int = 8
    """Experts per layer of a built mixture of experts."""
    experts_per_token: int = 2
    """Experts that a token is routed to."""
    max_positions: int = 2048
    """Longest sequence of a built model, in tokens."""
    init_std: float = 0.02
    """Standard deviation of a built model's initial weights; narrow models learn sooner from about 0.1."""
    tie_embeddings: bool = True
    """Whether a built model's head is its embedding: for small vocabularies this learns faster."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trainer's weights, activations and sums of gradients. float32 makes engine and trainer agree to 1e-4;
    bfloat16 halves activations alone, since its optimiser keeps float32 copies. trainer.compute_dtype = "bfloat16" does
    that with exact sums."""
    device: Device = "auto"
    """Where trainer and fine-tuning compute: auto takes the GPU where torch finds one (CUDA or ROCm). Tests run on CPUs
    only; the GPU path is untested. The engine has its own `engine.device`."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention of `transformers`; sdpa is exact on packed sequences and fast on a CPU."""

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "num_experts",
            "experts_per_token",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.init_std < math.inf:
            raise ValueError(f"model.init_std is {self.init_std}; it must be finite and above 0")
        if self.vocab_size < 0:
            raise ValueError(f"model.vocab_size is {self.vocab_size}; use 0 to take the tokenizer's")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model.num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"model.experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        if self.gguf_file and not self.path:
            raise ValueError(f"model.gguf_file is {self.gguf_file!r} but model.path is empty; name the file's folder")


def find_device(name: Device) -> torch.device:
    """The device of that name; auto is the GPU where torch finds one. Raises ValueError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            'model.device or engine.device is "cuda", but torch finds no GPU: install the torch that fits the driver, '
            'or set model.device and engine.device to "auto" or "cpu"'
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def load_causal_lm(config: ModelConfig, *, seed: int, tokenizer_size: int = 0) -> PreTrainedModel:
    """The model in eval mode (no dropout, ever): read from `config.path`, or built with weights drawn from `seed`.

    `tokenizer_size` is the vocabulary of a built model whose configuration leaves it 0. Raises ValueError naming the
    folder or file for a checkpoint that is missing, corrupt or incomplete, and for a head that rescales its logits.
    The model is on the CPU, whatever `config.device`: it is there to be saved.
    """
    dtype = DTYPES[config.dtype]
    if config.path and not config.gguf_file:
        return load_folder(config.path, dtype=dtype, attention=config.attention)
    model = _load_gguf(config, dtype) if config.path else _build(config, dtype, seed, tokenizer_size)
    _check_head(model)
    return model


def load_folder(
    path: str | Path, *, dtype: torch.dtype | None = None, attention: str = "sdpa", device: Device = "cpu"
) -> PreTrainedModel:
    """A causal model from a folder or hub name, in eval mode; `dtype` None keeps the checkpoint's.

    Raises ValueError naming the file that is missing or corrupt, or the weights that the checkpoint lacks, for a head
    that rescales its logits, and for a GPU that is not there.
    """
    place = find_device(device)
    model = _read(path, dtype=dtype, attention=attention)
    nn.Module.to(model, place)
    _check_head(model)
    return model


def _read(path: str | Path, *, dtype: torch.dtype | None, attention: str) -> PreTrainedModel:
    _check_files(Path(path))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype if dtype is not None else "auto",
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot load a causal language model from {str(path)!r}: {error}") from error
    model, report = loaded
    incomplete = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if incomplete:
        # transformers would go on with random weights.
        raise ValueError(f"checkpoint {str(path)!r} lacks or misshapes {len(incomplete)} weights: {incomplete[:5]}")
    return model.eval()


def load_folder_empty(path: str | Path, *, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """The same model without weights (on torch's meta device), for a process that is sent its weights."""
    _check_files(Path(path))
    try:
        config = AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load a model's configuration from {str(path)!r}: {error}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def load_tokenizer(path: str | Path, *, gguf_file: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, hub name or GGUF file. Raises ValueError if it is missing or has no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), **({"gguf_file": gguf_file} if gguf_file else {}))
    except Exception as error:  # the loaders raise whatever their parsers do
        raise ValueError(f"cannot load a tokenizer from {str(path)!r}: {error}") from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {str(path)!r} has no chat template; use an instruction-tuned model's tokenizer, or put a"
            " chat_template into its tokenizer_config.json"
        )
    return tokenizer


def add_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Save the tokenizer into a model's folder, which `transformers` and vLLM then load by itself."""
    with full_disk_named(folder, 0):
        _tokenizer(str(tokenizer)).save_pretrained(str(folder))


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(name)


def save_model(model: PreTrainedModel, folder: str | Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write config and safetensors in the standard form, which any `transformers` program can read.

    `weights` are the model's, as `named_weights` names them, where it does not hold them whole itself. Raises OSError
    where the disk is full, with what it takes and what is free.
    """
    model.config.architectures = [type(model).__name__]
    held = (tensor for _, tensor in named_weights(model)) if weights is None else weights.values()
    with full_disk_named(Path(folder), sum(tensor.nbytes for tensor in held)):
        model.save_pretrained(str(folder), state_dict=None if weights is None else dict(weights))


@contextmanager
def full_disk_named(path: Path, size: int) -> Generator[None]:
    """Writing `size` bytes of tensors to `path`: what the disk refuses becomes an OSError that says how much it takes.

    safetensors has an error of its own for that.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and not is_full(error):
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"cannot write {path}: {error}. It takes {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free there "
            f"now. {FREE_SPACE}, then go on with `sao resume`"
        ) from error


def read_weights(folder: str | Path, like: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The folder's weights under the names that `like` has in memory, in its dtype; a tied head is left out.

    Raises ValueError naming the file or weights if the folder does not hold a model of this shape.
    """
    folder = Path(folder)
    _check_files(folder)
    wanted = dict(named_weights(like))
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found.update({name: tensors.get_tensor(name) for name in tensors.keys() if name in wanted})  # noqa: SIM118
    if found.keys() != wanted.keys():
        # Mixtures of experts are saved per expert and held fused: only transformers knows the conversion.
        found = dict(named_weights(_read(folder, dtype=next(like.parameters()).dtype, attention="sdpa")))
    bad = [name for name, weight in wanted.items() if name not in found or found[name].shape != weight.shape]
    if bad:
        raise ValueError(f"checkpoint {str(folder)!r} is of another shape than the model: {bad[:5]}")
    return {name: found[name].to(weight.dtype) for name, weight in wanted.items()}


def output_head(model: PreTrainedModel) -> nn.Module:
    """The module that turns hidden states (..., H) into logits (..., V). Raises ValueError if there is none."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head; it is no causal language model")
    return head


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and data of every parameter, and of every buffer that is saved; tied ones once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.data
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def build_config(config: ModelConfig, tokenizer_size: int) -> PreTrainedConfig:
    """The `transformers` configuration of a built model. Raises ValueError if the vocabulary is known from nowhere."""
    vocab_size = config.vocab_size or tokenizer_size
    if vocab_size < 1:
        raise ValueError("model.vocab_size is 0 and there is no tokenizer to take it from; set one of the two")
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "attn_implementation": config.attention,
    }
    if config.architecture == "qwen3":
        return Qwen3Config(**shape)
    return Qwen3MoeConfig(
        moe_intermediate_size=config.intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        **shape,
    )


def _build(config: ModelConfig, dtype: torch.dtype, seed: int, tokenizer_size: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(build_config(config, tokenizer_size), dtype=dtype).eval()


def _load_gguf(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantised, and rebuilt without the mark "quantised", which would forbid training and saving."""
    file = Path(config.path) / config.gguf_file
    if not file.is_file():
        raise ValueError(
            f"there is no GGUF file {str(file)!r}; model.path must be its folder, model.gguf_file its name"
        )
    gguf_config = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    try:
        packed = AutoModelForCausalLM.from_pretrained(config.path, gguf_file=config.gguf_file, dtype=dtype, **options)
    except ImportError as error:
        raise ValueError(
            f"reading {str(file)!r} needs the extra `gguf`: pip install -e '.[gguf]' in sao's checkout ({error})"
        ) from error
    except Exception as error:  # the parser raises whatever a broken file makes it raise
        raise ValueError(f"cannot read the GGUF file {str(file)!r}: {error}") from error
    fields = packed.config.to_dict()
    fields.pop("quantization_config", None)
    hub_config = type(packed.config).from_dict(fields)
    model = AutoModelForCausalLM.from_config(hub_config, dtype=dtype, attn_implementation=config.attention)
    model.load_state_dict(packed.state_dict())
    return model.eval()


def _check_files(folder: Path) -> None:
    """Name the broken file, which transformers' own errors do not. A hub name is not looked into."""
    if not folder.is_dir():
        if folder.is_absolute() or str(folder).startswith("."):
            raise ValueError(f"there is no model folder {str(folder)!r}")
        return
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {str(folder)!r} has no config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model folder {str(folder)!r} has no .safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"weight file {str(file)!r} is corrupt: {error}") from error


def check_head_config(config: PreTrainedConfig) -> None:
    """Raise ValueError if a model's own settings say that something comes after its head; needs no weights."""
    text = config.get_text_config()
    scales = [getattr(text, name, None) for name in ("logit_scale", "logits_scaling")]
    if getattr(text, "final_logit_softcapping", None) or any(scale not in (None, 1.0) for scale in scales):
        raise ValueError(_after_the_head(config.model_type))


def _check_head(model: PreTrainedModel) -> None:
    """Log-probs are computed from hidden state and head alone, so nothing may come after the head."""
    # A cap is not felt by the small logits of fresh weights.
    check_head_config(model.config)
    tokens = torch.tensor([[0, model.config.get_text_config().vocab_size - 1]], device=model.device)
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        gap = (output_head(model)(hidden).float() - expected).abs().max()
    if gap > 1e-3 * expected.abs().max():
        raise ValueError(_after_the_head(type(model).__name__))


def _after_the_head(name: str) -> str:
    return (
        f"{name} rescales or caps its logits after the head, which chunked log-probs do not know; use a model of the "
        "Qwen3, Qwen3Moe or Llama family"
    )
