"""The rules of a hand-off: who may write which pages, when they have landed, and what follows when a peer is lost.

    channel.py      one end of a channel: what engines call
    rooms.py        a hand-off's two state machines: no I/O, no clock, no tensor
    pushes.py       what was pushed, and what still reads our pages
    links.py        who is linked: dialled, greeted, heard, closed
    peer.py         the other end of one link
    greeting.py     what the messages of a handshake must say
    wire.py         the messages between two ends, and their bytes
    frame_mac.py    the tag behind each frame, without which none is taken
    counters.py     what moved between this end and each peer
    tombstones.py   rooms that were aborted before their request came
    complaints.py   warnings that a stranger can cause, and only so many of them
    recovery.py     how a channel goes on after an interrupt

May import: kv.layout, kv.pool, kv.transports, process, the ground.
"""
