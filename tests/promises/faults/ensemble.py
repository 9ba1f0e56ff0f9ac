"""Faults of the ensemble: rows, vocabulary, memory, shards and provenance."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "row independence",
        "zeros are added to members of another rank",
        "python/adapmixed/ensemble/batched_lora.py",
        "kept = outputs.index_select(0, self.others) if len(self.others) else None",
        "kept = None",
        ("tests/ensemble/test_batched_lora.py::test_rows_of_other_ranks_are_not_even_added_zero",),
    ),
    Fault(
        "row independence",
        "the shared trunk depends on which members are present",
        "python/adapmixed/ensemble/ensemble.py",
        "self.trunk = find_trunk(model, adapted)",
        "self.trunk = find_trunk(model, merged_layers([one.layers for one in adapters]))",
        (
            "tests/ensemble/test_trunk.py::test_members_that_differ_cannot_be_missing_without_a_constant",
        ),
    ),
    Fault(
        "emptied is missing",
        "a missing member has no rows",
        "python/adapmixed/ensemble/parts.py",
        "adapters=[MISSING if path is None else read[path] for path in mine],",
        "adapters=[read[path] for path in mine if path is not None],",
        (
            "tests/ensemble/test_removed_member.py::test_a_removed_member_moves_no_bit_of_the_others",
        ),
    ),
    Fault(
        "emptied is missing",
        "the layers of a list depend on which members are present",
        "python/adapmixed/ensemble/adapted_layers.py",
        "        if other is not None:  # else",
        "        if None in paths and other is not None:  # else",
        (
            "tests/ensemble/test_trunk.py::test_members_that_differ_cannot_be_missing_without_a_constant",
        ),
    ),
    Fault(
        "emptied is missing",
        "the record of a missing member's shard is not read",
        "python/adapmixed/ensemble/shards.py",
        '        member = members[index] or f"missing member {index}"\n',
        "        member = members[index]\n        if member is None:\n            continue\n",
        ("tests/misuse/test_misuse_shards.py::test_records_of_missing_members_count",),
    ),
    Fault(
        "emptied is missing",
        "the names in the adapters are taken to verify the base",
        "python/adapmixed/ensemble/parts.py",
        (
            "            manifest is not None\n"
            "            and manifest.revision is not None\n"
            "            and is_hub_name(source)\n"
            "            and manifest.base_model == source\n"
        ),
        "is_hub_name(source) and all(name == source for name in names.values())\n",
        ("tests/misuse/test_misuse_public_model.py::test_a_public_model_from_the_hub_is_compared",),
    ),
    Fault(
        "emptied is missing",
        "every process has a public row of its own",
        "python/adapmixed/ensemble/forward.py",
        "            logits[0].copy_(self.ranks.same(logits[0]))\n",
        "            self.ranks.same(logits[0])\n",
        ("tests/ranks/test_ranks_trunk.py::test_ranks_answer_as_one_process",),
    ),
    Fault(
        "emptied is missing",
        "memory is counted for present members alone",
        "python/adapmixed/ensemble/forward.py",
        "return (self.ranks.held(self.num_models)[0] + 1) * batch",
        "return (self.ranks.held(self.num_models)[0] + 1 - len(self.zero_members)) * batch",
        (
            "tests/ensemble/test_removed_member.py::"
            "test_shapes_batches_and_errors_do_not_tell_who_is_missing",
        ),
    ),
    Fault(
        "emptied is missing",
        "an emptied member is computed in its own row",
        "python/adapmixed/ensemble/forward.py",
        "            logits[member + 1].copy_(logits[0])\n",
        "            assert logits[member + 1].shape == logits[0].shape\n",
        (
            "tests/ensemble/test_separation.py::test_zero_adapter_is_exact_where_rows_round_differently",
        ),
    ),
    Fault(
        "emptied is missing",
        "a missing member is computed in its own row",
        "python/adapmixed/ensemble/ensemble.py",
        "enumerate(adapters) if adapter.is_zero),",
        "enumerate(adapters) if adapter.updates and adapter.is_zero),",
        (
            "tests/ensemble/test_separation.py::test_zero_adapter_is_exact_where_rows_round_differently",
        ),
    ),
    Fault(
        "vocabulary mask",
        "the public row is not masked",
        "python/adapmixed/ensemble/forward.py",
        'logits.index_fill_(-1, self.masked_ids, float("-inf"))',
        'logits[1:].index_fill_(-1, self.masked_ids, float("-inf"))',
        ("tests/ensemble/test_vocabulary.py::test_ids_without_a_token_are_masked_in_every_row",),
    ),
    Fault(
        "vocabulary mask",
        "holes in the vocabulary are not masked",
        "python/adapmixed/ensemble/vocabulary.py",
        "    unnamed[named[named < vocab_size]] = False\n",
        "    unnamed[: len(named)] = False\n",
        ("tests/ensemble/test_vocabulary.py::test_ids_without_a_token_are_masked_in_every_row",),
    ),
    Fault(
        "bounded memory",
        "a chunk also takes the memory of the cache",
        "python/adapmixed/ensemble/forward.py",
        "return min(length, (memory_bytes - cache - fixed) // per_position)",
        "return min(length, (memory_bytes - fixed) // per_position)",
        ("tests/ensemble/test_ensemble.py::test_chunks_equal_the_whole",),
    ),
    Fault(
        "bounded memory",
        "the copy that an ended sequence leaves is not counted",
        "python/adapmixed/ensemble/forward.py",
        "        return sum(layers) + max(layers)\n",
        "        return sum(layers)\n",
        (
            "tests/ensemble/test_cache.py::test_a_decoder_has_room_for_all_that_was_counted_and_no_more",
        ),
    ),
    Fault(
        "shards are disjoint",
        "a person in two shards is not noticed",
        "python/adapmixed/ensemble/shards.py",
        "place, other = owner.setdefault(identifier, (index, member))",
        'place, other = owner.setdefault(f"{member} {identifier}", (index, member))',
        ("tests/misuse/test_misuse_shards.py::test_overlapping_shards_are_refused",),
    ),
    Fault(
        "shards are disjoint",
        "an empty list of identifiers proves that a shard is empty",
        "python/adapmixed/ensemble/shards.py",
        '        if not shard.get("identifiers"):',
        '        if shard.get("identifiers") is None:',
        ("tests/misuse/test_misuse_shards.py::test_records_that_show_nothing_prove_nothing",),
    ),
    Fault(
        "shards are disjoint",
        "identifiers hashed under different keys are compared",
        "python/adapmixed/ensemble/shards.py",
        "        elif key != first_key[0]:\n",
        "        elif key is None:\n",
        ("tests/misuse/test_misuse_shards.py::test_overlapping_shards_are_refused",),
    ),
    Fault(
        "provenance is checked",
        "only the first part of split weights is compared",
        "python/adapmixed/ensemble/digests.py",
        'sorted(set(_content(path).get("weight_map", {}).values()))',
        'sorted(set(_content(path).get("weight_map", {}).values()))[:1]',
        (
            "tests/misuse/test_misuse_public_model.py::test_a_public_model_of_other_weights_is_refused",
        ),
    ),
    Fault(
        "provenance is checked",
        "a public model without a digest counts as compared",
        "python/adapmixed/ensemble/provenance.py",
        "return Compared(bool(model_here) and model_here == model_expected, here == expected)",
        "return Compared(True, here == expected)",
        ("tests/misuse/test_misuse_public_model.py::test_another_tokenizer_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "only one file of a tokenizer is compared",
        "python/adapmixed/ensemble/provenance.py",
        "for name in sorted(found.keys() & recorded.keys()):",
        'for name in (found.keys() & recorded.keys()) - {"vocab.json", "merges.txt"}:',
        ("tests/misuse/test_misuse_public_model.py::test_another_tokenizer_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "the configuration of the public model is not compared",
        "python/adapmixed/ensemble/digests.py",
        "names = [CONFIG, *_weights(find), *TOKENIZER_FILES, *_versions(find)]",
        "names = [*_weights(find), *TOKENIZER_FILES, *_versions(find)]",
        ("tests/misuse/test_misuse_public_model.py::test_another_configuration_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "the file of weights that the configuration names is not hashed",
        "python/adapmixed/ensemble/digests.py",
        "for name in [named] if isinstance(named, str) else names:",
        "for name in names:",
        ("tests/misuse/test_misuse_public_model.py::test_another_configuration_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "a tokenizer for certain versions of transformers is not compared",
        "python/adapmixed/ensemble/digests.py",
        "*TOKENIZER_FILES, *_versions(find)]",
        "*TOKENIZER_FILES]",
        (
            "tests/misuse/test_misuse_public_model.py::"
            "test_a_tokenizer_for_a_version_of_transformers_is_compared",
        ),
    ),
    Fault(
        "provenance is checked",
        "a ledger goes on with the members in another order",
        "python/adapmixed/ensemble/provenance.py",
        "    for path in members:\n        if path is None:\n",
        "    for path in sorted(members, key=str):\n        if path is None:\n",
        (
            "tests/ensemble/test_ensemble_folder.py::test_a_fingerprint_is_of_the_members_in_their_order",
        ),
    ),
    Fault(
        "provenance is checked",
        "an adapter in the base's folder becomes part of the public model",
        "python/adapmixed/ensemble/public_model.py",
        '    if hasattr(model, "peft_config"):  # trans',
        "    if False:  # trans",
        ("tests/ensemble/test_ensemble_folder.py::test_a_base_folder_with_an_adapter_is_refused",),
    ),
    Fault(
        "provenance is checked",
        "processes that read different files run together",
        "python/adapmixed/ensemble/ensemble.py",
        '"what members share": ensemble.trunk, "all files": ensemble.fingerprint}',
        '"what members share": ensemble.trunk}',
        ("tests/ranks/test_ranks_commands.py::test_ranks_with_different_files_are_refused",),
    ),
    Fault(
        "provenance is checked",
        "a hub name without its commit counts as compared",
        "python/adapmixed/ensemble/parts.py",
        "            and manifest.revision is not None\n",
        "",
        ("tests/misuse/test_misuse_public_model.py::test_a_public_model_from_the_hub_is_compared",),
    ),
    Fault(
        "provenance is checked",
        "the settings of an adapter do not count in the fingerprint",
        "python/adapmixed/ensemble/provenance.py",
        "adapter_sha256(path / CONFIG_FILE)",
        '""',
        ("tests/ensemble/test_ensemble_folder.py::test_a_fingerprint_is_of_what_answers",),
    ),
    Fault(
        "shards are disjoint",
        "an adapter may have the record of an empty shard",
        "python/adapmixed/ensemble/parts.py",
        "    _check_records(manifest, paths, read)\n",
        "",
        (
            "tests/misuse/test_misuse_shards.py::"
            "test_a_guarantee_says_that_shards_were_not_verified",
        ),
    ),
)
