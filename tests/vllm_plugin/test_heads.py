"""The private rows from the last hidden states: those of our own engine, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from head_ensembles import BASE, write_ensemble

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import Trunk
from adapmixed.vllm.heads import Heads

TOKENS = [5, 70, 900]


@pytest.fixture
def ensemble(tmp_path: Path) -> Ensemble:
    return Ensemble.from_pretrained(str(BASE), write_ensemble(tmp_path / "heads", 8))


@pytest.mark.parametrize("active", [None, 40])
def test_rows(ensemble: Ensemble, active: int | None) -> None:
    """Those of another context differ, as do public ones; the message does not say by how much."""
    hidden: list[torch.Tensor] = []
    handle = ensemble.output_layer.register_forward_pre_hook(lambda _, x: hidden.append(x[0]))
    private, public = (logits[..., -1, :] for logits in ensemble.logits(torch.tensor([TOKENS])))
    handle.remove()
    heads, last = Heads(ensemble, active), hidden[-1][0, -1:]
    found = heads.checked_rows(last, public, TOKENS)
    assert (found.tokens is None) == (active is None) and found.private.shape[0] == len(private)
    other = public.clone()
    other[0, public.argmin()] += 0.01  # of no member's active token
    for rows, tokens in ((public, TOKENS[:-1]), (other, TOKENS)):
        with pytest.raises(RuntimeError, match="must compute the rows of adapmixed's") as raised:
            heads.checked_rows(last, rows, tokens)
        assert not any(character.isdigit() for character in str(raised.value))


def test_what_it_refuses(ensemble: Ensemble) -> None:
    config = ensemble.config.get_text_config()
    config.logit_scale = 1.0
    Heads(ensemble, None)
    config.logits_scaling = 8.0
    with pytest.raises(ValueError, match="must not cap or scale its logits .*'logits_scaling': 8"):
        Heads(ensemble, None)
    ensemble.trunk = Trunk(head=None)
    with pytest.raises(ValueError, match="must have members that adapt the output layer alone"):
        Heads(ensemble, None)
