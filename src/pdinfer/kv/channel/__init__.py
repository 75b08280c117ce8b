"""The rules of a hand-off: who may write which pages, when they have landed, and what follows when a peer is lost.

    channel.py      one end of a channel: what engines call
    sender.py       prefill's side: accepts, pushes, finishes; which of our pages are still being read
    receiver.py     decode's side: expects, places, settles
    links.py        links to peers: dialled, greeted, kept alive, dialled again, dropped; what weights differ
    book.py         which links there are, and who is at the other end of each
    peer.py         the other end of one link, and what moved between it and us
    offers.py       the grants that decodes send over links
    rooms.py        the rules of a room as state machines, without I/O, clock or tensor
    wire.py         the messages between two ends, their bytes, and the tag without which no frame is accepted
    snapshot.py     what a channel holds at one moment

May import: kv.layout, kv.memory, kv.transports, process, the ground."""
