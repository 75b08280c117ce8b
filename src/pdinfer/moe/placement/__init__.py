"""Which slot of which rank holds which expert, in plain integers.

    placement.py    the placement, and the copy of an expert that a rank sends to
    replicas.py     the same as tables on the device
    recorder.py     how many tokens chose each expert
    files.py        the files of both that SGLang reads
    difference.py   what has to be copied from one placement to another

May import: checkpoint, the ground.
"""
