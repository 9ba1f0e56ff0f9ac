"""The settings of a `transformers.GenerationConfig` that a private generation can have.

A setting is honoured, or it concerns a pass that is not run, or it must be unset or at a value that
has no effect. A setting that this table does not know must be unset, too. So a setting that another
version of transformers adds raises and is never ignored.
"""

from __future__ import annotations

from typing import Any

from adapmixed.generation.refused import NO_DRAW, REASONS

HONOURED = frozenset(
    {
        "do_sample", "eos_token_id", "max_length", "max_new_tokens", "pad_token_id", "stop_strings",
        "temperature", "top_k",
    }
)  # fmt: skip
"""Settings that the ensemble follows: temperature and top-k before projection, and the ends."""

NOT_RUN = frozenset(
    {
        "bos_token_id", "compile_config", "continuous_batching_config", "decoder_start_token_id",
        "disable_compile", "low_memory", "max_cache_len", "prefill_chunk_size",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Settings without effect here: transformers' own model is not run, and the prompt is complete."""

# Values other than None and False at which a setting has no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "assistant_confidence_threshold": (0.4,),
    "assistant_early_exit": (),
    "assistant_ensemble_weight": (),
    "assistant_lookbehind": (10,),
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "cache_config": (),
    "cache_implementation": ("dynamic", "hybrid", "offloaded", "sliding_window", "static"),
    "constraints": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "early_stopping": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "is_assistant": (),
    "length_penalty": (1.0,),
    "max_matching_ngram_size": (),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0.0,),
    "no_repeat_ngram_size": (0,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "output_attentions": (),
    "output_hidden_states": (),
    "output_logits": (),
    "output_scores": (),
    "penalty_alpha": (0.0,),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (),
    "renormalize_logits": (),
    "repetition_penalty": (1.0,),
    "return_dict_in_generate": (),
    "sequence_bias": (),
    "speculation_type": (),
    "suppress_tokens": (),
    "target_lookbehind": (10,),
    "token_healing": (),
    "top_h": (),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "use_mtp": (),
    "watermarking_config": (),
}


def check_settings(config: Any) -> None:
    """Check that a private generation can have these settings.

    Raises:
        ValueError: it cannot; the message names the setting, its value, the allowed values and the
            reason.
    """
    if not config.do_sample:
        raise ValueError(
            f"do_sample must be True if tokens are private, got {config.do_sample}: pass "
            f"do_sample=True to generate(), because {NO_DRAW}"
        )
    # min_length last: transformers derives it from min_new_tokens, which the caller has set.
    for name, value in sorted(vars(config).items(), key=lambda item: item[0] == "min_length"):
        if name in HONOURED or name in NOT_RUN or name.startswith("_"):
            continue
        if value is None or value is False or value in NEUTRAL.get(name, ()):
            continue
        raise refused(name, value)


def refused(name: str, value: object) -> ValueError:
    """Return the error for one setting."""
    why = REASONS.get(
        name, "it is not known to leave the distribution of a token as it was charged"
    )
    allowed = " or ".join(map(repr, [None, *NEUTRAL.get(name, ())]))
    return ValueError(f"{name} must not be {value!r} if tokens are private, but {allowed}: {why}")
