"""Faults of training."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "nothing private in the open",
        "the line of a finished member tells its validation loss",
        "python/adapmixed/training/progress.py",
        'self.say(f"{name}: finished (',
        'self.say(f"{name}: {loss}, finished (',
        (
            "tests/commands/test_train_command.py::"
            "test_validation_losses_are_logged_for_the_operator_alone",
        ),
    ),
    Fault(
        "nothing private in the open",
        "other users can open a member's folder before its files are closed to them",
        "python/adapmixed/files.py",
        "    folder.mkdir(mode=0o700)\n",
        "    folder.mkdir()\n",
        ("tests/training/test_train.py::test_nobody_else_reads_a_member_before_it_is_published",),
    ),
    Fault(
        "resumable",
        "a member's folder appears before it is whole",
        "python/adapmixed/training/member.py",
        "        temporary = temporary_folder(folder)\n",
        "        folder.mkdir()\n        temporary = folder\n",
        ("tests/training/test_train.py::test_a_member_appears_whole",),
    ),
    Fault(
        "resumable",
        "training goes on with other settings",
        "python/adapmixed/training/folder.py",
        " and known.get(name) != given[name]:\n",
        " and name not in known:\n",
        ("tests/training/test_train.py::test_a_run_goes_on_with_the_same_only",),
    ),
    Fault(
        "shards are disjoint",
        "documents named by position are recorded as stable",
        "python/adapmixed/training/run.py",
        'document_names="positions" if run.corpus.positional else "stable",',
        'document_names="stable",',
        ("tests/training/test_train.py::test_the_manifest_says_what_names_documents",),
    ),
    Fault(
        "shards are disjoint",
        "documents are assigned to shards by their position",
        "python/adapmixed/training/shards.py",
        "(shard,) = assign_shards([document.identifier], num_shards, key=key)",
        "(shard,) = assign_shards([str(count)], num_shards, key=key)",
        ("tests/training/test_train.py::test_a_document_is_in_the_shard_of_its_name",),
    ),
)
