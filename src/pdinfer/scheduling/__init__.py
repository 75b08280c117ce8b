"""What both engines decide, without tensors, channels, threads or clocks of their own.

    decode.py        which request has pages next at decode, what runs in a step, and who gives way
    prefill.py       which prompt may start at prefill, and how many tokens of each run in a step
    rules.py         the decisions as pure functions, and what steps take, learned from the steps themselves
    admission.py     which requests may enter, as pure functions

May import: config, the ground."""
