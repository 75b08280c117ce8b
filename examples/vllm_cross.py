"""One engine in vLLM, the other one here:
    python examples/vllm_cross.py MODEL --server http://127.0.0.1:8100 --kv tcp://127.0.0.1:7100 [--reverse]
vLLM prefills and this process decodes; with --reverse it is the other way. See docs/howto/inside-vllm.md."""

import argparse

import torch

import pdinfer as pd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="the folder of the checkpoint that vLLM serves")
parser.add_argument("--server", required=True, help="the URL of vLLM's server")
parser.add_argument("--kv", required=True, help="the `listen` of its connector")
parser.add_argument("--reverse", action="store_true")
parser.add_argument("--tokens", type=int, default=8)
arguments = parser.parse_args()

model = pd.load_model(arguments.model, device="cpu", dtype=torch.float32)
pool = pd.PagePool(model, pd.CacheConfig(num_pages=64))
channel = pd.KVChannel(pool, pd.kv.SocketTransport(), takes_offers=arguments.reverse)
server, kv = arguments.server, arguments.kv
if arguments.reverse:
    first = pd.PrefillEngine(model, channel)
    pairing = pd.Pairing(first, pd.adapters.vllm.connect_decode(first, kv=kv, server=server))
else:
    second = pd.DecodeEngine(model, channel)
    pairing = pd.Pairing(pd.adapters.vllm.connect(second, kv=kv, server=server), second)
sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=arguments.tokens, ignore_eos=True)
with pairing:
    for event in pairing.generate(pd.Request(prompt=range(5, 105), sampling=sampling)):
        print(event.token, event.finish_reason.value if event.finish_reason else "", event.error or "")
