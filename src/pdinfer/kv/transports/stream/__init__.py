"""Links over stream sockets: one I/O thread that listens, dials, reads and writes.

    transport.py    what a channel may ask for
    io_thread.py    the thread that serves every link in its turn
    connection.py   one socket as a link
    payloads.py     the part of a connection that moves payloads
    framing.py      how messages lie on the stream
    endpoints.py    endpoints as text, and their sockets
    door.py         how links that peers open come in, and who may wait before it is trusted

Tested by tests/conformance/test_socket_transport.py; door and turns by tests/unit/kv/transports.

May import: kv.layout, kv.memory, kv.transports.base, kv.transports.budget, process, the ground.
"""
