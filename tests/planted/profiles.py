"""Bugs in the published deployments, and in the address that peers are told."""

from __future__ import annotations

from tests.planted.mutant import Mutant

PROFILES = "test_profiles.py::"
ADDRESSES = "test_socket_transport.py::TestAddresses::"

MUTANTS = [
    Mutant(
        "a profile gives prefill what is decode's",
        'if setting.role == role or (setting.role == "both" and role in ("prefill", "decode")):',
        'if role in ("prefill", "decode") and setting.role != "host":',
        PROFILES + "test_the_h800_study_in_our_values",
    ),
    Mutant(
        "a profile forgets the variables of all settings but the last",
        "        environment |= setting.environment",
        "        environment = setting.environment or environment",
        PROFILES + "test_the_ascend_recipe_in_our_values",
    ),
    Mutant(
        "a profile counts data parallel ranks without the context parallel ones",
        'dp_size = size // (groups["tp_size"] * groups["cp_size"])',
        'dp_size = size // groups["tp_size"]',
        PROFILES + "test_a_profile_plans",
    ),
    Mutant(
        "a setting of a deployment is lost",
        '{"name": "--max-total-tokens"',
        '{"name": "--context-length"',
        PROFILES + "test_every_setting_of_a_deployment_is_named",
    ),
    Mutant(
        "a setting may say nothing",
        "if not (self.ours or self.environment or self.why):",
        "if not self.name:",
        PROFILES + "test_a_file_is_read_strictly",
    ),
    Mutant(
        "a value of a deployment changes and its docs do not",
        '"CacheConfig.mem_fraction_static": 0.79',
        '"CacheConfig.mem_fraction_static": 0.78',
        PROFILES + "test_the_docs_show_the_whole_table",
    ),
    Mutant(
        "peers are told the wildcard's name in spite of what is advertised",
        "    name = advertise or (socket.gethostname() if host in WILDCARDS else host)",
        "    name = socket.gethostname() if host in WILDCARDS else advertise or host",
        ADDRESSES + "test_peers_are_told_the_host_that_is_advertised",
    ),
]
