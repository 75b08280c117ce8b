"""Reasoning and calls of tools in the text of models, in the markup of their makers.

    dialect = dialect_of(tokenizer)
    parser = dialect.parser(prompt_text, tools)
    for delta in parser.push(text):
        ...

    dialect.py     which dialect a checkpoint speaks
    parser.py      one answer, as its text comes: reasoning, content and calls, whose arguments may have to become JSON
    families.py    the dialects as data: how each is recognised, and its markers
    grammar.py     the form of that data: places in an answer, and what leads from one to another

A new dialect is a row in families.py. Where each comes from: docs/decisions/0059-what-models-say.md.

May import: text.chat, text.tokenizer, the ground.
"""

from __future__ import annotations

from pdinfer.text.dialects.dialect import Dialect, dialect_of, shows_tools
from pdinfer.text.dialects.parser import CallDelta, Delta, Parser, new_call_id

__all__ = ["CallDelta", "Delta", "Dialect", "Parser", "dialect_of", "new_call_id", "shows_tools"]
