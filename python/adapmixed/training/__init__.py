"""Divide documents into shards, and train one adapter per shard."""

from adapmixed.text import token_stream
from adapmixed.training.blocks import token_blocks
from adapmixed.training.finetune import AdapterTrainer, save_adapter, shard_seed
from adapmixed.training.run import TrainingRun, train_ensemble
from adapmixed.training.settings import FinetuneConfig
from adapmixed.training.shards import assign_shards, shard_record

__all__ = [
    "AdapterTrainer",
    "FinetuneConfig",
    "TrainingRun",
    "assign_shards",
    "save_adapter",
    "shard_record",
    "shard_seed",
    "token_blocks",
    "token_stream",
    "train_ensemble",
]
