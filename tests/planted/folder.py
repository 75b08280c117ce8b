"""Planted bugs in what is taken of a model folder's text, in its templates, and in who may write markers of turns."""

from __future__ import annotations

from tests.planted.mutant import Mutant

CHAT = "text/test_chat.py::"
MARKERS = "text/test_markers.py::"
TOKENIZER = "text/test_tokenizer.py::"
TIKTOKEN = "text/test_tiktoken.py::"
V32 = "text/test_deepseek_v32.py::"
TEXT = MARKERS + "test_what_others_than_the_host_write_is_text"
PIECES = MARKERS + "test_a_marker_is_not_made_of_pieces"
LONG = CHAT + "test_a_template_has_so_much_of_its_threads_time"
BIG = CHAT + "test_a_template_makes_no_more_than_a_chat_can_need"

MUTANTS = [
    Mutant(
        "what a message leaves open vanishes before the template sees it",
        '                "messages": values["messages"],\n',
        '                "messages": [{k: v for k, v in m.items() if v is not None} for m in values["messages"]],\n',
        CHAT + "test_a_template_renders_as_in_transformers",
    ),
    Mutant(
        "users write markers of turns",
        "hidden = None if allow_markers else",
        "hidden = None if True else",
        TEXT,
    ),
    Mutant(
        "documents write markers of turns",
        '"documents": look(values["documents"])',
        '"documents": values["documents"]',
        MARKERS + "test_documents_and_what_is_inside_of_a_message_are_text",
    ),
    Mutant(
        "the host's own turns lose their markers",
        '            if message.get("role") in HOSTS:\n                return message\n',
        "",
        MARKERS + "test_turns_of_the_host_have_its_markers",
    ),
    Mutant(
        "a marker is made of pieces",
        ".union(self._edges(text))",
        "",
        PIECES,
    ),
    Mutant(
        "a marker is made of pieces that are trimmed",
        "for end in {len(text), len(text.rstrip())}:",
        "for end in {len(text)}:",
        PIECES,
    ),
    Mutant(
        "a marker is made of a template's text and a user's",
        "for begin in {0, len(text) - len(text.lstrip())}:",
        "for begin in ():",
        PIECES,
    ),
    Mutant(
        "only the first of two markers that overlap is seen",
        '(?={_any_of([text[1:] for text in texts])})"',
        '(?:{_any_of([text[1:] for text in texts])})"',
        MARKERS + "test_markers_that_overlap_are_text",
    ),
    Mutant(
        "a text is normalized after it was looked at",
        "if self._normalizer is not None and self._search",
        "if False and self._search",
        MARKERS + "test_a_text_that_becomes_a_marker_when_it_is_normalized_is_text",
    ),
    Mutant(
        "JSON of ASCII shows what stands for characters",
        "            text = text.replace(json.dumps(character)[1:-1], json.dumps(meant)[1:-1])\n",
        "",
        MARKERS + "test_documents_and_what_is_inside_of_a_message_are_text",
    ),
    Mutant(
        "a character that a chat has stands for another",
        'if f"{code:x}" not in taken)',
        "if code)",
        MARKERS + "test_characters_that_a_chat_has_stand_for_no_other",
    ),
    Mutant(
        "plain text that makes the marker itself is taken",
        "if forged := self._secrets.keys() & set(tokens) - ids.keys():",
        "if forged := set():",
        MARKERS + "test_a_tokenizer_that_makes_the_marker_of_plain_text_refuses_it",
    ),
    Mutant(
        "a text has two bos",
        "if wanted and token is not None and [token] != there else ()",
        "if wanted and token is not None else ()",
        TOKENIZER + "test_a_text_has_the_bos_and_the_eos_that_tokenizer_config_asks_for_once",
    ),
    Mutant(
        "tokens that tokenizer.json lacks are not added",
        "        _add(library, files.added_tokens)\n",
        "",
        TOKENIZER + "test_tokens_of_tokenizer_config_are_added_with_their_ids",
    ),
    Mutant(
        "an added token has the next free id, whatever the folder says",
        "for unused in range(free, index)]",
        "for unused in ()]",
        TOKENIZER + "test_tokens_of_tokenizer_config_are_added_with_their_ids",
    ),
    Mutant(
        "one id has two texts",
        "if library.token_to_id(token.text) != index or library.id_to_token(index) != token.text:",
        "if False:",
        TOKENIZER + "test_added_tokens_that_contradict_are_refused",
    ),
    Mutant(
        "the ids of config.json end answers beside those of generation_config.json",
        "            ends=frozenset(ending_ids(model, generation)),",
        "            ends=frozenset((*first, *last)),",
        TOKENIZER + "test_what_ends_an_answer_and_how_tokens_are_drawn_is_what_the_folder_says",
    ),
    Mutant(
        "do_sample false draws",
        'return {**found, "temperature": 0.0} if draws is False else found',
        "return found",
        TOKENIZER + "test_what_ends_an_answer_and_how_tokens_are_drawn_is_what_the_folder_says",
    ),
    Mutant(
        "a panic of the library ends its host's thread",
        '    if type(error).__name__ == "PanicException":\n',
        "    if False:\n",
        TOKENIZER + "test_a_panic_while_a_host_encodes_or_decodes_is_an_error",
    ),
    Mutant(
        "a folder of templates leads out of the model",
        "    if os.path.lexists(more):\n        inside(more, folder, CheckpointError, roots)\n",
        "",
        TOKENIZER + "test_links_lead_where_those_of_load_model_do",
    ),
    Mutant(
        "a process that is started does not know whose links to follow",
        "            trusted_roots=order.trusted_roots,\n",
        "",
        "remote/test_spawning.py::test_a_child_follows_links_where_the_host_says",
    ),
    Mutant(
        "merges are in the order in which tokens can be cut",
        "merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))",
        "merges[:0] = pairs",
        TIKTOKEN + "test_tokens_are_those_of_tiktoken",
    ),
    Mutant(
        "a word that is a token is made of others",
        '"merges": merges, "ignore_merges": True}',
        '"merges": merges}',
        TIKTOKEN + "test_tokens_are_those_of_tiktoken",
    ),
    Mutant(
        "Han characters are cut as letters",
        'r"[\\p{Han}]+",\n',
        'r"[\\p{Han}]",\n',
        TIKTOKEN + "test_texts_are_cut_as_the_maker_cuts_them",
    ),
    Mutant(
        "a few tokens have more merges than memory",
        "if len(merges) > MAX_MERGES * len(ranks):",
        "if False:",
        TIKTOKEN + "test_a_broken_file_is_refused",
    ),
    Mutant(
        "any quantization without a method is modelslim's",
        'method == "ascend" or (method is None and is_described)',
        'method in ("ascend", None)',
        "config/test_config.py::test_modelslim_says_its_scheme_in_quantization_config_too",
    ),
    Mutant(
        "templates are computed while they are compiled",
        'intercepted_binops = frozenset({"+", "*", "**", "%"})',
        "intercepted_binops = frozenset()",
        BIG,
    ),
    Mutant(
        "loops take any time",
        "        for item in items:\n            self.spend()\n            yield item\n",
        "        yield from items\n",
        LONG,
    ),
    Mutant(
        "calls and filters take any time",
        "        self.spend(len(made) if isinstance(made, Sized) and not isinstance(made, range) else 0)\n",
        "",
        LONG,
    ),
    Mutant(
        "texts are joined without end",
        "            self.spend(len(part))\n            kept.append(part)\n",
        "            kept.append(part)\n",
        BIG,
    ),
    Mutant(
        "texts are filled up to any width",
        "    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):\n",
        "    if False:\n",
        BIG,
    ),
    Mutant(
        "a nested template ends load with an error of Python's compiler",
        "        except Exception as error:  # nested deeper",
        "        except RecursionError as error:  # nested deeper",
        CHAT + "test_a_broken_template_is_refused_when_it_is_made",
    ),
    Mutant(
        "reasoning of earlier turns is shown again",
        "{%- if thinks and loop.index0 > ns.last -%}",
        "{%- if thinks -%}",
        V32 + "test_calls_results_and_reasoning_are_written_as_the_maker_writes_them",
        "src/pdinfer/text/deepseek_v32.jinja",
    ),
    Mutant(
        "a folder of V3.2 has no template",
        'if not templates and model.get("model_type") == "deepseek_v32":',
        "if False:",
        V32 + "test_a_folder_of_v32_without_a_template_has_this_one",
    ),
]  # fmt: skip
