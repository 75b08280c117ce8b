"""A program that runs models on a device called "npu", as torch_npu names it: a process knows one such name.

Nothing of it is an NPU. It shows that a model asks torch's module of its device, `torch.npu`, for all that it needs.
"""

from __future__ import annotations

import sys

import torch

import pdinfer as pd
from pdinfer.process import memory
from tests.device.test_devices import random_model_on, requests, served, served_on_cpu
from tests.device.test_tokens import CPU
from tests.e2e.drafts import check_equal
from tests.simulated import order
from tests.simulated.device import set_up
from tests.simulated.watch import Watch


def main(folder: str) -> None:
    set_up("npu")
    memory._page_locked = order.page_locked
    npu, tokens = torch.device("npu", 0), [3, 1, 4, 1, 5]
    here, there = (pd.load_model(folder, device=name, providers="torch") for name in ("cpu", "npu"))
    assert there.device == there.embed_VD.device == npu
    assert str(there.resolved.spec.device) == "npu"
    torch.testing.assert_close(there.logits(tokens).cpu(), here.logits(tokens))
    with Watch(everywhere=True) as watch:
        streams = served(random_model_on(npu), "tcp")
    assert watch.totals()["pinned"] > 0
    model = random_model_on(CPU)
    check_equal(model, requests(), streams, served_on_cpu(model))
    assert order.faults() == []


if __name__ == "__main__":
    main(sys.argv[1])
