"""Bugs in how values are shown, in what goes for token ids, and in the kinds of arguments."""

from __future__ import annotations

from tests.planted.mutant import Mutant

SHOWN, REQUEST, ARGUMENTS = (
    "test_values.py::",
    "test_request.py::",
    "test_arguments.py::",
)
REPRS = SHOWN + "test_reprs_are_short_and_touch_no_tensor"
REFUSED = REQUEST + "test_what_holds_no_token_ids_is_refused_when_the_request_is_made"

MUTANTS = [
    Mutant(
        "the repr of a value has no bound",
        """        if len(text) + len(part) > limit - len(", …)"):""",
        """        if False:""",
        REPRS,
    ),
    Mutant(
        "a value may be markup in a table",
        "<td>{escape(cell)}</td>",
        "<td>{cell}</td>",
        SHOWN + "test_a_table_of_stats_has_what_its_text_has",
    ),
    Mutant(
        "a table of a summary leaves out what failed",
        'return table((" ".join(name.strip(" :").split()), text) for name, text in self._rows())',
        'return table((name, text) for name, text in self._rows() if "CHECK" not in name)',
        SHOWN + "test_a_table_of_a_summary_has_what_its_text_has",
    ),
    Mutant(
        "a diagnosis is shown whole",
        'return f"Diagnosis({self._counts()}; print it to read the report)"',
        "return str(self)",
        SHOWN + "test_a_table_of_a_diagnosis_has_what_its_text_has",
    ),
    Mutant(
        "the repr of a value prints its tensors",
        "            text = _tensor(value) or (",
        "            text = (",
        REPRS,
    ),
    Mutant(
        "plain data holds NaN, which is no JSON",
        "            return value if math.isfinite(value) else None",
        "            return value",
        SHOWN + "test_errors_ranges_mappings_and_what_is_not_finite",
    ),
    Mutant(
        "a bool goes for a token id",
        "        if not isinstance(token, bool) and",
        "        if",
        REFUSED,
    ),
    Mutant(
        "a prompt of two dimensions is not seen",
        "        if given.ndim != 1:",
        "        if given.ndim > 2:",
        REFUSED,
    ),
    Mutant(
        "a class goes for its object",
        "        return lambda value: not isinstance(value, type) and all(",
        "        return lambda value: all(",
        ARGUMENTS + "test_the_mistakes_of_a_first_day",
    ),
    Mutant(
        "only the first of several arguments is checked",
        "itertools.cycle(rest)), args, strict=False)",
        "itertools.cycle(rest)), args[:1], strict=False)",
        ARGUMENTS + "test_wrong_arguments_are_told_with_call_name_kind_and_value",
    ),
    Mutant(
        "an engine computes into pages of another model",
        "        if channel.pool.layout.model_id != model.config.fingerprint:",
        "        if False:",
        ARGUMENTS + "test_an_engine_takes_an_open_channel_with_pages_of_its_own_model",
    ),
    Mutant(
        "all rooms are imported at once",
        'logging.getLogger("pdinfer").addHandler',
        'import pdinfer.pairing\nlogging.getLogger("pdinfer").addHandler',
        "test_architecture.py::test_import_loads_no_room_before_a_name_is_used",
    ),
]
