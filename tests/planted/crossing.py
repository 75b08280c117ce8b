"""Bugs in what lets a vLLM be a port of a Pairing: its first token, its refusals, the probe, and what is turned away."""

from __future__ import annotations

from tests.planted.mutant import Mutant

PREFILL = "test_vllm_prefill.py::"
DECODE = "test_vllm_decode.py::"
PROMPTS = "test_vllm_prompts.py::"

MUTANTS = [
    Mutant(
        "the first token of a prompt whose grant comes later is lost",
        "            self._drawn[req_id] = token\n",
        "",
        f"{PREFILL}test_a_grant_that_comes_later_is_answered_with_the_token",
    ),
    Mutant(
        "a hand-off does not wait for its first token",
        "if save.first_token and token is None:",
        "if False:",
        f"{PREFILL}test_what_vllm_prefills_goes_on_here",
    ),
    Mutant(
        "what vLLM does not take is tried again",
        "        state.given_up = error\n",
        "",
        f"{PREFILL}test_what_vllm_does_not_take_ends_at_once_with_its_reason",
    ),
    Mutant(
        "the probe does not look at rotated keys",
        "                    yield layer, ROPE, ours[:, rank:], theirs[:, rank:]\n",
        "",
        f"{PREFILL}test_a_vllm_that_computes_something_else_is_refused",
    ),
    Mutant(
        "latents that are no numbers pass the probe",
        "(~(errors <= tolerance.error))",
        "(errors > tolerance.error)",
        f"{PREFILL}test_a_vllm_that_computes_something_else_is_refused",
    ),
    Mutant(
        "a vLLM that was restarted is not probed",
        "probed = peer if is_known else self._probe.check(self._kv, self._complete, self._key)",
        "probed = peer",
        f"{PREFILL}test_a_vllm_that_comes_back_wrong_is_refused",
    ),
    Mutant(
        "the output so far is penalized no more",
        "for token, count in Counter(output).items():",
        "for token, count in ():",
        f"{PROMPTS}test_the_output_so_far_is_a_part_of_the_prompt_and_penalized_as_before",
    ),
    Mutant(
        "vLLM waits for the prompt of a request that has ended here",
        '        turn_away(known.engine.channel, known.grant, RequestError("the request was ended"))\n        if grant.room',
        "        if grant.room",
        f"{DECODE}test_cancels_and_deadlines_end_once",
    ),
    Mutant(
        "prefill runs the token that vLLM computes itself",
        "prompt=self.request.tokens[:-1],",
        "prompt=self.request.tokens,",
        f"{DECODE}test_what_is_prefilled_here_goes_on_in_vllm",
    ),
]
