"""Run N adapters and their public model together: token ids in, logits out."""

from adapmixed.ensemble.batched_lora import BatchedLoRA, stack_adapters
from adapmixed.ensemble.decoder import Decoder
from adapmixed.ensemble.digests import base_files
from adapmixed.ensemble.ensemble import Ensemble
from adapmixed.ensemble.manifest import Manifest, read_manifest, write_manifest
from adapmixed.ensemble.member import Adapter, read_adapter

__all__ = [
    "Adapter",
    "BatchedLoRA",
    "Decoder",
    "Ensemble",
    "Manifest",
    "base_files",
    "read_adapter",
    "read_manifest",
    "stack_adapters",
    "write_manifest",
]
