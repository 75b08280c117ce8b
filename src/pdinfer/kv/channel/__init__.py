"""The rules of a hand-off: who may write which pages, when they have landed, and what follows when a peer is lost.

    channel.py      one end of a channel: what engines call
    sender.py       prefill's side: accepts, pushes, finishes
    receiver.py     decode's side: expects, places, settles
    links.py        links to peers: dialled, kept alive, dialled again, dropped
    handshake.py    how a link opens
    greeting.py     what the messages of a handshake must say
    book.py         which links there are, and who is at the other end of each
    peer.py         the other end of one link
    rooms.py        a hand-off's two state machines: no I/O, no clock, no tensor
    coverage.py     which of a room's tokens were announced, and which have arrived
    tombstones.py   rooms that were aborted before their request came
    pushes.py       what was pushed, and which of our pages are still being read
    wire.py         the messages between two ends, and their bytes
    frame_mac.py    the tag behind each frame, without which no frame is accepted
    counters.py     what moved between this end and each peer
    snapshot.py     what a channel holds at one moment
    complaints.py   warnings that a stranger can cause, limited in number

May import: kv.layout, kv.memory, kv.pool, kv.transports, process, the ground.
"""
