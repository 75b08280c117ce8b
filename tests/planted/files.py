"""Bugs in untrusted files, in what is compiled and cached, and in pages that a peer wrote."""

from __future__ import annotations

from tests.planted.mutant import Mutant

TRUST, HUB = "test_trust.py::", "test_hub_cache.py::"
AHEAD = "test_ahead.py::"
BUILD, SCRATCH = "test_native.py::", "test_scratch.py::"
HOSTILE = "test_hostile_files.py::"
FOUR = "test_four_bits.py::"
LIES = TRUST + "test_what_a_lying_prefill_wrote_is_found_by_no_request_of_another"

MUTANTS = [
    Mutant(
        "every request finds a page, whichever peer wrote it",
        'by_writer=config.trust_domain != "all",',
        "by_writer=False,",
        LIES,
    ),
    Mutant(
        "a request that changed its prefill keeps the keys of the first",
        "if chain.root != sequence.chain.root:",
        "if not sequence.chain.keys:",
        TRUST + "test_a_request_that_changes_its_prefill_leaves_what_the_first_wrote",
    ),
    Mutant(
        "pages in a pool that prefill shares belong to their writer",
        "writers = () if self._channel.shares_pool(sequence.writers) else sequence.writers",
        "writers = sequence.writers",
        TRUST + "test_prefills_that_use_decodes_own_pool_share_and_find_nothing_that_came_from_elsewhere",
    ),
    Mutant(
        "blobs that are a link are the cache's own",
        'yield cache / "blobs"',
        'yield (cache / "blobs").resolve()',
        HUB + "test_blobs_that_are_a_link_are_not_the_caches_own",
    ),
    Mutant(
        "any folder called snapshots belongs to a hub cache",
        'if snapshots.name == "snapshots" and cache.name.startswith("models--"):',
        'if snapshots.name == "snapshots":',
        HUB + "test_what_only_looks_like_a_hub_cache_is_none",
    ),
    Mutant(
        "a cached library is loaded unchecked",
        'content is None or path.stem.rpartition("-")[2] != digest(content)',
        "content is None",
        BUILD + "test_what_is_not_whole_is_built_anew",
    ),
    Mutant(
        "a header that changed makes no other library",
        """left += re.findall(r'^#include "([\\w./]+)"',""",
        """left += [] and re.findall(r'^#include "([\\w./]+)"',""",
        BUILD + "test_a_source_that_changes_makes_other_libraries_of_what_it_is_part_of",
    ),
    Mutant(
        "a library is loaded by a CPU that lacks its instructions",
        "(path for path in sets if not sets[path] & ~has)",
        "sets",
        BUILD + "test_without_a_compiler_one_that_was_built_for_this_cpu_will_do",
    ),
    Mutant(
        "a CPU takes the library with the fewest instruction sets that it has",
        "key=lambda path: -sets[path].bit_count()",
        "key=lambda path: sets[path].bit_count()",
        AHEAD + "test_the_best_is_taken_of_those_whose_instruction_sets_a_cpu_has",
    ),
    Mutant(
        "a library in an image is for the user who built it alone",
        "mode=0o755",
        "mode=0o700",
        AHEAD + "test_files_can_be_read_by_all_and_written_by_none_but_the_owner",
    ),
    Mutant(
        "build-kernels succeeds where a library was not built",
        "                status = 1\n",
        "                status = 0\n",
        AHEAD + "test_the_command_tells_what_was_built_for_which_instruction_sets",
    ),
    Mutant(
        "the doctor installs a compiler where a source of ours is wrong",
        'INSTALL if absent and REPORT not in reason else ""',
        "INSTALL",
        "test_doctor.py",
    ),
    Mutant(
        "the doctor overlooks a compiler that is too old",
        "if sets is not None and name in flags and name not in sets]",
        "if sets is not None and name in flags and name in sets and not sets]",
        "test_doctor.py",
    ),
    Mutant(
        "the compiler's first line is taken for its error",
        "line = errors[0] if errors else lines[0]",
        "line = lines[0]",
        BUILD + "test_what_the_compiler_says_is_told",
    ),
    Mutant(
        "an op is taken from a family that is not there",
        "    if reason := next(filter(None, map(build.library().why_not, kernels_of(op))), None):\n        return str(reason)\n",
        "",
        BUILD + "test_an_op_whose_family_is_lost_says_why_and_the_others_do_without",
    ),
    Mutant(
        "attention needs the products of its own kind",
        'return linear(x_TI, weight_OI) if build.serves("linear") else F.linear(x_TI, weight_OI)',
        "return linear(x_TI, weight_OI)",
        BUILD + "test_an_op_whose_family_is_lost_says_why_and_the_others_do_without",
    ),
    Mutant(
        "a compiler without memory is remembered as one that refuses the source",
        "if done.returncode == 1 and _OF_CODE.search(words) and",
        "if",
        BUILD + "test_a_failure_that_may_pass_is_not_remembered",
    ),
    Mutant(
        "a source that does not compile is compiled again in each process",
        "        os.replace(words, folder / words.name)\n",
        "",
        BUILD + "test_what_does_not_compile_is_not_compiled_in_vain",
    ),
    Mutant(
        "one family that does not compile costs all",
        "return kernels if kernels.libraries else",
        "return kernels if not kernels.reasons else",
        BUILD + "test_a_source_that_does_not_compile_costs_its_own_family",
    ),
    Mutant(
        "code is loaded from where others can write",
        "return status.st_uid != os.getuid() or _others_write(status)",
        "return status.st_uid != os.getuid()",
        BUILD + "test_a_folder_that_others_can_write_is_not_used",
    ),
    Mutant(
        "a scratch folder of a living process is removed",
        "            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            shutil",
        "            shutil",
        SCRATCH + "test_it_is_there_until_it_is_closed",
    ),
    Mutant(
        "what a config promises is not counted",
        "    if least > len(files.tensors) + MANY:",
        "    if False:",
        HOSTILE + "test_promises_are_counted_against_the_files_before_anything_is_made",
    ),
    Mutant(
        "a refused layout is listed as the other end sees it",
        "for name, theirs, ours in message.fields)",
        "for name, ours, theirs in message.fields)",
        "test_handshake.py::test_the_connecting_end_learns_every_difference",
    ),
    Mutant(
        "the first of two codes in a byte is the high half",
        "torch.stack((numbers & 15, numbers >> 4), -1)",
        "torch.stack((numbers >> 4, numbers & 15), -1)",
        FOUR + "test_packed_weights_are_those_of_the_twin",
    ),
    Mutant(
        "codes of INT4 have no sign",
        ".float().sub_(8)",
        ".float()",
        FOUR + "test_packed_weights_are_those_of_the_twin",
    ),
    Mutant(
        "codes of MXFP4 have no sign",
        "torch.cat((half, -half))[codes",
        "torch.cat((half, half))[codes",
        FOUR + "test_packed_weights_are_those_of_the_twin",
    ),
    Mutant(
        "a group has the scale of its neighbour",
        ".mul_(self.scale_floats()[..., None])",
        ".mul_(self.scale_floats().roll(1, -1)[..., None])",
        FOUR + "test_packed_weights_are_those_of_the_twin",
    ),
    Mutant(
        "a rank cuts a group of 32 in two",
        "    units = (1, GROUP)\n",
        "    units = (1, 1)\n",
        FOUR + "test_ranks_have_whole_groups",
    ),
    Mutant(
        "a part of the columns keeps the scales of the first ones",
        "    def columns(self, shard: Shard) -> Self:\n        return self.map(shard.columns)\n\n    def rows",
        "    def columns(self, shard: Shard) -> Self:\n"
        "        return self.map(lambda x: shard.columns(x) if x is self.numbers else x[..., : x.shape[-1] // shard.size])\n"
        "\n    def rows",
        FOUR + "test_a_part_of_the_columns_has_whole_groups",
    ),
    Mutant(
        "an expert moves without its scales",
        "sum(tensor.nbytes for tensor in tensors_of(weight))",
        "tensors_of(weight)[0].nbytes",
        FOUR + "test_a_moved_expert_brings_its_scales",
    ),
    Mutant(
        "what the shape of packed weights says is not compared",
        "!= list(self.shape(name)):",
        "is None:",
        FOUR + "test_files_that_mean_something_else_are_refused_by_name",
    ),
    Mutant(
        "a packed name that is ignored is read",
        'elif self.packed.ignores(base.removesuffix(".")):',
        "elif False:",
        FOUR + "test_a_name_that_is_ignored_and_packed_is_refused",
    ),
    Mutant(
        "zero points of packed weights are left out",
        "        for suffix in NEVER_PACKED:",
        "        for suffix in ():",
        FOUR + "test_files_that_mean_something_else_are_refused_by_name",
    ),
    Mutant(
        "a regular expression of a file may take for ever",
        "    if not plain or _PATTERN.fullmatch(text) is None:",
        "    if False:",
        FOUR + "test_a_config_that_means_something_else_is_refused",
    ),
    Mutant(
        "packed weights with another width of groups are read",
        '"group_size": 32, "symmetric": True, "dynamic": False}',
        '"symmetric": True, "dynamic": False}',
        FOUR + "test_a_config_that_means_something_else_is_refused",
    ),
    Mutant(
        "a tie between two codes goes to the odd one",
        "code = (code + tied)",
        "code = code",
        FOUR + "test_codes_are_the_nearest_and_a_tie_goes_to_the_even_one",
    ),
]
