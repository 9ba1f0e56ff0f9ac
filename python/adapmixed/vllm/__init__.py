"""Answer private queries inside vLLM, for ensembles whose members adapt the output layer alone.

`adapmixed vllm-config` prints the command that starts the server (docs/how-to/serve-with-vllm.md).
The classes that vLLM loads are

    adapmixed.vllm.gate.Gate                      in front of vLLM's HTTP server
    adapmixed.vllm.params.PrivateParams           second check of each request's parameters
    adapmixed.vllm.scheduler.ChargingScheduler    charges, durably, before a step is run
    adapmixed.vllm.worker.PrivateWorker           draws the tokens that were charged

Only the last three import vLLM. Importing `adapmixed` imports none of them.
"""
