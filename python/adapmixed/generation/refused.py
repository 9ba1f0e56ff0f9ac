"""Error messages for generation options that would void the guarantee.

A charge pays for one token per query, drawn from the distribution that was projected and accounted.
An option may ask for another distribution, for a choice among tokens, or for the probabilities.
Then it raises with the reason, instead of an error about an unknown argument.
"""

from collections.abc import Mapping

NO_DRAW = (
    "the likeliest token of a private distribution is not a random draw. If it differs between "
    "neighbours, one answer tells them apart with certainty: an infinite Rényi divergence"
)
OTHERWISE = (
    "the token would be drawn from another distribution than the one that was projected and charged"
)

_REASONS = {
    "do_sample greedy": f"{NO_DRAW}. Every token is sampled, so leave it out",
    "num_beams num_beam_groups beam_search best_of early_stopping length_penalty "
    "diversity_penalty penalty_alpha constraints force_words_ids dola_layers use_beam_search": (
        "a search keeps what private probabilities rank highest: it is as deterministic as greedy "
        "decoding, and it looks at many tokens that were never charged"
    ),
    "output_scores output_logits output_hidden_states output_attentions return_dict_in_generate "
    "logprobs top_logprobs prompt_logprobs": (
        "a probability of the mixture is itself a function of the private data, without any "
        "noise. A charge pays for one token drawn from it and no more. The operator can use "
        "evaluate()"
    ),
    "top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty presence_penalty "
    "frequency_penalty no_repeat_ngram_size bad_words_ids suppress_tokens sequence_bias "
    "logit_bias logits_processor prefix_allowed_tokens_fn guidance_scale renormalize_logits "
    "generation_config top_h min_length min_new_tokens begin_suppress_tokens forced_bos_token_id "
    "forced_eos_token_id exponential_decay_length_penalty remove_invalid_values "
    "encoder_repetition_penalty encoder_no_repeat_ngram_size token_healing watermarking_config "
    "negative_prompt_ids negative_prompt_attention_mask min_tokens ignore_eos bad_words "
    "allowed_token_ids logits_processors response_format structured_outputs guided_json "
    "guided_regex guided_choice guided_grammar": (
        f"{OTHERWISE}. temperature and top_k reshape all rows before projection, with tokens that "
        "the public model alone chooses"
    ),
    "assistant_model assistant_tokenizer num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold is_assistant assistant_early_exit assistant_ensemble_weight "
    "assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size "
    "speculation_type use_mtp prediction": (
        "a draft is kept or thrown away by comparing private probabilities, so the text is not a "
        "single draw from the distribution that was charged. Each token is answered alone"
    ),
    "max_time": (
        "how long private models take would decide where the answer ends, and nothing pays for "
        "that. Use max_new_tokens, end tokens or stop strings"
    ),
    "num_return_sequences n": (
        "every sequence is a query of its own: repeat the prompt in input_ids, so that each is "
        "charged and returned"
    ),
    "seed generator": (
        "randomness comes from rng: SecureRandom(), or SeededRandom(seed) for tests and evaluation"
    ),
}
REASONS: Mapping[str, str] = {
    name: reason for names, reason in _REASONS.items() for name in names.split()
}
"""The reason why an option of another library raises, by its name."""
