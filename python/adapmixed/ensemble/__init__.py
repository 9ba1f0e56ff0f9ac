"""Run N adapters and their public model together: token ids in, logits out."""

from adapmixed.ensemble.ensemble import Ensemble
from adapmixed.ensemble.members import Manifest, adapter_layers, read_manifest, write_manifest
from adapmixed.ensemble.public_model import base_files

__all__ = [
    "Ensemble",
    "Manifest",
    "adapter_layers",
    "base_files",
    "read_manifest",
    "write_manifest",
]
