"""Bugs in what the tests themselves run, and in what they would leave out."""

from __future__ import annotations

from tests.planted.mutant import Mutant

PROVIDERS = "test_providers.py::test_a_provider_that_could_be_here_serves_what_it_offers"

MUTANTS = [
    Mutant(
        "kernels in C refuse what is not packed",
        'if op in ("mla_decode", "mla_absorbed", "mla_prefill") and spec.kv_format == "fp8":',
        'if op in ("mla_decode", "mla_absorbed", "mla_prefill") and spec.kv_format != "fp8":',
        PROVIDERS,
    ),
    Mutant(
        "of joined cases only the first runs",
        "for case in cases if few is None else spread(cases, *few):",
        "for case in cases[:1] if few is None else spread(cases, *few):",
        "test_joined.py::test_every_combination_runs_in_one_case",
        "tests/joined.py",
    ),
    Mutant(
        "a joined case keeps what the one before it patched",
        '                            given["monkeypatch"] = patch',
        '                            given["monkeypatch"] = pytest.MonkeyPatch()',
        "test_joined.py::test_what_one_case_patches_no_other_has",
        "tests/joined.py",
    ),
    Mutant(
        "a joined case that is skipped takes the others along",
        'pytest.fail(f"a joined case must not be skipped: {case}: {skipped}")',
        "del skipped",
        "test_joined.py::test_a_case_that_would_skip_the_others_fails",
        "tests/joined.py",
    ),
    Mutant(
        "make test leaves out what a page promises",
        'f"{pages} {planted}"',
        "planted",
        "test_tiers.py::test_every_promise_is_tested_each_time",
        "tests/tiers.py",
    ),
    Mutant(
        "make test leaves out what was asked for by name",
        "return config.args_source is pytest.Config.ArgsSource.TESTPATHS",
        "return True",
        "test_tiers.py::test_who_names_tests_gets_them",
        "tests/conftest.py",
    ),
]
