"""One engine in many processes: one rank of a group decides, and the others do the same.

    ranks.py      an engine's place among its ranks
    lockstep.py   what all ranks agree on before a step of the model
    leader.py     a channel and a runner that act for a whole group
    follower.py   the other ranks of a group
    messages.py   what leaders and followers tell each other
    wakeup.py     how a rank that sleeps is woken

May import: execution, kv, model, moe, parallel, process, the ground."""
