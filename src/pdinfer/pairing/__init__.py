"""Who serves a request: a prefill and a decode for each, and what follows when one of them is lost.

    pairing.py           `Pairing`: what a host calls
    admission.py         the way in: who gets a place in the queue
    broker.py            what becomes of its requests
    tracked_request.py   one request in a Pairing
    queue.py             who waits, and whose turn it is
    ports.py             what an engine must offer, and who is linked to whom
    policy.py            which pair takes a request: pure functions of loads and links
    choice.py            what a policy is shown, and what becomes of its answer
    joining.py           how a new port is linked beside the running work
    lost_ports.py        what is told of ports that were lost, and which come back
    progress.py          what a step that did not end had done

May import: config, engine, execution, kv, model, process, the ground.
"""
