"""What carries frames and bytes between two ends. It knows nothing of rooms or requests. A new transport of ours is a
file or a folder here; yours may live anywhere. Either passes the suite: a test that subclasses `TransportSuite` of
tests/conformance/transport_suite.py, or `ProcessTransportSuite` when its ends may be in different processes.

    base.py       the seam: `Transport`, `Receiver`, `Link`, `Transfer`; what the transports here share
    loopback.py   inside one process
    socket.py     TCP and Unix sockets
    mooncake.py   the Mooncake Transfer Engine
    stream/       what the transports over stream sockets share; a new one between processes is a `Payloads` for it
    shm/          between processes of one host, through shared memory
    one_sided/    over any engine that writes into a peer's memory

To write one outside this package, read docs/howto/custom-transport.md, base.py and kv/memory.py; nothing else here is
needed.

Tested by tests/conformance/test_transport_conformance.py; Mooncake by tests/conformance/test_mooncake_transport.py.

May import: kv.copies, kv.fused, kv.layout, kv.memfd, kv.memory, process, the ground."""
