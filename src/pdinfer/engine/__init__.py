"""What one engine decides: which requests enter, what runs in a step, and which sequence gives way.

    prefill.py       `PrefillEngine`: prompts in, latents pushed, one hand-off for each
    decode.py        `DecodeEngine`: pages granted, hand-offs admitted, tokens out
    engine.py        what both engines share
    commands.py      what a host asks of an engine between steps
    admission.py     which requests may enter, as pure functions
    schedule.py      the other decisions as pure functions
    prompt.py        one request in a prefill engine
    sequence.py      one request in a decode engine
    queue.py         which sequence gets pages next
    page_tables.py   the pages of the sequences in a decode engine
    experts.py       what a host may do with the experts of an engine
    interrupted.py   how an engine continues after a step that did not end
    ranks/           one engine in many processes

May import: config, execution, kv, model, moe, parallel, process, the ground.
"""
