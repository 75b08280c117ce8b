"""Planted bugs in what tells weights apart, and in how two ends find where they differ."""

from __future__ import annotations

from tests.planted.mutant import Mutant

AGREEMENT = "test_agreement.py"
COMPARING = "test_comparing.py"
WEIGHTS = "test_weights.py"
LAYOUT = "kv/test_layout.py"
PARTS = f"{AGREEMENT}::test_ranks_that_read_parts_have_the_identity_of_one_that_reads_all"

MUTANTS = [
    Mutant(
        "of what a rank reads the last block has no digest",
        "blocks[indexes.start : indexes.stop] = words & _BITS_63",
        "blocks[indexes.start : indexes.stop - 1] = words[:-1] & _BITS_63",
        "test_reader.py::test_every_byte_of_a_tensor_is_in_a_digest",
    ),
    Mutant(
        "a rank that reads rows digests what it has of a block alone",
        "block = part if len(part) == stop - start else memoryview(bytearray(stop - start))",
        "block = part",
        PARTS,
    ),
    Mutant(
        "a block is digested before it is read",
        "            _read_into(descriptor, block, info, path, start)\n            digests.append(xxhash.xxh3_128_digest(block))\n",
        "            digests.append(xxhash.xxh3_128_digest(block))\n            _read_into(descriptor, block, info, path, start)\n",
        "test_reader.py::test_every_byte_of_a_tensor_is_in_a_digest",
    ),
    Mutant(
        "each rank has the identity of what it has read itself",
        "words = world.largest(torch.from_numpy(ours).to(device, copy=True)).cpu().numpy()",
        "words = ours",
        PARTS,
    ),
    Mutant(
        "ranks that have read other bytes go on",
        "if (first := min(first_R)) < len(ours):",
        "if (first := min(first_R)) < 0:",
        f"{AGREEMENT}::test_ranks_that_read_other_bytes_of_one_block_all_say_of_what_tensor",
    ),
    Mutant(
        "ranks that have read other bytes name the tensor in front of the one that differs",
        'np.searchsorted(borders, first, side="right")) - 1',
        'np.searchsorted(borders, first, side="left")) - 1',
        f"{AGREEMENT}::test_ranks_that_read_other_bytes_of_one_block_all_say_of_what_tensor",
    ),
    Mutant(
        "what was only looked at counts",
        "        if info.name in read:\n",
        "        if info.name in files.blocks:\n",
        f"{AGREEMENT}::test_only_what_was_read_counts",
    ),
    Mutant(
        "a scale is no part of what was read",
        "{part for name in destinations.places for part in self.stored.parts(name)}",
        "set(destinations.places)",
        f"{WEIGHTS}::test_one_bit_of_a_scale_is_found",
    ),
    Mutant(
        "an MTP layer is a part of the main model's identity",
        "main = [tensor for tensor in tensors if not tensor.name.startswith(layer)]",
        "main = tensors",
        f"{AGREEMENT}::test_an_mtp_layer_has_an_id_of_its_own",
    ),
    Mutant(
        "the dtype and shape of a tensor do not count",
        'hashlib.sha256(f"{self.name}\\n{self.form}\\n".encode() + self.digest)',
        'hashlib.sha256(f"{self.name}\\n".encode() + self.digest)',
        "test_identity.py::test_a_tensor_that_differs_changes_its_own_part_alone",
    ),
    Mutant(
        "eight bytes of an id count",
        "                yield name, value.hex()",
        "                yield name, value.hex()[:16]",
        f"{LAYOUT}::test_every_byte_of_an_id_counts",
    ),
    Mutant(
        "samples decide between ends that have read everything",
        "if is_sampled and not (self.weights_id and other.weights_id):",
        "if is_sampled:",
        f"{LAYOUT}::test_ids_of_weights_are_compared_where_they_say_something",
    ),
    Mutant(
        "samples are compared though both ends have read everything",
        'return {"sampled_weights_id"} if has_both else {"sampled_weights_id", "mtp_weights_id"}',
        'return set() if has_both else {"mtp_weights_id"}',
        f"{LAYOUT}::test_ids_of_weights_are_compared_where_they_say_something",
    ),
    Mutant(
        "an MTP layer that one end alone has read is a difference of weights",
        'if has_both else {"sampled_weights_id", "mtp_weights_id"}',
        'if has_both else {"sampled_weights_id"}',
        f"{LAYOUT}::test_ids_of_weights_are_compared_where_they_say_something",
    ),
    Mutant(
        "the last part that differs is looked into, and none that is in front of it",
        "next((digit for digit, ours, theirs in pairs if ours != theirs)",
        "next((digit for digit, ours, theirs in pairs if ours == theirs)",
        f"{COMPARING}::test_one_tensor_of_thousands_is_named_at_both_ends",
    ),
    Mutant(
        "a tensor that one end lacks is not told of",
        "for name in sorted(ours.keys() | theirs.keys())",
        "for name in sorted(ours.keys() & theirs.keys())",
        f"{COMPARING}::test_a_tensor_that_one_end_lacks_is_named",
    ),
    Mutant(
        "an end that has few tensors in a part takes some of the peer's many for all",
        "if message.digests or len(ours) > FEW_TENSORS:",
        "if message.digests:",
        f"{COMPARING}::test_few_against_thousands",
    ),
    Mutant(
        "a peer may tell of weights for ever",
        "if peer.num_compared > MAX_COMPARES or not",
        "if not",
        f"{COMPARING}::test_who_tells_of_weights_for_ever_loses_the_link",
    ),
    Mutant(
        "a peer may tell of weights that it was not asked for",
        "peer.num_compared > MAX_COMPARES or not (peer.dialled or peer.difference):",
        "peer.num_compared > MAX_COMPARES:",
        f"{COMPARING}::test_who_tells_of_weights_without_being_asked_loses_the_link",
    ),
    Mutant(
        "a peer that has said that its weights differ may say that they do not",
        "isinstance(message, wire.Hello | wire.Welcome) and peer.difference is None:",
        "isinstance(message, wire.Hello | wire.Welcome):",
        f"{COMPARING}::test_who_says_anything_else_during_the_search_loses_the_link",
    ),
    Mutant(
        "ends look for a tensor though they have other models",
        "return have_read and all(name in WEIGHTS_IDS for name, _, _ in error.fields)",
        "return have_read",
        f"{COMPARING}::test_ends_that_have_not_both_read_the_weights_of_one_model_are_refused_at_once",
    ),
]
