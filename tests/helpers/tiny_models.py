"""Tiny random models and peft adapters whose B is not zero."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 61
POSITIONS = 32
TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}

ADAPTED = {
    f"transformer.h.{i}.{name}": 3
    for i in range(2)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")
}
"""The layers that adapters of the tiny GPT-2 adapt."""


def tiny_model(family: str, seed: int = 0, **more: Any) -> Any:
    """Return a random causal language model of a family, in fp32 and eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if family == "llama":
        sizes |= {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= more
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()


def tokenizer(ids: list[int], **settings: Any) -> Any:
    """Return a tokenizer with one word for each of the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in ids}, unk_token=f"w{ids[0]}"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def around(tokenizer: Any, *before: int, after: tuple[int, ...] = ()) -> Any:
    """Let a tokenizer put these tokens around every text; the first one is BOS."""
    from tokenizers.processors import TemplateProcessing

    ids = [*before, *after]
    names = tokenizer.convert_ids_to_tokens(ids)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*names[: len(before)], "$A", *names[len(before) :]],
        special_tokens=list(zip(names, ids, strict=True)),
    )
    tokenizer.bos_token = names[0] if before else None
    return tokenizer


def own_loss(model: Any, ids: Sequence[int], first: int) -> float:
    """Return transformers' summed loss of the tokens from `first` on, each behind all before it."""
    tokens = torch.tensor([ids])
    labels = tokens.clone()
    labels[:, :first] = -100
    with torch.no_grad():
        return (len(ids) - first) * float(model(input_ids=tokens, labels=labels).loss)


def of_windows(
    model: Any, begin: Sequence[int], text: Sequence[int], block: int, stride: int | None
) -> tuple[float, int]:
    """Return perplexity and queries by transformers' loss, with `begin` before every window."""
    total, count, start, done = 0.0, 0, 0, 1
    while done < len(text):
        window = text[start : start + block]
        known = 1 if stride is None else done - start
        total += own_loss(model, [*begin, *window], len(begin) + known)
        count += len(window) - known
        done, start = start + len(window), start + (stride or block)
    return math.exp(total / count), count


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


def adapted_layers(folders: Sequence[Path]) -> dict[str, int]:
    """Return the layers that these peft folders adapt, as in `ensemble.json`."""
    from adapmixed.ensemble import adapter_layers
    from adapmixed.ensemble.lora import merged_layers

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
