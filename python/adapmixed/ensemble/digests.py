"""Compute digests of the files that a public model and its tokenizer are loaded from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
_INDEX = ".index.json"
_TOKENIZER = "tokenizer.json"
ADDED_TOKENS = "added_tokens.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # transformers' order
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_VOCABULARIES = (
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "spm.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "qwen.tiktoken", "tiktoken.model",
    "tekken.json", "emoji.json", "bpe.codes", "vocab-src.json", "vocab-tgt.json",
    "entity_vocab.json", "byte_maps.json", "prophetnet.tokenizer", "word_pronunciation.json",
    "word_shape.json", "normalizer.json",
)  # fmt: skip
TOKENIZER_FILES = (_TOKENIZER, *_SETTINGS, ADDED_TOKENS, *_VOCABULARIES)
"""Files that determine which token ids a text becomes."""
# Settings that leave logits and ids alone: names, versions, lengths, padding, chat and output
# formats.
_ASIDE_OF_MODEL = frozenset(
    {
        "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
        "use_cache", "architectures",
    }
)  # fmt: skip
_ASIDE_OF_ADAPTER = frozenset(
    {"base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping"}
)
_ASIDE_OF_TOKENIZER = frozenset(
    {
        "padding", "truncation", "name_or_path", "transformers_version", "_commit_hash",
        "special_tokens_map_file", "tokenizer_file", "chat_template", "is_local",
        "local_files_only",
        "clean_up_tokenization_spaces", "model_max_length", "max_length", "stride", "padding_side",
        "truncation_side", "truncation_strategy", "pad_to_multiple_of", "model_input_names",
    }
)  # fmt: skip


def base_files(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the digest of every file that a base folder is loaded from, by name.

    These are `config.json`, the weights, and the tokenizer's files. The weights are
    `model.safetensors`, or all files that its index names, or else the same of `pytorch_model.bin`;
    a file that config.json names goes first. Tokenizers that tokenizer_config.json names for
    certain versions of transformers count, too.

    If there is a `tokenizer.json`, vocabularies in other formats are left out, because they are not
    read. A digest is the SHA-256 of the file's bytes. For JSON it is the SHA-256 of the sorted
    content without settings that leave logits and ids alone, such as padding, dtypes and names.

    Raises:
        ValueError: if there is no such folder, or a JSON file cannot be parsed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"folder must be an existing folder, got {os.fspath(folder)!r}")
    return file_digests(lambda name: path if (path := root / name).is_file() else None)


def file_digests(find: Callable[[str], Path | None]) -> dict[str, str]:
    """Return what :func:`base_files` returns, for files found by name, for instance on the hub."""
    names = [CONFIG, *_weights(find), *TOKENIZER_FILES, *_versions(find)]
    found = {name: path for name in names if (path := find(name)) is not None}
    if _TOKENIZER in found:
        found = {name: path for name, path in found.items() if name not in _VOCABULARIES}
    return {name: _digest(name, path) for name, path in sorted(found.items())}


def of_tokenizer(files: Mapping[str, str]) -> dict[str, str]:
    """Return the tokenizer's part of the digests of :func:`base_files`."""
    return {
        name: digest
        for name, digest in files.items()
        if name != CONFIG and not name.endswith((".safetensors", ".bin"))
    }


def adapter_sha256(config: Any) -> str:
    """Return the digest of a parsed `adapter_config.json` without names, versions and modes."""
    return _sha256_without(config, _ASIDE_OF_ADAPTER)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a tokenizer can be loaded from a folder; settings of tokens are not enough."""
    names = (_TOKENIZER, "tokenizer_config.json", *_VOCABULARIES)
    return any((folder / name).is_file() for name in names)


def _file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _weights(find: Callable[[str], Path | None]) -> list[str]:
    """Return the names of the files that the weights are loaded from."""
    named = _content(find(CONFIG)).get("transformers_weights")
    names = [one + end for one in _WEIGHTS for end in ("", _INDEX)]
    for name in [named] if isinstance(named, str) else names:
        path = find(name)
        if path is not None and name.endswith(_INDEX):
            return sorted(set(_content(path).get("weight_map", {}).values()))
        if path is not None:
            return [name]
    return []


def _versions(find: Callable[[str], Path | None]) -> list[str]:
    """Return the names of tokenizers for certain versions of transformers."""
    names = _content(find("tokenizer_config.json")).get("fast_tokenizer_files")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _digest(name: str, path: Path) -> str:
    if path.suffix != ".json":
        return _file_sha256(path)
    if name in (*_VOCABULARIES, ADDED_TOKENS):  # their keys are tokens
        return _sha256_without(_parsed(path), frozenset())
    return _sha256_without(
        _parsed(path), _ASIDE_OF_MODEL if name == CONFIG else _ASIDE_OF_TOKENIZER
    )


def _sha256_without(content: Any, aside: Collection[str]) -> str:
    """Return the SHA-256 of the sorted content of a JSON file without some of its keys."""
    if isinstance(content, dict):
        padding = content.get("padding")
        content = {key: value for key, value in content.items() if key not in aside}
        if "padding" in aside and isinstance(padding, dict) and "pad_token" in padding:
            content["pad_token"] = padding["pad_token"]  # transformers makes it a special token
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content(path: Path | None) -> dict[str, Any]:
    content = None if path is None else _parsed(path)
    return content if isinstance(content, dict) else {}


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
