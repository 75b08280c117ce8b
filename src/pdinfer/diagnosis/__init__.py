"""The problems of a machine, found before anything runs on it: `pd.doctor()`.

    doctor.py      one probe after the other
    software.py    versions, libraries, providers of ops, compiler and caches
    limits.py      memory that may be locked and shared, open files, local ports
    variables.py   the environment of NCCL, Gloo, NVSHMEM and Mooncake
    network.py     network cards, and which GPU they are near to
    affinity.py    the GPU of each rank, and on which of the CPUs near it the rank runs
    machine.py     all that is looked at, in one value
    report.py      facts and problems, as text and as JSON

May import: kernels, kv, process."""
