"""Serve private answers over HTTP: one engine, one queue, OpenAI's protocol."""
