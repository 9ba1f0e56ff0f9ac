"""The settings of vLLM under which every drawn token is charged and nothing private bypasses it."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.platforms import current_platform

from adapmixed.vllm.options import (
    PARAMS,
    SCHEDULER,
    VERSION,
    WORKER,
    Options,
    read_options,
)


def check_config(config: Any) -> Options:
    """Return the plugin's options, if vLLM's configuration can be served.

    Args:
        config: vLLM's `VllmConfig`.

    Raises:
        ValueError: the version is not the tested one, or an option is refused; the message names
            it.
    """
    if vllm.__version__.split("+")[0] != VERSION:
        raise ValueError(
            f"vllm must have the version {VERSION}, which adapmixed is tested with, got "
            f"{vllm.__version__}"
        )
    if not current_platform.is_cpu():
        raise ValueError(
            "--device must be the CPU: adapmixed is not tested with vLLM on other devices; "
            "'adapmixed serve' answers on a GPU"
        )
    options = read_options(config.additional_config)
    for option, wrong, why in _refused(config, options):
        if wrong:
            raise ValueError(f"{option} {why}")
    return options


def _refused(config: Any, options: Options) -> list[tuple[str, bool, str]]:
    """Return options of vLLM, whether each has a refused value, and what it must be."""
    model, parallel = config.model_config, config.parallel_config
    scheduler = config.scheduler_config
    one, none = "must be 1 with private answers", "cannot be used with private answers"
    return [
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size > 1, one),
        ("--data-parallel-size", parallel.data_parallel_size > 1, one),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size > 1, one),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size > 1, one),
        ("--api-server-count", parallel._api_process_count > 1, one),
        ("--enable-lora", config.lora_config is not None, none),
        ("--speculative-config", config.speculative_config is not None, none),
        ("--kv-transfer-config", config.kv_transfer_config is not None, none),
        ("--ec-transfer-config", config.ec_transfer_config is not None, none),
        ("--kv-events-config", _publishes(config.kv_events_config), none),
        ("--weight-transfer-config", config.weight_transfer_config is not None, none),
        ("--diffusion-config", config.diffusion_config is not None, none),
        ("--watermark-config", config.watermark_config is not None, none),
        (
            "--otlp-traces-endpoint",
            bool(config.observability_config.otlp_traces_endpoint),
            f"{none}: it exports the settings of every request",
        ),
        ("--reasoning-config", config.reasoning_config is not None, none),
        ("--quantization", model.quantization is not None, none),
        ("--runner", model.runner_type != "generate", "must be generate"),
        ("--model", model.is_multimodal_model, "must be a model of text alone"),
        (
            "--logprobs-mode",
            model.logprobs_mode not in ("raw_logprobs", "raw_logits"),
            "must be raw_logprobs or raw_logits",
        ),
        (
            "--generation-config",
            options.gate and model.generation_config != "vllm",
            "must be vllm: a folder's own settings would change what a request asks for",
        ),
        ("--async-scheduling", bool(scheduler.async_scheduling), none),
        ("--scheduler-cls", scheduler.scheduler_cls != SCHEDULER, f"must be {SCHEDULER}"),
        ("--worker-cls", parallel.worker_cls != WORKER, f"must be {WORKER}"),
        ("--worker-extension-cls", bool(parallel.worker_extension_cls), none),
        (
            "--logits-processors",
            list(model.logits_processors or ()) != [PARAMS],
            f"must be {PARAMS}",
        ),
        ("VLLM_USE_V2_MODEL_RUNNER", config.use_v2_model_runner, "must be 0"),
    ]


def _publishes(events: Any) -> bool:
    return events is not None and bool(events.enable_kv_cache_events)
