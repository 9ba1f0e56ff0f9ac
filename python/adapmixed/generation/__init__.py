"""Text in, private text out: prompts, chat templates, stop strings and streaming over decoding."""

from adapmixed.generation.generator import PrivateGenerator
from adapmixed.generation.text import left_padded, stop_rule

__all__ = ["PrivateGenerator", "left_padded", "stop_rule"]
