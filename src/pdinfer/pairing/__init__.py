"""Gives each request a prefill and a decode, and copes when one of them is lost.

    pairing.py    `Pairing`: what a host calls
    generating.py  the requests of one `generate`, and their events
    intake.py     the way in, the steps, and the events on their way out
    broker.py     what happens to its requests
    request.py    one request in a Pairing, and its attempts
    stopping.py   where it has to stop
    losses.py     the ports that it has lost, and whether it may go on
    relinking.py  other prefills for requests whose decode has lost the one it had
    queue.py      which requests wait, for how long, and which is next
    choosing.py   how a policy is asked for a pair, and what it is shown: loads, links, and pages that hold the prompt
    port.py       what an engine must offer
    ports.py      which ports there are, which are linked, which were lost and may come back
    promise.py    what a request would get from a pair, and the door that refuses what would come too late
    policy/       which pair takes a request: pure functions of loads and links
    health.py     whether it serves, and with all that it was given
    following.py  the ports are those that a directory names
    joining.py    how a new port is linked beside the running work, and which pairing has it
    leaving.py    how a port leaves, for good or to come back in the other role

May import: config, engine, execution, kv, model, process, scheduling, the ground."""
