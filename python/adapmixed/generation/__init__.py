"""Text in, private text out: the loop between two tokens, and prompts and chats around it."""

from adapmixed.generation.generator import PrivateGenerator

__all__ = ["PrivateGenerator"]
