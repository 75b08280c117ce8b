"""Engines: what `scheduling` decides is done here, with pages, a channel and a runner.

    prefill.py       `PrefillEngine`: prompts in, latents pushed, one hand-off for each
    decode.py        `DecodeEngine`: pages granted, hand-offs admitted, tokens out
    engine.py        what both engines share, also after a step that did not end
    sequence.py      one request in an engine: a command, then a prompt at prefill, a sequence at decode
    page_tables.py   the pages of the prompts or sequences in an engine, and the rooms of those that are granted
    shown.py         what an engine shows of its requests: a snapshot, and stages in its trace
    roles.py         how an engine changes its role
    experts.py       what a host may do with the experts of an engine
    ranks/           one engine in many processes

May import: config, execution, kv, model, moe, parallel, process, scheduling, the ground."""
