"""The public model: load it, compare its files, and check that an ensemble can be built on it.

All members answer in one batch. So a row of the batch must not depend on another row, not even in
its last bits. And the same tokens must give the same logits in one pass, through a cache and behind
padding. `check_model` raises for models that are known to break these rules. The tests of the
families in `lora.TESTED` check them, and `check_behaviour` tries a model of any other type when it
is loaded.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor

from adapmixed.ensemble.decoder import cache_argument, check_cache
from adapmixed.ensemble.lora import BatchedLoRA, Logits, OutputLayer
from adapmixed.text import beginning_of

if TYPE_CHECKING:
    from adapmixed.ensemble.ensemble import Ensemble

FILE_NAME = "ensemble.json"
ADAPTER_CONFIG = "adapter_config.json"
_ADDED_TOKENS = "added_tokens.json"
_CONFIG = "config.json"
_INDEX = ".index.json"
_TOKENIZER = "tokenizer.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # transformers' order
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_VOCABULARIES = (
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "spm.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "qwen.tiktoken", "tiktoken.model",
    "tekken.json", "emoji.json", "bpe.codes", "vocab-src.json", "vocab-tgt.json",
    "entity_vocab.json", "byte_maps.json", "prophetnet.tokenizer", "word_pronunciation.json",
    "word_shape.json", "normalizer.json",
)  # fmt: skip
# Settings that leave logits and ids alone: names, versions, lengths, padding, chat and output
# formats.
_ASIDE_OF_MODEL = frozenset(
    {
        "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
        "use_cache", "architectures",
    }
)  # fmt: skip
_ASIDE_OF_TOKENIZER = frozenset(
    {
        "padding", "truncation", "name_or_path", "transformers_version", "_commit_hash",
        "special_tokens_map_file", "tokenizer_file", "chat_template", "is_local",
        "local_files_only",
        "clean_up_tokenization_spaces", "model_max_length", "max_length", "stride", "padding_side",
        "truncation_side", "truncation_strategy", "pad_to_multiple_of", "model_input_names",
    }
)  # fmt: skip
_TOKENS = 6  # of a trial
_PADDING = 2


def load_base(
    base: Any, dtype: torch.dtype | None, *, revision: str | None = None
) -> tuple[Any, Any]:
    """Return a public model that may be changed, and its tokenizer or None.

    Args:
        base: a folder, a hub name, or a transformers model, which is copied.
        dtype: the model's dtype; None for fp32, or for a model object's own.
        revision: commit, tag or branch of a hub name; None for the newest.

    Raises:
        ValueError: if the model cannot be read or carries adapters, or as `check_base`.
        OSError: if there is no such model.
    """
    if isinstance(base, str | os.PathLike):
        with reading_base(base):
            name = os.fspath(base)
            model, tokenizer = _read(name, dtype, revision), load_tokenizer(name, revision)
    elif isinstance(base, torch.nn.Module) and hasattr(base, "config"):
        model, tokenizer = copy.deepcopy(base).to(dtype), None
    else:
        raise ValueError(
            f"base must be a transformers model, a folder or a hub name, got {type(base).__name__}"
        )
    adapted = any(isinstance(module, BatchedLoRA | OutputLayer) for module in model.modules())
    if adapted or hasattr(model, "peft_config"):
        raise ValueError(
            "base must be the plain public model, got one that carries adapters: transformers adds "
            f"that of an {ADAPTER_CONFIG} in the same folder"
        )
    return model, tokenizer


def check_base(base: Any) -> None:
    """Check that a base is a folder of a model, or can be a hub name, before the hub is asked.

    Args:
        base: as in `load_base`. Anything but a string or a path passes.

    Raises:
        ValueError: if it is a path without a folder, or the folder of an ensemble or an adapter.
    """
    if not isinstance(base, str | os.PathLike):
        return
    name = os.fspath(base)
    local = Path(name)
    if not name or not local.is_dir():
        if isinstance(base, os.PathLike) or not _may_be_hub_name(name):
            raise ValueError(f"base must be an existing folder or a hub name, got {name!r}")
        return
    for file, kind in ((FILE_NAME, "an ensemble"), (ADAPTER_CONFIG, "an adapter")):
        if (local / file).is_file() and not (local / _CONFIG).is_file():
            raise ValueError(
                f"base must be a public model, got {name} with {file} but no {_CONFIG}, "
                f"which is {kind}: base and folder may be swapped"
            )


def _may_be_hub_name(name: str) -> bool:
    """Return False for a path: one that exists, or is no name of the hub.

    So is a name below a folder that is here, unless the hub's model of that name was downloaded.
    """
    try:
        cached = isinstance(try_to_load_from_cache(name, _CONFIG), str)
    except HFValidationError:
        return False
    below = "/" in name and Path(name).parent.is_dir()
    return not Path(name).exists() and (cached or not below)


@contextmanager
def reading_base(base: str | os.PathLike[str]) -> Iterator[None]:
    """Check a base, and name it in every error of what reads it.

    Raises:
        ValueError: as `check_base`.
        OSError: if reading raises OSError. Errors of the hub do not name the model themselves.
    """
    check_base(base)
    name = os.fspath(base)
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise OSError(
            f"base must be an existing folder or a hub name that can be read, got {name!r}: {error}"
        ) from error


def _read(name: str, dtype: torch.dtype | None, revision: str | None) -> Any:
    """Return the model of a folder or hub name."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    silent = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if silent:
        logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or torch.float32, revision=revision
        )
    except (OSError, ValueError):
        raise
    except Exception as error:  # damaged weights files raise many types of exception
        raise ValueError(f"base must be a readable model, {name} is not: {error}") from error
    finally:
        if silent:
            logging.enable_progress_bar()


def load_tokenizer(name: str | os.PathLike[str], revision: str | None = None) -> Any:
    """Return the tokenizer of a folder or hub name; None for a folder without one."""
    from transformers import AutoTokenizer

    files = (_TOKENIZER, "tokenizer_config.json", *_VOCABULARIES)  # settings are not enough
    if (local := Path(name)).is_dir() and not any((local / file).is_file() for file in files):
        return None
    return AutoTokenizer.from_pretrained(name, revision=revision)


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
    versions = _content(find("tokenizer_config.json")).get("fast_tokenizer_files") or ()
    tokenizer = (_TOKENIZER, *_SETTINGS, _ADDED_TOKENS, *_VOCABULARIES)
    names = [_CONFIG, *_weights(find), *tokenizer, *versions]
    paths = {name: path for name in names if (path := find(name)) is not None}
    if _TOKENIZER in paths:
        paths = {name: path for name, path in paths.items() if name not in _VOCABULARIES}
    return {name: _digest(name, path) for name, path in sorted(paths.items())}


def _weights(find: Callable[[str], Path | None]) -> list[str]:
    """Return the names of the files that the weights are loaded from."""
    named = _content(find(_CONFIG)).get("transformers_weights")
    for name in [named] if named else [file + end for file in _WEIGHTS for end in ("", _INDEX)]:
        path = find(name)
        if path is not None and name.endswith(_INDEX):
            return sorted(set(_content(path).get("weight_map", {}).values()))
        if path is not None:
            return [name]
    return []


def _digest(name: str, path: Path) -> str:
    if path.suffix != ".json":
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    aside: Collection[str] = _ASIDE_OF_MODEL if name == _CONFIG else _ASIDE_OF_TOKENIZER
    if name in (*_VOCABULARIES, _ADDED_TOKENS):  # their keys are tokens
        aside = ()
    return content_digest(read_json(path), aside)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: if it is not JSON.
        OSError: if it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from error


def content_digest(content: Any, aside: Collection[str]) -> str:
    """Return the SHA-256 of the sorted content of a JSON file without some of its keys."""
    if isinstance(content, dict):
        padding = content.get("padding")
        content = {key: value for key, value in content.items() if key not in aside}
        if "padding" in aside and isinstance(padding, dict) and "pad_token" in padding:
            content["pad_token"] = padding["pad_token"]  # transformers makes it a special token
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content(path: Path | None) -> dict[str, Any]:
    content = None if path is None else read_json(path)
    return content if isinstance(content, dict) else {}


def is_hub_name(source: str | None) -> bool:
    """Return whether a source names a model of the hub, not a local path."""
    return source is not None and not os.path.isabs(source) and not Path(source).exists()


def source_of(base: Any) -> str | None:
    """Return the folder or hub name of a base, or the one a model object was loaded from."""
    if not isinstance(base, str | os.PathLike):
        base = getattr(getattr(base, "config", None), "_name_or_path", None)
    return os.fspath(base) if base else None


def compare_files(
    base: Any, folder: Path | None, recorded: Mapping[str, str], revision: str | None = None
) -> tuple[dict[str, str], bool]:
    """Compare the base's files, those of its tokenizer included, with the ensemble's record.

    A file that only one of the two has raises as well, because the base is loaded from it. This
    does not apply to the hub's cache, which holds only the files that were requested so far.

    Args:
        base: as in `load_base`.
        folder: the ensemble folder, for messages.
        recorded: `Manifest.base_files`. Without them only the files of a base folder are read,
            because hashing takes its time.
        revision: the commit of a hub name that was loaded, or None.

    Returns:
        the digests of the files (:func:`base_files`), and whether they are all that were recorded.

    Raises:
        ValueError: if the base differs from the record.
    """
    source = source_of(base) if recorded or isinstance(base, str | os.PathLike) else None
    whole = source is not None and Path(source).is_dir()
    files = source if whole else None
    if source is not None and recorded and not whole:
        with suppress(HFValidationError):  # a path that no longer exists
            config = try_to_load_from_cache(source, _CONFIG, revision=revision)
            files = os.path.dirname(config) if isinstance(config, str) else None
    digests = {} if files is None else base_files(files)
    names = digests.keys() | recorded.keys() if whole else digests.keys() & recorded.keys()
    differing = [name for name in sorted(names) if digests.get(name) != recorded.get(name)]
    if recorded and differing:
        raise ValueError(
            f"base must have the files that {folder} was trained with, got {source}, which differs "
            f"from base_files of {FILE_NAME} in {', '.join(differing)}"
        )
    return digests, bool(digests) and digests == recorded


def check_names(source: str | None, names: Mapping[str, str | None]) -> None:
    """Raise if adapters name different bases, or another base than `source`.

    Names agree if their last parts do, for instance "openai-community/gpt2" and "/models/gpt2".
    Names that agree show nothing of the weights.

    Args:
        source: the result of :func:`source_of`; None if the base was compared otherwise.
        names: `base_model_name_or_path` of each adapter; empty or None if unknown.

    Raises:
        ValueError: if two names differ.
    """
    named = [(who, name) for who, name in (("base", source), *names.items()) if name]
    for who, name in named:
        first, expected = named[0]
        if last_part(name) != last_part(expected):
            raise ValueError(
                f"base must be the one that all adapters were trained on, got {expected!r} "
                f"({first}) and {name!r} ({who}); if only the names differ, record base_files in "
                "ensemble.json"
            )


def last_part(name: str) -> str:
    """Return the part of a base's name that copies have in common."""
    return PurePath(name).name.lower()


def check_model(model: Any, tokenizer: Any = None) -> None:
    """Raise ValueError for a model that is known not to separate members or positions exactly.

    Args:
        model: the public model; without weights (on the device "meta") it is checked as well.
        tokenizer: its tokenizer, or None.

    Raises:
        ValueError: if the model has an encoder, mixture-of-experts layers, recurrent layers (state
            space, linear attention, convolution) or another memory than keys and values, attention
            to later tokens, no key/value cache, quantised weights, or an output layer whose width
            is not the configuration's vocab_size.
        ValueError: if the tokenizer begins a text with a token that the model does not have.
    """
    kind = model.config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"base must be a decoder-only model, got {kind}, which reads its prompt in an encoder "
            "that the ensemble does not run"
        )
    for name, module in model.named_modules():
        if re.search(r"(?i)expert|moe", type(module).__name__):
            raise ValueError(
                f"base must have no mixture-of-experts layers, got {kind} with {name or 'root'} "
                f"({type(module).__name__}): the tokens that one member sends to an expert change "
                "the shape of a product, and so the last bits of other members' logits"
            )
    cache_argument(model)
    check_cache(model.config)
    both_ways = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    if both_ways and both_ways != "vision":  # with "vision" only images attend to later tokens
        raise ValueError(
            f"base must be causal, got {kind} with use_bidirectional_attention = {both_ways!r}: a "
            "later token would change earlier logits"
        )
    if getattr(model, "is_quantized", False) or hasattr(model.config, "quantization_config"):
        raise ValueError(
            "base must not be quantised: some methods choose scales or outliers over all rows of a "
            "batch, so that one member would change another's logits"
        )
    head, vocab_size = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    width = None if head is None else int(head.weight.shape[0])
    if width != vocab_size:
        raise ValueError(
            f"base must have an output layer as wide as its vocab_size = {vocab_size}, got {width}"
        )
    for token in beginning_of(tokenizer):
        if token >= vocab_size:
            raise ValueError(
                f"base must have the tokens with which its tokenizer begins a text, got {token} "
                f"with vocab_size = {vocab_size}"
            )


def max_positions(config: Any) -> int | None:
    """Return the longest input in tokens, or None if the model sets no limit.

    Up to this length a model computes the same logits in one pass and in chunks. LongRoPE changes
    the frequencies of all positions that are not cached once an input exceeds the original window,
    so that window is the limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    limit = getattr(config, "max_seq_len", None) if limit is None else limit  # MPT
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):  # one entry for all layers, or one per kind of layer
        if isinstance(entry, dict) and entry.get("rope_type") == "longrope":
            original = entry.get("original_max_position_embeddings")
            limit = limit if original is None else min(int(original), limit or int(original))
    return None if limit is None else int(limit)


@torch.no_grad()
def check_behaviour(ensemble: Ensemble) -> None:
    """Try a model of an untested type on a few tokens.

    A row of a batch must keep every bit if all other rows, of members and sequences, change. Up to
    rounding, a later token must not change earlier logits. Up to rounding, a cache, left padding
    and a decoder whose sequences join and leave must give the logits of a single pass. This finds
    gross faults only: longer windows are not tried.

    Raises:
        ValueError: if one of these fails; the message names the model type and what failed.
    """
    kind = ensemble.model.config.model_type
    failed = f"base must answer as an ensemble needs it, {kind} does not"
    try:
        fault = _fault(ensemble)
    except Exception as error:  # a model's own code may raise anything
        raise ValueError(f"{failed}: {type(error).__name__}: {error}") from error
    if fault is not None:
        raise ValueError(f"{failed}: {fault}")


def _fault(ensemble: Ensemble) -> str | None:
    device = ensemble.device
    tokens = (torch.arange(_TOKENS + _PADDING, device=device) * 7 + 3) % ensemble.vocab_size
    padded = tokens[None]
    ids = padded[:, _PADDING:]
    whole = _rows(ensemble.forward(ids, None, None))
    copies = len(whole) if ensemble.trunk.repeats_input else 1
    for rows, kept in product((copies, 2 * copies, 3 * copies), (0, -1)):
        first = (ids + torch.arange(rows, device=device)[:, None]) % ensemble.vocab_size
        second = (first + rows) % ensemble.vocab_size
        second[kept] = first[kept]  # all others change
        outputs = (ensemble.model(input_ids=batch, use_cache=False) for batch in (first, second))
        pair = (_rows(ensemble.output_layer.split(out.logits, ()))[kept, kept] for out in outputs)
        if not torch.equal(*pair):
            return "one row of a batch changes another"
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % ensemble.vocab_size
    if _differ(_rows(ensemble.forward(other, None, None))[:, :, :-1], whole[:, :, :-1]):
        return "a later token changes earlier logits"
    cache, parts = ensemble.new_cache(_TOKENS + 1), []  # reserve room for all, as decoding does
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        parts.append(_rows(ensemble.forward(part, None, cache)))
    if _differ(torch.cat(parts, dim=2), whole):
        return "a key/value cache changes its logits"
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    if _differ(_rows(ensemble.forward(padded, mask, None))[:, :, _PADDING:], whole):
        return "left padding changes its logits"
    cache, parts = ensemble.new_cache(_TOKENS + _PADDING), []
    for end in range(1, padded.shape[1] + 1):
        parts.append(_rows(ensemble.forward(padded[:, end - 1 : end], mask[:, :end], cache)))
    if _differ(torch.cat(parts[_PADDING:], dim=2), whole):
        return "left padding changes its logits in chunks"
    memory = ensemble.sequence_bytes(_TOKENS + _PADDING)
    decoder, joining = (
        ensemble.decoder(row[:, :-2], memory_bytes=memory, new_tokens=2) for row in (padded, ids)
    )
    decoder.join(joining)
    decoder.append(tokens[-2:-1].repeat(2))
    decoder.drop(torch.tensor([True, False], device=device))
    decoder.append(tokens[-1:])
    if _differ(_rows(decoder.logits), whole[:, :, -1]):
        return "sequences that join and leave a batch change its logits"
    return None


def _differ(logits: Tensor, expected: Tensor) -> bool:
    """Return whether logits differ by more than rounding, relative to their range."""
    finite = expected[expected.isfinite()].to(torch.float32)
    precision = 2.0**-10 if expected.dtype == torch.float32 else 2.0**-4
    allowed = precision * float(finite.max() - finite.min())
    return not torch.allclose(logits.float(), expected.float(), rtol=0.0, atol=allowed)


def _rows(logits: Logits) -> Tensor:
    """Return the public row and the members' on all tokens, (N + 1, ...)."""
    return torch.cat([logits.public[None], logits.private])
