"""Gives each request a prefill and a decode, and copes when one of them is lost.

    pairing.py           `Pairing`: what a host calls
    admission.py         the way in: which request gets a place in the queue
    broker.py            what happens to its requests
    tracked_request.py   one request in a Pairing
    queue.py             which requests wait, which is next, and how a policy is asked for its pair
    ports.py             what an engine must offer, which ports are linked, which were lost and may come back
    policy.py            which pair takes a request: pure functions of loads and links
    joining.py           how a new port is linked beside the running work

May import: config, engine, execution, kv, model, process, the ground.
"""
