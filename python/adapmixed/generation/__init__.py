"""Private text generation: the loop over tokens, and prompts and conversations around it."""

from adapmixed.generation.generator import PrivateGenerator

__all__ = ["PrivateGenerator"]
