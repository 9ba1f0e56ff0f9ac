"""A prompt with a record answers as transformers does behind the whole prompt, without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapmixed.ensemble.prompts import PromptEnsemble

pytestmark = pytest.mark.real

DESCRIBE = "a description of a city"
LONGEST = 48


def test_members_are_their_prompts(folder: Path, base: Any, paragraphs: list[str]) -> None:
    records = [paragraphs[0], paragraphs[1][:90], None]
    plain = "gemma3" in folder.name  # which has no chat template
    prompts = PromptEnsemble(folder, DESCRIBE, records=3, longest=LONGEST, plain=plain)
    ensemble, tokenizer = prompts.filled(records), prompts.tokenizer
    assert ensemble.cut == 1
    decoder = ensemble.decoder(torch.tensor([ensemble.opening]), new_tokens=2)
    more = tokenizer(" The", add_special_tokens=False).input_ids
    decoder.append(torch.tensor(more))
    private, public, _ = decoder.logits
    for row, record in zip((public, *private), (None, *records), strict=True):
        example = f"{DESCRIBE}:\n\n" if plain else "\n\nHere is an example:\n\n"
        most = LONGEST + len(tokenizer(example, add_special_tokens=False).input_ids)
        whole = tokenizer(example + (record or ""), add_special_tokens=False).input_ids
        shown = tokenizer.decode(whole[:most]) if record else ""
        if plain:
            text = f"{tokenizer.bos_token}{shown}{chr(10) * 2 * bool(record)}{DESCRIBE}:\n\n"
        else:
            asked = f"Write {DESCRIBE}. Answer with its text alone.{shown}"
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
            )
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, *more]
        with torch.no_grad():
            exact = base(torch.tensor([ids])).logits[0, -1]
        reach = float(exact[exact.isfinite()].max() - exact[exact.isfinite()].min())
        held = public.isfinite()
        assert float((row - exact)[0][held[0]].abs().max()) < 1e-4 * reach, record
