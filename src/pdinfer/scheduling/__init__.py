"""What both engines decide, without tensors, channels, threads or clocks of their own.

    rules.py         the decisions as pure functions
    admission.py     which requests may enter, as pure functions
    costs.py         what steps take, learned from the steps themselves

May import: config, the ground.
"""
