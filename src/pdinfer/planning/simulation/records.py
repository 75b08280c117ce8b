"""From a simulated request to the record that a bench makes of a real one."""

from __future__ import annotations

from pdinfer.bench.record import Record
from pdinfer.planning.simulation.deployment import Cluster
from pdinfer.planning.simulation.job import Job


def record_of(job: Job, cluster: Cluster) -> Record:
    """Return the record of a request. What is made while the host stalls is read when it goes on."""
    made: list[float] = []
    read: list[float] = []
    for spell in job.spells:
        if spell.landed_s is not None:
            made.append(spell.landed_s)
            read.append(spell.told_s)
        steps = spell.ends[spell.start : spell.stop]
        made += steps
        read += steps
    if job.accepted_s:
        made, read = sorted([*made, *job.accepted_s]), sorted([*read, *job.accepted_s])
    for stall in cluster.stalls:
        until_s = stall.at_s + stall.for_s
        read = [until_s if stall.at_s <= at_s < until_s else at_s for at_s in read]
    return Record(
        request_id=f"simulated-{job.number}",
        intended_s=job.intended_s,
        sent_s=job.sent_s,
        prompt_tokens=job.asked.prompt_tokens,
        outcome=job.outcome,
        error=job.error,
        chosen_s=job.chosen_s,
        granted_s=job.granted_s,
        prefill_began_s=job.began_s,
        prefill_ended_s=job.prefilled_s,
        last_byte_s=job.last_byte_s,
        committed_s=job.committed_s,
        token_s=tuple(made),
        read_s=tuple(read),
        ended_s=job.ended_s,
        prefill=None if job.prefill < 0 else f"P{job.prefill}",
        decode=None if job.decode < 0 else f"D{job.decode}",
        score=job.score,
        cached_tokens=job.num_cached,
        num_draft_tokens=job.num_drafted,
        num_accepted_tokens=len(job.accepted_s),
        num_retries=job.num_retries + job.num_decodes_lost,
    )
