"""Train the demonstration's public model and write it into the package.

    python scripts/build_demo_base.py

The tokenizer is a byte-level BPE (2 048 tokens), the model a GPT-2 of 4 layers with d = 128. Both
are trained on the docstrings of the standard library. Only weights are written, never text. A run
is seeded, but its result depends on the Python version, whose text it reads, and on torch.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from adapmixed.text import token_stream
from adapmixed.training.blocks import Blocks, token_blocks
from adapmixed.training.finetune import fit
from adapmixed.training.settings import FinetuneConfig

ASSETS = Path(__file__).resolve().parents[1] / "python" / "adapmixed" / "assets" / "demo" / "base"
VOCAB_SIZE = 2048
END = "<|endoftext|>"
PUBLIC = FinetuneConfig(learning_rate=4e-3, warmup_steps=30, epochs=6, batch_size=8, block_size=256)
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}
MIN_DOCSTRING = 20


def docstrings() -> list[str]:
    """Return the docstrings of the standard library, about 7 800, each content once.

    Raises:
        RuntimeError: if the running Python has no readable sources of its standard library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if EXCLUDED & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue  # templates and deliberately broken sources have no docstrings
        for node in ast.walk(tree):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            text = ast.get_docstring(node)
            if text is not None and len(text) > MIN_DOCSTRING:
                texts.setdefault(text)
    if not texts:
        raise RuntimeError(f"no docstrings found under {root}: the library's sources are missing")
    return list(texts)


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with every byte in its alphabet, so that it encodes any text."""
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
    """Train the public model on docstrings and write it as fp16 with its tokenizer."""
    texts = docstrings()
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
    blocks = Blocks(*token_blocks(stream, PUBLIC.block_size))
    generator = torch.Generator().manual_seed(seed)
    for epoch, loss in enumerate(fit(model, blocks, PUBLIC, generator=generator), start=1):
        print(f"public loss of epoch {epoch}: {loss:.3f}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def make_readable(folder: Path) -> None:
    """Make the weights, which are written with mode 0600, readable for every user."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    start = time.perf_counter()
    torch.set_num_threads(arguments.threads)
    build_base(arguments.output, arguments.seed)
    make_readable(arguments.output)
    print(f"public model: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
