"""Digests of payloads that are computed while the bytes are copied, in C where a compiler is at hand.

    fused.py   copies and digests between memories that are known by their addresses
    fused.c    the loops

The digest is xxh3_64, that of the package xxhash, which is used where nothing is compiled.

Tested by tests/unit/kv/test_fused.py.

May import: process, the ground.
"""
