"""Payloads that an engine writes into a peer's memory: each peer has a landing ring of its own, and never our pages.

    transport.py   frames over a stream, payloads over the engine
    ring.py        the landing ring at its receiver
    writer.py      its sender: one thread per link

May import: kv.layout, kv.memory, kv.transports.base, kv.transports.budget, kv.transports.message, process, the ground.
"""
