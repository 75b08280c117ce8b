"""The process that pdinfer lives in: its forks, its locks, its memory, its temporary folders, and what it compiles or
records.

    compiled.py  C sources that are compiled for this machine on first use
    ahead.py     the same before they are needed, for CPUs by name
    compiler.py  the C compiler: its version, the instruction sets that it may use, and what its failures mean
    forked.py    what belongs to one process; a forked child may neither use nor end it
    locks.py     what a handler of a signal raises waits, and no lock stays closed after any other interrupt
    memory.py    how much memory a device has, and how much is in use; page-locked, huge and freed pages of the host
    modes.py     the modes in which we compute, whatever those of the host are
    recording.py  the calls of a CPU's step, recorded once and made again
    silence.py   how long a peer was silent, as far as this process was awake; one table of times
    scratch.py   temporary folders, and the removal of those whose process was killed
    streams.py   events, streams and graphs of the device that a model is on
    threads.py   threads of ours, of which a process may have no more, and those of torch's OpenMP
    untraced.py  what torch.compile leaves alone

Tested by tests/unit/process; forks by tests/e2e/test_fork.py, locks by tests/e2e/test_interrupts.py.

May import: the ground."""
