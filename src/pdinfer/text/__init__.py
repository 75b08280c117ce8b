"""Text around a Pairing, which knows tokens only. Needs `pip install 'pdinfer[text]'`, once something of it is used.

    tokenizer = pd.text.Tokenizer.load("checkpoint/")
    stop = pd.text.StopStrings(tokenizer, ["User:"])
    request = pd.Request(prompt=tokenizer.chat([{"role": "user", "content": "Hi"}]), stop=stop)
    text = pd.text.TextStream(tokenizer, request)
    for event in pairing.generate([request]):
        print(text.push(event), end="")

    openai/          OpenAI's completions and chats: from bodies to requests, from events to answers
    dialects/        reasoning and calls of tools in what models write
    stream.py        stop strings, and the text of a request as it may be shown
    detokenizer.py   text from tokens, one by one, without half characters
    tokenizer.py     tokenizer.json: tokens from text and from a chat
    tiktoken.py      tiktoken.model, as Moonshot's models have it
    markers.py       markers of turns that users must not write
    schema.py        answers that are JSON of a schema
    chat.py          the template that makes one text of a chat
    sandbox.py       where templates run
    files.py         what else the files of a model folder say about its text

May import: config, the ground.
"""

from __future__ import annotations

from pdinfer.stop import StopMatcher
from pdinfer.text import openai
from pdinfer.text.chat import ChatTemplate
from pdinfer.text.detokenizer import Detokenizer
from pdinfer.text.schema import json_schema, schema_processors
from pdinfer.text.stream import StopStrings, TextStream
from pdinfer.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "json_schema",
    "openai",
    "schema_processors",
]
