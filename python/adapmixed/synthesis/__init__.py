"""Private texts from prompts: each is drawn from a batch of records of its own."""

from adapmixed.synthesis.run import Synthesis, synthesize

__all__ = ["Synthesis", "synthesize"]
