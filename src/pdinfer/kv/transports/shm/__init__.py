"""Payloads between processes of one host: the receiver copies them out of the sender's memory.

    transport.py   `ShmTransport`, and the choice of a transport on one host
    sender.py      names pieces of a memfd, and waits until they are copied
    receiver.py    copies them, and checks them

Tested by tests/conformance/test_shm_transport.py and tests/conformance/test_shm_peers.py.

May import: kv.fused, kv.layout, kv.memfd, kv.memory, kv.transports.base, kv.transports.socket,
kv.transports.stream, process, the ground."""
