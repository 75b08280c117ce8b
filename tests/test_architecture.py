"""The repository keeps the rules of `tests/architecture.py`, and every rule can be broken."""

from __future__ import annotations

import statistics
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

import pdinfer
from tests import architecture as house
from tests.c_order import UNITS, c_order, read_c
from tests.repository import machine_paths, repository_files

ROOT = Path(__file__).parent.parent
LIBRARY = house.read_modules(ROOT, "src/pdinfer")
RULES = (house.layers, house.charters, house.libraries, house.unsafe, house.manners, house.sizes, house.tensors)


def fake(sources: dict[str, str]) -> list[house.Module]:
    """Modules that exist only here; a name that ends in "/" is a folder's `__init__.py`."""
    return [
        house.Module(name.rstrip("/"), text, f"{name.rstrip('/')}.py", is_folder=name.endswith("/"))
        for name, text in sources.items()
    ]


# ---- the repository ------------------------------------------------------------------------------------------------


# Both read the sources anew, so that their syntax trees, a million objects, are gone with the test.


def test_the_library_keeps():
    library = house.read_modules(ROOT, "src/pdinfer")
    complaints = [complaint for rule in RULES for complaint in rule(library)]
    assert not complaints, "\n".join(["", *complaints])


def test_sources_in_c_use_what_is_below_them():
    sources = read_c(ROOT / "src" / "pdinfer")
    complaints = c_order(sources)
    assert not complaints, "\n".join(["", *complaints])
    units = {f"{folder}/{unit}" for folder, rows in UNITS.items() for row in rows for unit in row}
    assert units == {path.rpartition(".")[0] for path in sources}


def test_examples_and_benchmarks_run_nothing_that_came_as_bytes():
    programs = [*house.read_modules(ROOT, "examples"), *house.read_modules(ROOT, "benchmarks")]
    complaints = house.unsafe(programs)
    assert not complaints, "\n".join(["", *complaints])


def test_no_file_names_a_folder_of_one_machine():
    complaints = machine_paths(repository_files(ROOT))
    assert not complaints, "\n".join(["", *complaints])


def test_no_test_file_is_too_long():
    long = {path: len(text.splitlines()) for path, text in repository_files(ROOT) if path.startswith("tests/")}
    assert not {path: lines for path, lines in long.items() if path.endswith(".py") and lines > 700}


def test_the_rules_see_the_sources():
    assert {"__init__", "errors", "types", "parallel.topology"} <= {module.name for module in LIBRARY}
    paths = {path for path, _ in repository_files(ROOT)}
    assert {"pyproject.toml", "src/pdinfer/errors.py", "tests/test_architecture.py"} <= paths


def test_every_rule_names_a_module_that_exists():
    rows = {f"{room}.{name}".strip(".") for room, order in house.ROOMS.items() for row in order for name in row}
    only = {name for rules in house.ONLY.values() for names in rules.values() for name in names}
    named = rows | only | house.ONLY.keys() | house.FORBIDDEN_IMPORTS.keys() | house.ENVIRONMENT_READERS
    assert not (named | house.LONGER.keys()) - {module.name for module in LIBRARY}


# ---- what `import pdinfer` does ------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


OPTIONAL = ("fastapi", "jinja2", "opentelemetry", "prometheus_client", "ray", "tokenizers", *house.HEAVY)


def test_import_loads_no_optional_library():
    # torch comes first, because what torch loads by itself is not ours.
    loaded = f"print(sorted((set(sys.modules) - before) & set({OPTIONAL!r})))"
    code = (
        f"import sys, torch; before = set(sys.modules); import pdinfer; {loaded}; "
        f"[getattr(pdinfer, name) for name in pdinfer.__all__]; {loaded}"
    )
    assert run_python(code).splitlines() == ["[]", "[]"]


def test_import_loads_no_room_before_a_name_is_used():
    loaded = "[name for name in sys.modules if name.startswith('pdinfer.')]"
    code = f"import sys, pdinfer; print({loaded}); pdinfer.ConfigError; print({loaded})"
    assert run_python(code).splitlines() == ["[]", "['pdinfer.errors']"]


@pytest.mark.full
def test_import_takes_little_longer_than_that_of_torch(record_property):
    code = (
        "import time; t0 = time.perf_counter(); import torch; t1 = time.perf_counter(); import pdinfer; "
        "t2 = time.perf_counter(); [getattr(pdinfer, name) for name in pdinfer.__all__]; t3 = time.perf_counter(); "
        "print(t1 - t0, t2 - t1, t3 - t2)"
    )
    times = zip(*(map(float, run_python(code).split()) for _ in range(3)), strict=True)
    torch_s, import_s, names_s = map(statistics.median, times)
    record_property(
        "information",
        f"`import torch` takes {torch_s:.2f} s, `import pdinfer` {import_s:.2f} s, its names {names_s:.2f} s more",
    )
    assert import_s <= torch_s / 5


def test_all_is_sorted_and_is_what_can_be_imported():
    names = pdinfer.__all__
    assert list(names) == sorted(set(names))
    assert [name for name in names if not hasattr(pdinfer, name)] == []
    assert set(dir(pdinfer)) == {*names, "__version__"}


# ---- what one request goes through ---------------------------------------------------------------------------------

MAX_ROOMS, MAX_MODULES, MAX_CALLS = 9, 51, 1700
"""Modules and calls are those outside `kernels`: which of them run there depends on the CPU. There were 1,400 to 1,460
calls, and 1,500 without kernels in C: how often the costs of steps are fitted depends on the time that steps take."""


def test_a_request_enters_few_rooms_and_modules_in_few_calls():
    """From `submit` until the first event: 12 tokens, prefill and decode in this process, the second such request."""
    calls: Counter[Path] = Counter()
    root = Path(pdinfer.__file__).parent

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(root):
            calls[path.relative_to(root)] += 1

    sampling = pdinfer.SamplingParams(max_new_tokens=4)
    with pdinfer.Pairing.local(ROOT / "examples" / "tiny") as pairing:
        [*pairing.generate([pdinfer.Request(prompt=tuple(range(3, 15)), sampling=sampling)])]
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            pairing.submit(pdinfer.Request(prompt=tuple(range(3, 15)), sampling=sampling))
            while not pairing.step():
                pass
        finally:
            sys.setprofile(before)
    rooms = {path.parts[0] for path in calls if len(path.parts) > 1}
    assert len(rooms) <= MAX_ROOMS, sorted(rooms)
    modules = {str(path): count for path, count in sorted(calls.items()) if path.parts[0] != "kernels"}
    assert 30 < len(modules) <= MAX_MODULES, modules
    assert 500 < sum(modules.values()) <= MAX_CALLS, modules


# ---- the rules can be broken ---------------------------------------------------------------------------------------

BROKEN = [
    # layers
    (house.layers, {"errors": "import pdinfer.types"}, "errors imports types, which is above it"),
    (house.layers, {"types": "def f():\n    from pdinfer.config import X"}, "which is above it"),
    (house.layers, {"kv.pool": "if TYPE_CHECKING:\n    from pdinfer import model"}, "imports model, which is above"),
    (house.layers, {"kv.pool": "from pdinfer import PagePool"}, "imports __init__, which is above it"),
    (house.layers, {"kernels.ops": "from ..parallel import groups"}, "imports parallel.groups, its neighbour"),
    (house.layers, {"kernels/": "from .. import parallel"}, "imports parallel, its neighbour"),
    (house.layers, {"kv.view": "from pdinfer.kernels.ops import Ops"}, "of kernels it may see nothing"),
    (house.layers, {"engine.prefill": "import pdinfer.engine.decode as d"}, "imports engine.decode, its neighbour"),
    (house.layers, {"kv.pool": "import_module('pdinfer.model')"}, "imports model, which is above it"),
    (
        house.layers,
        {"kv.transports.base": "from pdinfer.kv.channel import wire"},
        "imports kv.channel.wire, which is above it",
    ),
    (house.layers, {"kv.layout": "from pdinfer.kv.transports.stream import transport"}, "which is above it"),
    (
        house.layers,
        {"kv.channel.wire": "from pdinfer.kv.channel import links", "kv.channel.links": ""},
        "which is above",
    ),
    (house.layers, {"engine.ranks.leader": "import pdinfer.engine.engine"}, "imports engine.engine, which is above"),
    (house.layers, {"kv.pool": "from pdinfer.kv import PageMemory"}, "imports kv, the room it is in; import the file"),
    (
        house.layers,
        {"model.mla": "from pdinfer.kv import pool", "kv.pool": ""},
        "of kv it may see kv.layout and kv.view",
    ),
    (house.layers, {"model.block": "from pdinfer.kv import PagePool"}, "of kv it may see kv.layout and kv.view"),
    (house.layers, {"scheduling.rules": "from pdinfer.kv.pool import PagePool"}, "of kv it may see nothing"),
    (house.layers, {"scheduling.admission": "from pdinfer.kv.pool import PagePool"}, "of kv it may see nothing"),
    (house.layers, {"sidecar": ""}, "give 'sidecar' a row of 'the package' in ROOMS"),
    (house.layers, {"kv.sidecar": ""}, "give 'sidecar' a row of 'kv' in ROOMS"),
    (house.layers, {"errors.sidecar": ""}, "give 'errors' an order of its own in ROOMS"),
    (house.layers, {"engine.decode": "from pdinfer.sidecar import X"}, "pdinfer.sidecar, which has no place"),
    # charters
    (house.charters, {"moe/": "", "moe.layer": ""}, "moe.py does not tell what layer is"),
    (house.charters, {"moe/": '"""M.\n\n    layer.py   route\n"""'}, "moe.py tells of layer, which is not there"),
    (
        house.charters,
        {"moe/": '"""M.\n\n    a.py   a\n\nMay import: kernels, the ground.\n"""', "moe.a": "import pdinfer.files"},
        "moe.py may import kernels, and does not",
    ),
    (
        house.charters,
        {"moe/": '"""M.\n\n    a.py   a\n\nMay import: the ground.\n"""', "moe.a": "import pdinfer.kernels.ops"},
        "moe.py does not say that it may import kernels",
    ),
    # libraries
    (house.libraries, {"kernels.ops": "import triton.language as tl"}, "belongs to kernels.triton.*"),
    (house.libraries, {"model": "def f():\n    from mooncake.engine import X"}, "belongs to kv.transports.mooncake"),
    (
        house.libraries,
        {"weights": "from safetensors.torch import load_file"},
        "belongs to moe.placement.files, checkpoint.quantize, testing.models",
    ),
    (house.libraries, {"config": "import transformers"}, "belongs to tests"),
    (house.libraries, {"config": "import yaml"}, "a dependency that LIBRARIES does not know"),
    (house.libraries, {"moe.layer": "importlib.import_module('deep_ep')"}, "belongs to moe.dispatchers.deep_ep"),
    (house.libraries, {"scheduling.rules": "from torch import Tensor"}, "scheduling.rules must not import torch"),
    (house.libraries, {"scheduling.admission": "import torch"}, "scheduling.admission must not import torch"),
    (house.libraries, {"kv.channel.rooms": "import time"}, "kv.channel.rooms must not import time"),
    # unsafe
    (house.unsafe, {"remote": "import pickle"}, "imports pickle"),
    (house.unsafe, {"remote": "from cloudpickle import loads"}, "imports cloudpickle"),
    (house.unsafe, {"config": "x = eval(text)"}, "calls eval"),
    (house.unsafe, {"weights": "import torch as t\nt.load(path)"}, "calls torch.load"),
    (house.unsafe, {"weights": "from torch import load"}, "imports torch.load"),
    (house.unsafe, {"weights": "import numpy as np\nnp.load(path, allow_pickle=True)"}, "with allow_pickle"),
    (house.unsafe, {"weights": "open_it()(path, allow_pickle=flag)"}, "calls something with allow_pickle"),
    (house.unsafe, {"config": "import yaml\nyaml.load(text)"}, "calls yaml.load"),
    (house.unsafe, {"moe.x": "import torch.distributed as dist\ndist.all_gather_object(a, b)"}, "all_gather_object"),
    # manners
    (house.manners, {"model": "import os\nos.environ.get('X')"}, "touches os.environ"),
    (house.manners, {"model": "from os import getenv as g\ng('X')"}, "touches os.getenv"),
    (house.manners, {"model": "class PageManager: ..."}, "PageManager: manager says nothing"),
    (house.manners, {"model": "def load_impl(): ..."}, "load_impl: impl says nothing"),
    (house.manners, {"utils": ""}, "utils.py: utils says nothing"),
    (house.manners, {"model": "_CACHE: dict[str, int] = {}"}, "_CACHE is module-level state"),
    (house.manners, {"model": "seen = set()"}, "seen is module-level state"),
    (house.manners, {"model": "names = [1, 2]"}, "names is module-level state"),
    (house.manners, {"model": "from collections import defaultdict\nX = defaultdict(list)"}, "X is module-level state"),
    (house.manners, {"kv.pool": "class Pool:\n    def __init__(self, size, *, new=1): self.n = size"}, "not read new"),
    # tensors
    (house.tensors, {"model": "import torch\ntorch.zeros(3, device=device)"}, "torch.zeros names no dtype"),
    (house.tensors, {"model": "import torch\ntorch.tensor(x, dtype=kind)"}, "torch.tensor names no device"),
    # sizes
    (house.sizes, {"model": "x = 1\n" * 401}, "model.py has 401 lines, more than 400"),
    (house.sizes, {"model": "def f():\n" + "    x = 1\n" * 60}, "model.py:1 f has 61 lines, more than 60"),
    (house.sizes, {"model": "class A:\n" + "    x = 1\n" * 300}, "model.py:1 A has 301 lines, more than 300"),
    (house.sizes, {"model": "class A:\n" + "    def f(self): ...\n" * 31}, "model.py:1 A has 31 methods, more than 30"),
]


def test_a_rule_finds():
    found = [(sources, complaint, rule(fake(sources))) for rule, sources, complaint in BROKEN]
    assert not [case for case in found if len(case[2]) != 1 or case[1] not in case[2][0]]
    assert {rule for rule, _, _ in BROKEN} == {*RULES}


C_SOURCES = {
    "strips.h": '#include "vectors.h"\nextern const Way by_floats;\nvoid pack(int n);',
    "strips.c": '#include "strips.h"\nvoid pack(int n) {\n}\nconst Way by_floats = {0};',
    "few_rows.h": "i64 few_rows(const bf16 *x,\n             i64 n);",
    "pairs.c": '#include "few_rows.h"\ni64 few_rows(const bf16 *x,\n             i64 n) {\n}',
    "products.c": '#include "strips.h"\nEXPORT i64 linear(int n) {\n    return few_rows(x, n);\n}',
}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"vectors.h": '#include "strips.h"'}, "vectors.h includes strips.h of strips, which is not below it"),
        ({"parts.c": '#include "tiles.h"'}, "parts.c includes tiles.h of tiles, which is not below it"),
        ({"parts.h": '#  include "rows.h"'}, "parts.h includes rows.h of rows, which is not below it"),
        ({"vectors.h": "INLINE int f(void) {\n    pack(1);\n}"}, "vectors.h uses pack of strips"),
        ({"amx.h": "INLINE int f(void) { return &by_floats; }"}, "amx.h uses by_floats of strips"),
        ({"few_rows.h": "INLINE int f(void) {\n    few_rows(x, 1);\n}"}, "few_rows.h uses few_rows of pairs"),
        ({"rows.c": '#include "lanes.h"'}, "rows.c includes lanes.h of lanes, which is not below it"),
        ({"lanes.h": ""}, "lanes.h has no place: give 'lanes' a row in UNITS"),
        ({"vectors.h": "/* pack(1) is called by strips.c */\ni64 few_rows(void);"}, None),
    ],
)
def test_an_arrow_up_and_a_circle_are_found_in_c(changed, complaint):
    found = c_order({f"kernels/native/{name}": text for name, text in (C_SOURCES | changed).items()})
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"kernels/native/{complaint}")


def test_a_file_with_a_reason_may_be_longer_and_not_endless(monkeypatch):
    monkeypatch.setattr(house, "LONGER", {"kv.pool": "one object, as the reason says"})
    assert house.sizes(fake({"kv.pool": "x = 1\n" * 500})) == []
    assert house.sizes(fake({"kv.pool": "x = 1\n" * 501})) == ["kv.pool.py has 501 lines, more than 500"]


KEPT = [
    (house.layers, {"model.mla": "import torch\nfrom pdinfer.kv.view import View\nimport pdinfer.kernels.ops"}),
    (
        house.layers,
        {"kv.channel.links": "from pdinfer.kv import pool\nfrom . import wire", "kv.pool": "", "kv.channel.wire": ""},
    ),
    (
        house.charters,
        {"moe/": '"""M.\n\n    a.py   a\n\nMay import: kernels, the ground.\n"""', "moe.a": "import pdinfer.kernels"},
    ),
    (house.layers, {"__init__": "from pdinfer import kv\nfrom pdinfer.types import Request"}),
    (
        house.libraries,
        {"kernels.triton.mla": "import triton", "kv.pool": "import time, attrs", "model": "import torch"},
    ),
    (house.unsafe, {"model": "model.eval()\nimport json\njson.load(f)\nnp.load(f, allow_pickle=False)"}),
    (house.manners, {"parallel.topology": "import os\nos.environ['RANK']"}),
    (house.manners, {"__init__": "__all__ = ['a']", "errors": "BY_CODE = {x.code: x for x in X}\nNAMES = ('a',)"}),
    (house.manners, {"kv.pool": "class Pool:\n    def __init__(self, size, _old=1): super().__init__(size)"}),
    (house.sizes, {"model": "def f():\n" + "    x = 1\n" * 59}),
    (house.sizes, {"model": "class A:\n" + "    def f(self): ...\n" * 30 + "    x = 1\n" * 269}),
]


def test_a_rule_lets_pass():
    found = [(sources, rule(fake(sources))) for rule, sources in KEPT]
    assert not [case for case in found if case[1]]


def test_a_folder_of_one_machine_is_found():
    folder = f"/{'work'}/data"  # in two pieces, so that this file keeps the rule
    assert machine_paths([("a.md", f"fine\nsee {folder}")]) == [f"a.md:2 names a folder of one machine: see {folder}"]
    assert machine_paths([("a.md", f"https://host{folder} and docs{folder}, home{folder}")]) == []


def test_files_are_found_without_git(tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "made.py").write_text("x")
    (tmp_path / "kept.py").write_text("x")
    (tmp_path / "binary.bin").write_bytes(b"\0")
    assert list(repository_files(tmp_path)) == [("kept.py", "x")]
