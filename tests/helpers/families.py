"""Tiny random models of every tested family, and of some families that raise."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import POSITIONS, VOCAB

from adapmixed.ensemble.lora import TESTED

# Names of the sizes in the configurations of several families.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# Sliding windows are shorter than the inputs of the tests.
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_SHARED = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 30.0, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in TESTED},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {"logit_scale": 1.0},
    "cohere2": _SLIDING | {"logit_scale": 1.0},
    "falcon": {"head_dim": None},
    "gemma2": _SLIDING | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": _SLIDING,
    # The upper half of the layers reads keys and values of the lower half.
    "gemma3n_text": _SHARED | {"laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": _SHARED
    | {"hidden_size": 32, "hidden_size_per_layer_input": 16}
    | {"global_head_dim": 16, "use_double_wide_mlp": True},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "gptj": _GPT | {"rotary_dim": 4},
    "mistral": {"sliding_window": 4},
    "mpt": {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": POSITIONS},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"original_max_position_embeddings": POSITIONS},
    "qwen2": _SLIDING | {"use_sliding_window": True},
    "starcoder2": {"sliding_window": 4},
    # These raise, or are tried on loading.
    "bart": {"d_model": 16, "decoder_layers": 1, "encoder_layers": 1},
    "bert": {},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "glm": {"pad_token_id": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {},
    "mixtral": _MOE,
    "qwen3_moe": _MOE | {"moe_intermediate_size": 8},
}


def tiny(family: str, seed: int = 0, **settings: Any) -> Any:
    """Return a random causal language model in fp32 and eval mode.

    Its logits depend on positions, and its biases are not zero.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**_SIZES, **SETTINGS[family], **settings}
    config = {name: value for name, value in values.items() if value is not None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter.data, std=0.3)
        else:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.to(torch.float32).eval()


def linear_names(model: Any) -> list[str]:
    """Return the last parts of the names of all linear layers but the output layer, ascending."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear | Conv1D)
            and layer is not head
            and not name[-1].isdigit()  # Gemma 3n has lists of them: such a name is also a block's
        }
    )
