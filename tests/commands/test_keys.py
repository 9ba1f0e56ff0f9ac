"""``adapmixed keys``: add, list and remove keys of clients."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from adapmixed.cli import main
from adapmixed.files import sole_writer
from adapmixed.serving.admission import read_keys


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also through a link: the server may have the file under another name than the operator."""
    file, link = tmp_path / "keys.json", tmp_path / "link.json"
    link.symlink_to(file)
    assert main(["keys", "add", str(link), "alice", "--tokens", "9", "--max-tokens", "3"]) == 0
    assert main(["keys", "add", str(file), "bob", "--requests-per-minute", "5"]) == 0
    alice, bob = capsys.readouterr().out.split()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert alice not in file.read_text() and len(alice) > 40
    written = json.loads(file.read_text())
    assert set(written["keys"][0]) == {"name", "sha256", "max_tokens", "tokens"}
    keys = read_keys(file)
    assert [key.name for key in keys] == ["alice", "bob"]
    assert (keys[0].tokens, keys[0].max_tokens, keys[1].requests_per_minute) == (9, 3, 5)
    assert main(["keys", "list", str(file)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "max_tokens", "tokens", "requests_per_minute"],
        ["alice", "3", "9", "-"],
        ["bob", "-", "-", "5"],
    ]
    for name, *limits in (["alice"], ["a b"], [""], ["x", "--tokens=0"], ["x", "--max-tokens=-1"]):
        assert main(["keys", "add", str(file), name, *limits]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    with sole_writer(file):
        for path in (file, link):
            assert main(["keys", "add", str(path), "carol"]) == 2
            assert main(["keys", "remove", str(path), "bob"]) == 2
    assert read_keys(file) == keys
    assert main(["keys", "remove", str(link), "alice"]) == 0
    assert read_keys(file) == keys[1:] and stat.S_IMODE(file.stat().st_mode) == 0o600
    capsys.readouterr()
    assert main(["keys", "remove", str(file), "alice"]) == 2
    assert "NAME must be that of a key in" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"keys.json", "link.json"}
