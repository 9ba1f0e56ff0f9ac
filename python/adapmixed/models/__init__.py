"""N adapters and a public model: from token ids to logits."""

from adapmixed.models.adapters import Adapter, read_adapter
from adapmixed.models.batched_lora import BatchedLoRA, stack_adapters
from adapmixed.models.decoder import Decoder
from adapmixed.models.ensemble import Ensemble
from adapmixed.models.manifest import Manifest, read_manifest, write_manifest

__all__ = [
    "Adapter",
    "BatchedLoRA",
    "Decoder",
    "Ensemble",
    "Manifest",
    "read_adapter",
    "read_manifest",
    "stack_adapters",
    "write_manifest",
]
