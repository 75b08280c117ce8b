"""Hardware as data: what each part can do by its makers, and what of it kernels and networks were seen to reach.

    part.py               the file, and a part of it
    parts.json            parts, empirical factors and DeepEP's published times, each with source and date

May import: the ground.
"""

from __future__ import annotations

from pdinfer.planning.parts.part import Factors, Hardware, hardware

__all__ = ["Factors", "Hardware", "hardware"]
