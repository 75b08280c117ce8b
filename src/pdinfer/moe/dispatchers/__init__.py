"""How rows reach experts on other ranks and come back. A new dispatcher is a file here and a row of `choose`; it passes
`tests/conformance/dispatch_suite.py`.

    base.py             the seam, and its form for one rank
    all_to_all.py       over the collectives of torch.distributed
    deep_ep.py          over DeepEP's kernels
    deep_ep_config.py   their tuned file
    choose.py           which of them a model gets

May import: config, kernels, parallel, the ground.
"""
