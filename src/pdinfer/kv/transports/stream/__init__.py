"""Links over stream sockets: one I/O thread that listens, dials, reads and writes.

    transport.py    what a channel may ask for; how links that peers open come in
    io_thread.py    the thread that serves every link in its turn
    connection.py   one socket as a link
    framing.py      how messages lie on the stream, and how payloads travel
    endpoints.py    endpoints as text, and their sockets

Tested by tests/conformance/test_socket_transport.py; door and turns by tests/unit/kv/transports.

May import: kv.layout, kv.memory, kv.transports.base, process, the ground."""
