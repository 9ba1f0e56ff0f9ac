"""The engine of `adapmixed serve` over vLLM, for members that adapt the output layer alone.

`adapmixed serve --device vllm` starts it (docs/how-to/serve-with-vllm.md). Only `heads` can be
imported without vLLM. Importing `adapmixed` imports none of them.
"""
