"""Run one process, one model, one pool: the shortest way from a checkpoint to tokens.

python examples/01_one_process.py [CHECKPOINT]
"""

import sys
from pathlib import Path

from tiny_tasks import BOS, decode, encode

import pdinfer as pd

CHECKPOINT = Path(__file__).parent / "tiny"


def main(checkpoint: Path) -> None:
    prompts = [
        "set abc=48213; set xyz=7f0q; get abc=",
        "copy k3v9 > ",
        "calc 47+38=",
        "One summer Zoe found a blue lamp under a tree. She ",
    ]
    requests = [
        pd.Request(
            request_id=prompt,
            prompt=(BOS, *encode(prompt)),
            sampling=pd.SamplingParams(temperature=0, max_new_tokens=200, stop_token_ids=(ord(";"),)),
        )
        for prompt in prompts
    ]
    output: dict[str, list[int]] = {prompt: [] for prompt in prompts}
    with pd.Pairing.local(checkpoint) as pairing:
        for event in pairing.generate(requests):
            if event.token is not None:
                output[event.request_id].append(event.token)
            if event.finish_reason is not None:
                print(f"{event.request_id}{decode(output[event.request_id])}   [{event.finish_reason.value}]")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
