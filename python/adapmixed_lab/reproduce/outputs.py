"""The files of a result: JSON, CSV and figures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from adapmixed.files import write_file
from adapmixed_lab.reproduce.drawing import draw
from adapmixed_lab.reproduce.result import csv_text, write_result


def write_outputs(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write NAME.json, NAME.csv, and SVG and PDF of every figure; NAME is EXPERIMENT-DATASET.

    CSV and figures follow from the JSON alone. A figure's caption is its SVG's description.

    Returns:
        the paths of the files.
    """
    stem = f"{result['experiment']}-{result['inputs']['dataset']}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.csv"]
    write_result(result, paths[0])
    write_file(paths[1], csv_text(result).encode())
    for drawing in draw(result):
        name = stem + drawing.name.removeprefix(result["experiment"])
        start, rest = drawing.svg.split(">", 1)
        svg = f"{start}>\n <desc>{escape(drawing.caption)}</desc>{rest}\n"
        for suffix, content in ((".svg", svg.encode()), (".pdf", drawing.pdf)):
            paths.append(folder / f"{name}{suffix}")
            write_file(paths[-1], content)
    return paths
