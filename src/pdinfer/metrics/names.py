"""The metrics of pdinfer: names that dashboards rely on, so that a change of one is a change for hosts.

`docs/howto/observe.md` has them in a table, which a test compares with this one.
"""

from __future__ import annotations

import attrs

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

BUCKETS_S = (
    *(0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0),
    *(10.0, 20.0, 50.0),
    100.0,
)
"""The upper bounds of all histograms, in seconds."""

ENGINE = ("engine", "role")
PEER = ("engine", "peer")


@attrs.frozen
class Metric:
    """One family of series: its name, `kind` (counter, gauge or histogram), its labels in order, and what it means."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


TTFT = Metric(
    "pdinfer_time_to_first_token_seconds", HISTOGRAM, (), "From submit until decode had the first token of a request."
)
ITL = Metric(
    "pdinfer_inter_token_latency_seconds", HISTOGRAM, (), "Between two tokens of a request, as decode made them."
)
QUEUE_TIME = Metric("pdinfer_request_queue_seconds", HISTOGRAM, (), "What an ended request waited in queues.")
DURATION = Metric("pdinfer_request_duration_seconds", HISTOGRAM, (), "From submit until decode ended the request.")
PROMPT_TOKENS = Metric("pdinfer_prompt_tokens_total", COUNTER, (), "Tokens in the prompts of ended requests.")
CACHED_TOKENS = Metric(
    "pdinfer_cached_prompt_tokens_total",
    COUNTER,
    (),
    "Those of them that prefill found in its pages and did not compute.",
)
OUTPUT_TOKENS = Metric("pdinfer_output_tokens_total", COUNTER, (), "Tokens that were read.")
REFUSED = Metric(
    "pdinfer_requests_refused_total", COUNTER, ("code",), "Requests that submit refused, by the error's code."
)

ENDED = Metric("pdinfer_requests_ended_total", COUNTER, ("reason",), "Requests that ended, by the reason.")
QUEUED = Metric("pdinfer_requests_queued", GAUGE, (), "Requests for which no pair is chosen yet.")
UNFINISHED = Metric("pdinfer_requests_unfinished", GAUGE, (), "Requests that have not ended.")
RETRIES = Metric("pdinfer_request_retries_total", COUNTER, (), "Grants after the first one of a request at its decode.")
REROUTES = Metric("pdinfer_request_reroutes_total", COUNTER, (), "Requests that got another prefill.")
MOVED = Metric("pdinfer_requests_moved_total", COUNTER, (), "Requests that got another decode.")
PORTS = Metric("pdinfer_ports", GAUGE, ("role",), "Ports in use.")
PORTS_AWAY = Metric("pdinfer_ports_away", GAUGE, (), "Lost ports that may come back.")
PORTS_LOST = Metric("pdinfer_ports_lost_total", COUNTER, (), "Ports that were lost, each time that they were.")
LINKS_DOWN = Metric("pdinfer_links_down", GAUGE, (), "Pairs that are not chosen because their channels have no link.")

INFO = Metric("pdinfer_engine_info", GAUGE, ("engine", "role", "transport"), "1 for every engine in use.")
REQUESTS = Metric(
    "pdinfer_engine_requests", GAUGE, (*ENGINE, "state"), "Requests of an engine: queued; waiting, granted or running."
)
QUEUED_TOKENS = Metric("pdinfer_engine_queued_tokens", GAUGE, ENGINE, "Tokens that an engine has still to take up.")
PAGES = Metric("pdinfer_pages", GAUGE, (*ENGINE, "state"), "Pages of an engine's pool: free, cached or used.")
TOKENS = Metric("pdinfer_engine_tokens_total", COUNTER, ENGINE, "Tokens that an engine computed.")
BUSY = Metric("pdinfer_engine_busy_seconds_total", COUNTER, ENGINE, "Seconds in which an engine ran its model.")
STEP_AGE = Metric("pdinfer_engine_step_age_seconds", GAUGE, ENGINE, "Since the last step of an engine elsewhere.")
PREFIX_LOOKED_UP = Metric(
    "pdinfer_prefix_query_tokens_total", COUNTER, ENGINE, "Tokens looked up in an engine's pages."
)
PREFIX_FOUND = Metric("pdinfer_prefix_hit_tokens_total", COUNTER, ENGINE, "Those of them that were there.")
DRAFTED = Metric("pdinfer_draft_tokens_total", COUNTER, ENGINE, "Tokens that a decode's drafts proposed.")
ACCEPTED = Metric("pdinfer_accepted_tokens_total", COUNTER, ENGINE, "Those of them that were the model's own choice.")
DAMAGED = Metric("pdinfer_kv_writes_damaged_total", COUNTER, ENGINE, "Payloads that did not verify and were dropped.")

SENT = Metric("pdinfer_kv_sent_bytes_total", COUNTER, PEER, "KV bytes that an engine sent to a peer.")
RECEIVED = Metric("pdinfer_kv_received_bytes_total", COUNTER, PEER, "KV bytes that an engine received from a peer.")
SPEED = Metric(
    "pdinfer_kv_receive_bytes_per_second", GAUGE, PEER, "Average speed while payloads of a peer arrived; MB/s are 1e6."
)
INFLIGHT = Metric("pdinfer_kv_inflight_bytes", GAUGE, PEER, "Bytes pushed to a peer that have not left the pages yet.")
RELINKS = Metric("pdinfer_kv_link_retries_total", COUNTER, PEER, "Times that the link to a peer was opened again.")
DROPPED = Metric("pdinfer_kv_frames_dropped_total", COUNTER, PEER, "Frames of a peer that were dropped.")
LINKED = Metric("pdinfer_kv_link_up", GAUGE, PEER, "1 while the link to a peer is open, else 0.")

METRICS = (
    *(TTFT, ITL, QUEUE_TIME, DURATION, PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS, REFUSED),
    *(ENDED, QUEUED, UNFINISHED, RETRIES, REROUTES, MOVED, PORTS, PORTS_AWAY, PORTS_LOST, LINKS_DOWN),
    *(INFO, REQUESTS, QUEUED_TOKENS, PAGES, TOKENS, BUSY, STEP_AGE),
    *(PREFIX_LOOKED_UP, PREFIX_FOUND, DRAFTED, ACCEPTED, DAMAGED),
    *(SENT, RECEIVED, SPEED, INFLIGHT, RELINKS, DROPPED, LINKED),
)
"""All of them, in the order in which they are rendered."""
