"""Which slot of which rank holds which expert, in plain integers.

    placement.py    the placement
    replicas.py     which copy of an expert a rank sends its tokens to, as tables on the device
    recorder.py     how many tokens chose each expert
    files.py        files of placements and counts, in SGLang's formats
    difference.py   what has to be copied to get from one placement to another

May import: checkpoint, the ground."""
