"""The private rows of members that adapt the output layer alone, from the last hidden states.

They are computed as in `adapmixed.ensemble.output_layer`, by the same operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.output_layer import SPARE, Logits, LogitsRoom
from adapmixed.limits import active_tokens
from adapmixed_ext.inputs import likeliest

_CAPS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


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
        for name in _CAPS:
            value = getattr(config, name, None)
            if value not in (None, 1, 1.0):
                raise ValueError(
                    f"base must not cap or scale its logits inside vLLM: {name} = {value}"
                )
        layer = ensemble.output_layer
        assert layer.adapters is not None
        self._adapters, self._masked = layer.adapters, layer.masked
        self._zero, self._num_models = ensemble.zero_members, ensemble.num_models
        self._active = active_tokens(active, ensemble.vocab_size)
        self._room = LogitsRoom()

    def rows(self, hidden: Tensor, public: Tensor) -> Logits:
        """Return the logits of B positions. Their memory is used again once they are dropped.

        Args:
            hidden: (B, d) hidden states, as the output layer gets them.
            public: (B, V) logits of the public model.
        """
        if self._masked is not None:
            public = public.index_fill(-1, self._masked, -torch.inf)
        tokens = None if self._active is None else likeliest(public, self._active)
        start = public if tokens is None else public.gather(1, tokens)
        width = start.shape[1] + (0 if tokens is None else SPARE)
        private = self._room.take((self._num_models, len(public), width), public)
        private = private[..., : start.shape[1]]
        self._adapters.write(start, hidden, tokens, private)
        for member in self._zero:
            private[member] = start
        return Logits(private, public, tokens)
