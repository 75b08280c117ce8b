"""What one engine decides: who enters, what runs in this step, who gives way.

    prefill.py       `PrefillEngine`: prompts in, latents pushed, a hand-off each
    decode.py        `DecodeEngine`: pages granted, hand-offs admitted, tokens out
    engine.py        what both share
    commands.py      what a host asks of one, between steps
    admission.py     which requests may enter, as pure functions
    schedule.py      the other decisions as pure functions
    prompt.py        one request in a prefill engine
    sequence.py      one request in a decode engine
    queue.py         which of its sequences has the next turn to get pages
    page_tables.py   the pages of its sequences
    experts.py       what a host may do with an engine's experts
    interrupted.py   how an engine goes on after a step that did not end
    ranks/           one engine in many processes

May import: config, execution, kv, model, moe, parallel, process, the ground.
"""
