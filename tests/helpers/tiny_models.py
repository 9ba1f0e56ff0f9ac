"""Tiny random models and peft adapters whose B is not zero."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 61
POSITIONS = 32
TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
}

ADAPTED = {
    f"transformer.h.{i}.{name}": (3,)
    for i in range(2)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")
}
"""The layers that adapters of the tiny GPT-2 adapt."""


def tiny_model(family: str, seed: int = 0) -> Any:
    """Return a random causal language model of a family, in fp32 and eval mode."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    if family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=POSITIONS,
                n_embd=16,
                n_layer=2,
                n_head=2,
                initializer_range=0.3,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                max_position_embeddings=POSITIONS,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.3,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    return model.eval()


def tokenizer(ids: list[int], lower: bool = False, **settings: Any) -> Any:
    """Return a tokenizer with one word for each of the ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in ids}, unk_token=f"w{ids[0]}"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def write_adapter(base: Any, folder: Path, *, seed: int, **settings: Any) -> Path:
    """Write a peft folder with random A and B (`zero=True` keeps B = 0)."""
    from peft import LoraConfig, get_peft_model

    zero, std = settings.pop("zero", False), settings.pop("std", 0.3)
    saved = settings.pop("save_embedding_layers", "auto")
    arguments = {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**arguments))
    if not zero:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=std)
    model.save_pretrained(folder, save_embedding_layers=saved)
    return folder


def adapted_layers(folders: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Return the layers that these peft folders adapt, as in `ensemble.json`."""
    from adapmixed.ensemble.adapted_layers import adapter_layers, merged_layers

    return merged_layers(adapter_layers(folder) for folder in folders)


def peft_logits(base: Any, folders: list[Path], ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return the reference logits (N, b, t, V), from peft itself with one adapter at a time."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(base), folders[0], adapter_name="0")
        for index, folder in enumerate(folders[1:], start=1):
            model.load_adapter(folder, adapter_name=str(index))
    model.eval()
    rows = []
    for index in range(len(folders)):
        model.set_adapter(str(index))
        with torch.no_grad():
            rows.append(model(input_ids=ids, **settings).logits)
    return torch.stack(rows)
