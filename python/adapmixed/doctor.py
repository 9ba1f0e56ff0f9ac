"""What is installed, what was built, what is used: the text of ``adapmixed doctor``."""

import platform
from importlib import metadata


def report_lines() -> list[str]:
    """One ``name: value`` line per fact; nothing is changed and nothing is sent anywhere."""
    import torch

    import adapmixed
    import adapmixed_ext

    build = adapmixed_ext.build_info()
    lines = [
        f"adapmixed: {adapmixed.__version__}",
        f"python: {platform.python_version()} on {platform.system()} {platform.machine()}",
    ]
    for name in ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy"):
        lines.append(f"{name}: {metadata.version(name)}")
    lines += [
        f"compiler: {build['compiler']}",
        f"instruction set: {build['instruction_set']}",
        f"threads: {torch.get_num_threads()}",
        f"CUDA kernels: {'built' if build['cuda'] else 'not built'}",
        f"GPU: {_gpu()}",
        "randomness: ChaCha20, key from the operating system (os.urandom); "
        "--seed replaces it in evaluations",
    ]
    return lines


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none reachable by torch"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
