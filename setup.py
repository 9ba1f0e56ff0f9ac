import os

from setuptools import setup

# CMake's default is OFF: the CUDA kernels are built only when asked for.
asked = os.environ.get("ADAPMIXED_CUDA")

setup(
    cmake_source_dir=".",
    cmake_install_target="install",
    cmake_args=[f"-DADAPMIXED_CUDA={asked}"] if asked else [],
)
