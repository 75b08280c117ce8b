"""What a vLLM is told beside its checkpoint: two ends that were told other things are not one model."""

from __future__ import annotations

from collections.abc import Callable

from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import START_S, Engine, ready, until
from tests.vllm.runs import alone, handed_over

OVERRIDES = {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}}
Start = Callable[..., Engine]


def test_overrides_at_one_end_are_refused_by_name_and_at_both_served(start: Start) -> None:
    settings = {"more": {"hf_overrides": OVERRIDES}}
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings=settings, hold_s=1)
    plain = start("plain", "kv_consumer", policy="fail")
    alike = start("alike", "kv_consumer", settings=settings, policy="fail")
    ready(prefill, plain, alike)
    (prompt,) = prompts(1, seed=12)
    (theirs,), (ours,) = alone(plain, [prompt]), alone(alike, [prompt])
    assert theirs["logprobs"] != ours["logprobs"], "vLLM computes the same with these overrides and without"
    _, loads, _ = asks(prefill)
    plain.say(add="a", prompt=prompt, max_tokens=4, params=loads)
    until(lambda: "a" in plain.done, [plain], 30)
    assert plain.done["a"]["reason"] == "error"
    assert "model_id (a digest of the model's config): ours" in plain.log.read_text()
    assert "a part of the model's id, since no file says it" in prefill.log.read_text()
    together = handed_over(prefill, alike, "b", prompt, ours["tokens"][0])
    assert together == {what: ours[what] for what in together}


def test_weights_from_nowhere_end_at_start(start: Start) -> None:
    engine = start("dummy", "kv_consumer", settings={"more": {"load_format": "dummy"}})
    until(lambda: engine.child.poll() is not None, [engine], START_S)
    assert "load_format is 'dummy', which gives vLLM others; use one of auto" in engine.log.read_text()
