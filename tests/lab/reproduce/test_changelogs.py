"""Private text by author, from the change logs of Debian's packages."""

import gzip
from pathlib import Path

from adapmixed_lab.reproduce.kinds.changelogs import changelog_documents

LOG = """\
some-tool (1.2-3) unstable; urgency=medium

  [ Somebody Else ]
  * Say what is wrong
    on two lines.

  * Second.

 -- Ada Lovelace <ada@example.org>  Mon, 01 Jan 2024 00:00:00 +0000

some-tool (1.2-2) unstable; urgency=low, binary-only=yes

  * First.

 -- "Grace Hopper" <grace@example.org>  Sun, 31 Dec 2023 00:00:00 +0000

some-tool (1.2-1) unstable; urgency=low

  * Nobody has signed this.
"""


def write(folder: Path, package: str, text: str) -> None:
    (folder / package).mkdir()
    with gzip.open(folder / package / "changelog.Debian.gz", "wt", encoding="utf-8") as file:
        file.write(text)


def test_entries_by_author(tmp_path: Path) -> None:
    write(tmp_path, "tool", LOG)
    write(tmp_path, "libtool", LOG)  # built from the same source
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "changelog.Debian.gz").write_bytes(b"no gzip")
    found = [(one.identifier, one.text) for one in changelog_documents(tmp_path)]
    assert found == [
        ("Ada Lovelace", "[ Somebody Else ]\n* Say what is wrong\non two lines.\n* Second."),
        ("Grace Hopper", "* First."),
    ]


def test_no_author_has_more_than_a_part(tmp_path: Path) -> None:
    write(tmp_path, "tool", LOG + LOG.replace("First", "Other").replace("Say", "Write"))
    found = changelog_documents(tmp_path, most=30)
    sizes = {
        name: sum(len(one.text) for one in found if one.identifier == name)
        for name in ("Ada Lovelace", "Grace Hopper")
    }
    assert sizes["Ada Lovelace"] <= 30 and sizes["Grace Hopper"] == 16
    assert found[0].text == "[ Somebody Else ]"  # cut at a line's end


def test_a_machine_without_change_logs(tmp_path: Path) -> None:
    assert changelog_documents(tmp_path) == []
