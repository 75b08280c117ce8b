"""How rows reach experts on other ranks and come back.

A new dispatcher is a file here and a branch in `choose`. It must pass `tests/conformance/dispatch_suite.py`.

    base.py             the seam, and its implementation for one rank
    all_to_all.py       over the collectives of torch.distributed, with rows in floats or INT8
    deep_ep.py          over DeepEP's kernels, by its first API
    deep_ep_elastic.py  by its second one
    deep_ep_limits.py   the sizes that both can carry, and the tuned file of the first
    choose.py           which dispatcher a model gets

Tested by tests/conformance/test_dispatch.py.

May import: config, kernels, parallel, process, the ground."""
