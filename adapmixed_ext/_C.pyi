from typing import Any

cpu: Any  # the operators; csrc/bindings.h names their arguments
cuda: Any  # the same on a GPU; absent if with_cuda is false

with_cuda: bool
cuda_architectures: str
compiler: str
max_orders: int
max_logit: float

def instruction_set() -> str: ...
def use_instruction_set(name: str) -> bool: ...
def keystream(key: bytes, counter: int, first: int, count: int) -> bytes: ...
def normal_pair(a: int, b: int) -> tuple[float, float]: ...
