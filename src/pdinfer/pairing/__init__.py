"""Gives each request a prefill and a decode, and copes when one of them is lost.

    pairing.py           `Pairing`: what a host calls
    admission.py         the way in: which request gets a place in the queue
    broker.py            what happens to its requests
    tracked_request.py   one request in a Pairing
    queue.py             which requests wait, and which is next
    ports.py             what an engine must offer, and which ports are linked
    policy.py            which pair takes a request: pure functions of loads and links
    choice.py            what a policy is shown, and how its answer is used
    joining.py           how a new port is linked beside the running work
    lost_ports.py        the ports that were lost, and those that may come back
    progress.py          what an interrupted step had done

May import: config, engine, execution, kv, model, process, the ground.
"""
