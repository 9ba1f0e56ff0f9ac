"""Trains the demonstration's public model and its ensemble, and writes them into the package.

    python scripts/build_demo_assets.py            # both stages, about 12 minutes on one core
    python scripts/build_demo_assets.py --stage ensemble

Public model: byte-level BPE (2 048 tokens) and a GPT-2 of 4 layers, d = 128, trained on the
docstrings of the standard library. Private models: one LoRA adapter per shard of the language
reference's topics; held-out topics are in no shard. Only weights are written, never text. A run is
seeded, but its result depends on the Python version (whose text it reads) and on the torch build.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from adapmixed.commands.options import progress_bar
from adapmixed.data.builtin import docstring_documents, private_documents
from adapmixed.models.manifest import Manifest, write_manifest
from adapmixed.models.provenance import base_sha256, tokenizer_files
from adapmixed.training.adapter import save_adapter
from adapmixed.training.blocks import token_blocks, token_stream
from adapmixed.training.finetune import FinetuneConfig, fit, train_adapter
from adapmixed.training.partition import partition_documents, shard_record

ASSETS = Path(__file__).resolve().parents[1] / "python" / "adapmixed" / "assets" / "demo"
BASE_NAME = "adapmixed-demo-base"
VOCAB_SIZE = 2048
END = "<|endoftext|>"
# The demonstration's text is public, so its key is too; a real partition needs a secret one.
SHARD_KEY = b"adapmixed demonstration shards"
PUBLIC = FinetuneConfig(learning_rate=4e-3, warmup_steps=30, epochs=6, batch_size=8, block_size=256)
PRIVATE = FinetuneConfig(
    rank=4, alpha=32.0, learning_rate=3e-3, epochs=20, batch_size=4, block_size=256
)


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with every byte in its alphabet, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=PUBLIC.block_size,
        clean_up_tokenization_spaces=False,
    )


def build_base(folder: Path, seed: int) -> None:
    """Trains the public model on docstrings and writes it as fp16 with its tokenizer."""
    texts = [document.text for document in docstring_documents()]
    tokenizer = train_tokenizer(texts)
    stream = token_stream(tokenizer, texts)
    print(f"public text: {len(texts)} documents, {len(stream)} tokens", flush=True)
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=PUBLIC.block_size,
            n_embd=128,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.06,  # the usual 0.02 learns slowly at this width
            bos_token_id=end,
            eos_token_id=end,
        )
    )
    inputs, labels = token_blocks(stream, PUBLIC.block_size)
    generator = torch.Generator().manual_seed(seed)
    update, close = progress_bar(0, "step")
    losses = fit(model, inputs, labels, PUBLIC, generator=generator, progress=update)
    close()
    print("public loss by epoch:", " ".join(f"{loss:.3f}" for loss in losses), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def load_base(folder: Path) -> tuple[Any, Any]:
    """The public model as it is stored, in fp32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def train_member(task: tuple[int, list[str], Path, Path, int]) -> int:
    """Trains one adapter in a worker process; returns the shard's number of tokens."""
    shard, texts, base_folder, target, seed = task
    torch.set_num_threads(1)
    disable_progress_bar()
    base, tokenizer = load_base(base_folder)
    stream = token_stream(tokenizer, texts)
    trained = train_adapter(base, stream, PRIVATE, seed=seed, shard=shard)
    save_adapter(trained.model, target, PRIVATE, base_name=BASE_NAME, dtype=torch.float16)
    return len(stream)


def build_ensemble(folder: Path, base: Path, num_models: int, seed: int, workers: int) -> None:
    """Trains one adapter per shard and writes the ensemble folder."""
    shards = partition_documents(private_documents(), num_models, key=SHARD_KEY)
    shutil.rmtree(folder, ignore_errors=True)
    members = [f"member-{index:03d}" for index in range(num_models)]
    tasks = [
        (index, [document.text for document in shard], base, folder / members[index], seed)
        for index, shard in enumerate(shards)
    ]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        done = pool.imap_unordered(train_member, tasks)
        sizes = list(tqdm(done, total=num_models, unit="adapter", disable=None))
        pool.close()
        pool.join()
    print(f"private text: {sum(sizes)} tokens, {min(sizes)} to {max(sizes)} per shard", flush=True)
    write_manifest(
        folder,
        Manifest(
            base_model=BASE_NAME,
            members=tuple(members),
            tokenizer_files=tokenizer_files(base),
            base_sha256=base_sha256(base),
            training={
                **asdict(PRIVATE),
                "target_modules": list(PRIVATE.target_modules),
                "seed": seed,
                "corpus": "pydoc_data.topics of Python {}.{}".format(*sys.version_info),
            },
            shards=tuple(shard_record(shard, key=SHARD_KEY) for shard in shards),
            document_names="stable",  # topics
        ),
    )


def make_readable(folder: Path) -> None:
    """Weights are written with mode 0600; the package's files are for every user."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main() -> None:
    """Runs the stages that were asked for."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=("all", "base", "ensemble"), default="all")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write")
    parser.add_argument("--num-models", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="adapters trained at a time")
    arguments = parser.parse_args()
    base = arguments.output / "base"
    if arguments.stage in ("all", "base"):
        start = time.perf_counter()
        torch.set_num_threads(arguments.workers)
        build_base(base, arguments.seed)
        print(f"public model: {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.stage in ("all", "ensemble"):
        start = time.perf_counter()
        build_ensemble(
            arguments.output / "ensemble",
            base,
            arguments.num_models,
            arguments.seed,
            arguments.workers,
        )
        print(f"ensemble: {time.perf_counter() - start:.0f} s", flush=True)
    make_readable(arguments.output)


if __name__ == "__main__":
    main()
