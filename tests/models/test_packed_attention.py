"""Attention that is told where packed sequences end, on real tiny transformers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from sao.models.load import ModelConfig, load_causal_lm
from sao.models.packed_attention import NAME, packed_mask, use_packed_attention
from sao.models.scoring import hidden_states

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def make(architecture: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    config = ModelConfig(architecture=architecture, vocab_size=40, hidden_size=32)  # type: ignore[arg-type]
    return load_causal_lm(config, seed=0)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
def test_packed_equals_separate_with_gradients(architecture: str):
    """Sequences that see each other, or a sequence that sees its own future."""
    model = make(architecture)
    use_packed_attention(model)
    assert model.config._attn_implementation == NAME
    torch.manual_seed(1)
    parts = [torch.randint(0, 40, (1, length)) for length in (5, 1, 1, 9)]
    positions = [torch.arange(part.shape[1])[None] for part in parts]
    weight = torch.randn(1, 16, 32)

    def gradients(hidden: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (hidden * weight).sum().backward()
        return [p.grad.clone() for p in model.base_model.parameters() if p.grad is not None]

    packed = hidden_states(model.base_model, torch.cat(parts, 1), torch.cat(positions, 1))
    separate = torch.cat([hidden_states(model.base_model, *one) for one in zip(parts, positions, strict=True)], 1)
    assert torch.allclose(packed, separate, atol=1e-5)
    for mine, theirs in zip(gradients(packed), gradients(separate), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_the_mask_holds_the_lengths():
    """A last sequence that is left out, or one-token sequences taken for one."""
    model = make("qwen3")
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    assert packed_mask(model.base_model, positions) is None
    use_packed_attention(model)
    mask = packed_mask(model.base_model, positions)
    assert mask is not None
    assert mask.tolist() == [[[[3, 1, 2]]]]
    assert packed_mask(model.base_model, positions[:, :3]) is None


def test_everything_else_goes_on_as_before():
    """A model that can no longer generate, take a padding mask, or be saved, once it was trained."""
    plain, switched = make("qwen3"), make("qwen3")
    use_packed_attention(switched)
    assert NAME not in switched.config.to_json_string()
    tokens = torch.randint(0, 40, (3, 7))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :4] = 0
    for inputs in ({}, {"attention_mask": mask}, {"use_cache": False}):
        expected, found = (model(input_ids=tokens, **inputs).logits for model in (plain, switched))
        assert torch.equal(found, expected)
    expected, found = (model.generate(tokens, max_new_tokens=4, do_sample=False) for model in (plain, switched))
    assert torch.equal(found, expected)


def test_sliding_windows_are_left_to_transformers():
    """A window that is silently ignored."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).eval()
    use_packed_attention(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_what_a_cpu_gives(dtype: torch.dtype):
    """Keys that meet other query heads where a GPU's kernels need them repeated, or a mask of all tokens by all."""
    model = make("qwen3")
    use_packed_attention(model)
    tokens = torch.randint(0, 40, (1, 4096), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(1000), torch.arange(3096)])[None]
    with torch.no_grad():
        expected = hidden_states(model.base_model, tokens, positions)
        model.to("cuda", dtype)
        hidden_states(
            model.base_model, tokens[:, :9].cuda(), positions[:, 995:1004].cuda()
        )  # cuBLAS takes its workspace
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = hidden_states(model.base_model, tokens.cuda(), positions.cuda()).float().cpu()
    assert torch.allclose(found, expected, atol=1e-3 if dtype is torch.float32 else 0.1)
    # 4,096 tokens of 128 numbers at most, 2 MB, a few at a time; a mask alone would be 17 MB, and its bias 67.
    assert torch.cuda.max_memory_allocated() - before < 40e6
