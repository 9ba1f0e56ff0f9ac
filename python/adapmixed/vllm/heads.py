"""The private rows of members that adapt the output layer alone, from the last hidden states.

The ensemble's output layer computes them, behind the logits of vLLM's public model.
"""

from __future__ import annotations

from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.ensemble import LOGIT_SCALES
from adapmixed.ensemble.output_layer import Logits, LogitsRoom
from adapmixed.limits import active_tokens


class Heads:
    """The output layers of N members.

    Args:
        ensemble: the members and the public model.
        active: K of the active vocabulary; None, or V and more, for all tokens.

    Raises:
        ValueError: members adapt more than the output layer, or the public model caps or scales its
            logits.
    """

    def __init__(self, ensemble: Ensemble, active: int | None) -> None:
        if ensemble.trunk.head is None:
            raise ValueError(
                "ensemble must have members that adapt the output layer alone inside vLLM: train "
                "them with --adapt head, or leave out --device vllm"
            )
        config = ensemble.config.get_text_config()
        for name in LOGIT_SCALES:
            value = getattr(config, name, None)
            if value not in (None, 1, 1.0):
                raise ValueError(
                    f"base must not cap or scale its logits inside vLLM: {name} = {value}"
                )
        self._layer, self._zero = ensemble.output_layer, ensemble.zero_members
        self._active = active_tokens(active, ensemble.vocab_size)
        self._room = LogitsRoom()

    def rows(self, hidden: Tensor, public: Tensor) -> Logits:
        """Return the logits of B positions. Their memory is used again once they are dropped.

        Args:
            hidden: (B, d) hidden states, as the output layer gets them.
            public: (B, V) logits of the public model.
        """
        self._layer.active, self._layer.room = self._active, self._room
        found = self._layer.behind(public[None], hidden[None])[0]
        return self._layer.split(found, self._zero)
