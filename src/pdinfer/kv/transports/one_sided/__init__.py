"""Payloads that an engine writes into a peer's memory: into a landing ring of that one peer, never into our pages.

    transport.py   frames over a stream, payloads over the engine
    ring.py        the landing ring at its receiver
    block.py       memory that the engine reads and writes, on the host or on a device
    writer.py      its sender: one thread per link

Tested by tests/conformance/test_ring_transport.py.

May import: kv.copies, kv.layout, kv.memory, kv.transports.base, process, the ground."""
