"""Ops in eager torch, for every device.

    provider.py    what is served
    products.py    products with weights, and what a card can multiply
    attention.py   attention, the choice of what it reads, and rows of pages
    flash.py       attention of many queries by torch's fused kernel for CPUs
    experts.py     experts, and the rows that go to them

Tested by tests/conformance/test_ops.py and the suites beside it.

May import: kernels.arguments, kernels.formats, kernels.reference, kernels.spec, the ground."""
