"""From documents to shards, from shards to adapters."""

from adapmixed.training.finetune import (
    FinetuneConfig,
    fit,
    save_adapter,
    shard_seed,
    token_blocks,
    token_stream,
    train_adapter,
)
from adapmixed.training.partition import assign_shards, partition_documents, shard_record

__all__ = [
    "FinetuneConfig",
    "assign_shards",
    "fit",
    "partition_documents",
    "save_adapter",
    "shard_record",
    "shard_seed",
    "token_blocks",
    "token_stream",
    "train_adapter",
]
