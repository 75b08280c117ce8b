"""OpenAI's completions and chat completions, without HTTP: the body of a call becomes requests, and their events become
answers in the form that OpenAI's clients read. A host brings the server.

    call = pd.text.openai.Call.parse(body, tokenizer, is_chat=True, model="tiny", limit=pairing.max_tokens)
    for event in pairing.generate(call.requests):
        for chunk in call.push(event):
            print(chunk)

    call.py       a call of a client: from its body to requests, from events to answers
    body.py       what a body may say: served, of no consequence, or refused by name
    prompts.py    the prompts of a call
    messages.py   the messages of a chat, as templates expect them
    tools.py      tools, the choice among them, and calls that a schema makes
    options.py    what of a body becomes SamplingParams
    choice.py     one answer as far as it has come
    logprobs.py   log-probabilities, by token

May import: text.chat, text.dialects, text.stream, text.tiktoken, text.tokenizer, the ground.
"""

from __future__ import annotations

from pdinfer.text.openai.call import Call, error_answer, max_bytes

__all__ = ["Call", "error_answer", "max_bytes"]
