"""The metrics of pdinfer: names that dashboards rely on, so that a change of one is a change for hosts.

`docs/howto/observe.md` has them in a table, which a test compares with this one."""

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


TTFT = Metric("pdinfer_time_to_first_token_seconds", HISTOGRAM, (), "Time from submit to a request's first token.")
ITL = Metric(
    "pdinfer_inter_token_latency_seconds", HISTOGRAM, (), "Time between two tokens of a request, as decode made them."
)
QUEUE_TIME = Metric(
    "pdinfer_request_queue_seconds", HISTOGRAM, (), "Time that a request waited in queues, observed when it ends."
)
DURATION = Metric("pdinfer_request_duration_seconds", HISTOGRAM, (), "Time from submit to the end of a request.")
PROMPT_TOKENS = Metric("pdinfer_prompt_tokens_total", COUNTER, (), "Tokens in the prompts of ended requests.")
CACHED_TOKENS = Metric(
    "pdinfer_cached_prompt_tokens_total", COUNTER, (), "Prompt tokens served from prefill's cache, not computed."
)
OUTPUT_TOKENS = Metric("pdinfer_output_tokens_total", COUNTER, (), "Output tokens delivered to the host.")
REFUSED = Metric("pdinfer_requests_refused_total", COUNTER, ("code",), "Requests refused by submit, by error code.")

ENDED = Metric("pdinfer_requests_ended_total", COUNTER, ("reason",), "Requests that ended, by finish reason.")
QUEUED = Metric("pdinfer_requests_queued", GAUGE, (), "Requests waiting for a prefill and a decode to be chosen.")
UNFINISHED = Metric("pdinfer_requests_unfinished", GAUGE, (), "Requests submitted and not ended yet.")
RETRIES = Metric("pdinfer_request_retries_total", COUNTER, (), "Repeated grants of a request by the same decode.")
REROUTES = Metric("pdinfer_request_reroutes_total", COUNTER, (), "Moves of requests to another prefill.")
MOVED = Metric("pdinfer_requests_moved_total", COUNTER, (), "Moves of requests to another decode.")
PORTS = Metric("pdinfer_ports", GAUGE, ("role",), "Engines in use, by role.")
PORTS_AWAY = Metric("pdinfer_ports_away", GAUGE, (), "Lost engines that may come back.")
PORTS_LOST = Metric("pdinfer_ports_lost_total", COUNTER, (), "Losses of engines.")
LINKS_DOWN = Metric(
    "pdinfer_links_down", GAUGE, (), "Pairs of engines without a link between them, which are not chosen."
)

INFO = Metric(
    "pdinfer_engine_info",
    GAUGE,
    ("engine", "role", "transport"),
    "1 for each engine in use, with its role and transport.",
)
REQUESTS = Metric(
    "pdinfer_engine_requests",
    GAUGE,
    (*ENGINE, "state"),
    "Requests held by an engine, by state: queued at prefill; waiting, granted or running at decode.",
)
QUEUED_TOKENS = Metric("pdinfer_engine_queued_tokens", GAUGE, ENGINE, "Tokens waiting to be processed by an engine.")
RUNNING_TOKENS = Metric(
    "pdinfer_engine_running_tokens",
    GAUGE,
    ENGINE,
    "Tokens of context that a decode holds for requests that run or were granted.",
)
PAGES = Metric(
    "pdinfer_pages", GAUGE, (*ENGINE, "state"), "Pages of an engine's KV pool, by state: free, cached or used."
)
TOKENS = Metric("pdinfer_engine_tokens_total", COUNTER, ENGINE, "Tokens computed by an engine.")
BUSY = Metric("pdinfer_engine_busy_seconds_total", COUNTER, ENGINE, "Seconds that an engine spent running its model.")
STEP_AGE = Metric(
    "pdinfer_engine_step_age_seconds", GAUGE, ENGINE, "Seconds since the last step of an engine in another process."
)
PREFIX_LOOKED_UP = Metric(
    "pdinfer_prefix_query_tokens_total", COUNTER, ENGINE, "Prompt tokens looked up in an engine's prefix cache."
)
PREFIX_FOUND = Metric("pdinfer_prefix_hit_tokens_total", COUNTER, ENGINE, "Prefix-cache hit tokens.")
DRAFTED = Metric("pdinfer_draft_tokens_total", COUNTER, ENGINE, "Draft tokens proposed.")
ACCEPTED = Metric("pdinfer_accepted_tokens_total", COUNTER, ENGINE, "Draft tokens accepted.")
DAMAGED = Metric(
    "pdinfer_kv_writes_damaged_total", COUNTER, ENGINE, "KV payloads dropped because their digest was wrong."
)

SENT = Metric("pdinfer_kv_sent_bytes_total", COUNTER, PEER, "KV bytes sent to a peer.")
RECEIVED = Metric("pdinfer_kv_received_bytes_total", COUNTER, PEER, "KV bytes received from a peer.")
SPEED = Metric(
    "pdinfer_kv_receive_bytes_per_second",
    GAUGE,
    PEER,
    "Average rate at which KV arrives from a peer, over the time of its transfers.",
)
INFLIGHT = Metric("pdinfer_kv_inflight_bytes", GAUGE, PEER, "KV bytes queued for a peer and not sent yet.")
RELINKS = Metric("pdinfer_kv_link_retries_total", COUNTER, PEER, "Reconnections of the link to a peer.")
DROPPED = Metric("pdinfer_kv_frames_dropped_total", COUNTER, PEER, "Frames from a peer that were dropped.")
LINKED = Metric("pdinfer_kv_link_up", GAUGE, PEER, "1 while the link to a peer is open, else 0.")

METRICS = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
"""All of them, in the order in which they are rendered."""
