import os

from setuptools import setup

setup(
    cmake_source_dir=".",
    cmake_install_target="install",
    cmake_args=[f"-DADAPMIXED_CUDA={os.environ.get('ADAPMIXED_CUDA', 'AUTO')}"],
)
