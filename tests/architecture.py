"""The rules of the house as data, and functions that find where sources break them.

A rule is a function from modules to complaints: sentences that name the file, the line and the way out. It reads
sources with `ast` and imports none of them. `tests/test_architecture.py` applies every rule to the repository, and to
small made-up sources that break it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import attrs

# The order inside each folder, top to bottom; "" is the package itself. A name is a file, or a folder. What stands in
# a row imports only rows below it, and its neighbours not at all. A file's `__init__` may import all of its folder.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "": (
        ("__init__", "__main__"),
        ("testing", "adapters"),
        ("planning",),
        ("bench", "metrics", "diagnosis", "aio"),
        ("pairing", "remote", "text"),
        ("engine",),
        ("execution",),
        ("model",),
        ("moe",),
        ("checkpoint", "layers", "scheduling"),
        ("kv",),
        ("config",),
        ("parallel", "kernels"),
        ("files", "trace", "inbox", "stats", "identity", "progress"),
        ("types",),
        ("process", "bounds", "stop", "checks"),
        ("values", "log"),
        ("errors",),
    ),
    "adapters": (("vllm",),),
    "adapters.vllm": (
        ("loading", "prefill", "decode"),
        ("connector", "port"),
        ("worker", "scheduler", "probe"),
        ("receiving", "sending"),
        ("settings", "prompts"),
        ("memory",),
        ("messages", "overrides"),
    ),
    "testing": (("models", "network"), ("links",), ("simulation",)),
    "bench": (
        ("plots",),
        ("compare", "search"),
        ("run", "formats"),
        ("summarize",),
        ("checks",),
        ("summary", "record"),
        ("load",),
        ("traces",),
    ),
    "bench.plots": (("requests", "runs"), ("plot",)),
    "metrics": (("recorder", "spans"), ("series",), ("names",)),
    "diagnosis": (
        ("doctor",),
        ("software", "limits", "variables"),
        ("network", "affinity"),
        ("machine",),
        ("report",),
    ),
    "planning": (
        ("profiles", "search", "advice"),
        ("calibration", "roofline"),
        ("cluster_plan", "measured", "traffic"),
        ("plan", "simulation"),
        ("rank_memory", "parts", "queues", "shapes"),
    ),
    "planning.simulation": (
        ("simulator",),
        ("switching",),
        ("view",),
        ("prefill", "decode"),
        ("tables", "links", "steps", "host"),
        ("engine",),
        ("job",),
        ("pages", "world", "deployment"),
    ),
    "pairing": (
        ("pairing",),
        ("leaving",),
        ("joining", "following", "generating"),
        ("intake",),
        ("broker",),
        ("relinking",),
        ("choosing", "queue"),
        ("ports", "request", "health"),
        ("port", "losses", "stopping", "promise"),
        ("policy",),
    ),
    "pairing.policy": (("traffic_aware",), ("by_load",)),
    "text": (
        ("openai", "schema"),
        ("stream", "dialects"),
        ("detokenizer",),
        ("tokenizer",),
        ("chat", "files", "markers", "tiktoken"),
        ("sandbox",),
    ),
    "text.openai": (("call",), ("prompts", "choice", "options"), ("messages", "tools", "logprobs"), ("body",)),
    "text.dialects": (("dialect",), ("families", "parser"), ("grammar",)),
    "remote": (
        ("spawning", "child"),
        ("served",),
        ("directory",),
        ("client", "orders", "shared_engine"),
        ("served_client", "line"),
        ("session",),
        ("messages", "orphan"),
    ),
    "remote.directory": (("announcing",), ("directory",), ("dialling",), ("handshake",), ("media",), ("announcement",)),
    "engine": (
        ("roles",),
        ("prefill", "decode"),
        ("engine", "shown"),
        ("experts", "page_tables"),
        ("sequence",),
        ("ranks",),
    ),
    "scheduling": (("decode", "prefill"), ("rules", "admission")),
    "engine.ranks": (("ranks",), ("follower",), ("leader",), ("lockstep",), ("messages", "wakeup")),
    "execution": (("warm_up",), ("runner",), ("resident",), ("drafting", "graphs"), ("sampling",)),
    "model": (
        ("load",),
        ("load_plan",),
        ("model",),
        ("mtp", "activations"),
        ("block",),
        ("attention",),
        ("mla",),
        ("dsa", "decode_rows"),
        ("batch", "cache", "destinations"),
    ),
    "moe": (("migration",), ("layer",), ("parallel", "balance"), ("dispatchers", "placement")),
    "moe.migration": (("rebalancing",), ("migration",), ("transfer",)),
    "moe.balance": (("__main__",), ("solver", "process"), ("exchange", "deepseek", "messages"), ("assignment",)),
    "moe.dispatchers": (
        ("choose",),
        ("deep_ep_elastic",),
        ("all_to_all", "deep_ep"),
        ("base",),
        ("deep_ep_limits",),
    ),
    "moe.placement": (("replicas", "recorder", "files", "difference"), ("placement",)),
    "checkpoint": (("quantize",), ("schemes",), ("reader",), ("header",)),
    "kv": (
        ("channel",),
        ("transports", "events"),
        ("pool", "view"),
        ("copies",),
        ("memory", "prefix", "memfd", "fused"),
        ("layout",),
        ("shapes",),
    ),
    "kv.channel": (
        ("channel",),
        ("links", "sender", "receiver"),
        ("book",),
        ("peer", "rooms", "offers"),
        ("wire", "snapshot"),
    ),
    "kv.transports": (
        ("mooncake", "shm"),
        ("socket", "one_sided"),
        ("stream", "loopback"),
        ("base",),
    ),
    "kv.transports.stream": (
        ("transport",),
        ("io_thread",),
        ("connection",),
        ("endpoints",),
        ("framing",),
    ),
    "kv.transports.shm": (("transport",), ("receiver",), ("sender",)),
    "kv.transports.one_sided": (("transport",), ("writer",), ("ring",), ("block",)),
    "config": (("options",), ("model",), ("hf",), ("packed",), ("fields",), ("families", "rope")),
    "parallel": (("topology",), ("groups", "slices")),
    "kernels": (
        ("resolve",),
        ("native", "triton", "deep_gemm", "flash_mla", "page_parts"),
        ("torch", "compositions", "hopper"),
        ("reference",),
        ("ops", "crossovers"),
        ("spec", "arguments"),
        ("formats",),
        ("draws",),
    ),
    "kernels.torch": (("provider",), ("attention", "experts"), ("products", "flash")),
    "kernels.formats": (
        ("strips", "weights", "int8", "cache_rows", "activations"),
        ("fp8", "four_bits"),
        ("floats",),
        ("format",),
    ),
    "kernels.native": (("ops",), ("attention",), ("products",), ("rows",), ("build",)),
    "kernels.triton": (
        ("provider",),
        ("products", "mla_prefill", "mla_sparse", "index_topk", "routing", "draws"),
        ("norms", "activations", "cache", "experts", "mla_decode"),
        ("tile_products", "filters", "tiles", "latent_parts"),
        ("product_kernel",),
        ("launch", "configs", "rounding"),
    ),
    "process": (
        ("ahead",),
        ("compiled", "forked", "modes"),
        ("compiler", "locks", "memory", "recording", "scratch", "silence", "streams", "threads", "untraced"),
    ),
}

GROUND = frozenset(
    {
        "__init__",
        "bounds",
        "checks",
        "errors",
        "files",
        "identity",
        "inbox",
        "log",
        "progress",
        "stats",
        "stop",
        "trace",
        "types",
        "values",
    }
)
"""The flat modules that any room may use, so that no charter names them."""

# Of a lower room, some see only a part, or nothing. The model reads pages through a view and does not know that a
# channel exists; compute and bytes do not know each other. A key is a module or a room.
_VIEW = frozenset({"kv.view", "kv.layout"})
ONLY: dict[str, dict[str, frozenset[str]]] = {
    "model": {"kv": _VIEW},
    "moe": {"kv": frozenset()},
    "checkpoint": {"kv": frozenset()},
    "layers": {"kv": frozenset()},
    "kv": {"kernels": frozenset(), "parallel": frozenset()},
    "config": {"kernels": frozenset(), "parallel": frozenset()},
    "scheduling": {"kv": frozenset()},
}

# Which modules (patterns) may import a library. One that is not here is a new dependency. Those with a narrow pattern
# are heavy or optional, and live behind that one adapter.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "attrs": ("*",),
    "msgspec": ("*",),
    "numpy": ("*",),
    "torch": ("*",),
    "xxhash": ("*",),
    "jinja2": ("text.sandbox",),
    "tokenizers": ("text.tokenizer", "text.markers"),  # the second for its types alone
    "deep_ep": ("moe.dispatchers.deep_ep",),
    "deep_gemm": ("kernels.deep_gemm",),
    "flash_mla": ("kernels.flash_mla",),
    "llguidance": ("text.schema",),
    "matplotlib": ("bench.plots.*",),
    "mooncake": ("kv.transports.mooncake",),
    "opentelemetry": ("metrics.spans",),
    "prometheus_client": (),  # the parser that tests give our text to
    "safetensors": (
        "moe.placement.files",
        "checkpoint.quantize",
        "testing.models",
    ),  # only to write: `checkpoint.reader` reads the files itself
    "transformers": (),  # the independent implementation that tests compare with
    "triton": ("kernels.triton.*",),
    "vllm": ("adapters.vllm.loading",),
    "xgrammar": ("text.schema",),
}
HEAVY = tuple(library for library, users in LIBRARIES.items() if users != ("*",))

# Accounting and decisions hold no tensor, so they run in a simulator and are tested without one.
FORBIDDEN_IMPORTS: dict[str, frozenset[str]] = {
    "kv.channel.rooms": frozenset({"torch", "socket", "threading", "time", "os"}),
    "kv.pool": frozenset({"torch"}),
    "kv.prefix": frozenset({"torch", "threading", "time", "os"}),
    "moe.balance": frozenset({"torch"}),
    "moe.placement": frozenset({"torch"}),
    "moe.placement.recorder": frozenset(),
    "moe.placement.replicas": frozenset(),
    "engine.page_tables": frozenset({"torch"}),
    "pairing": frozenset({"torch"}),
    "parallel.slices": frozenset({"torch"}),
    "scheduling": frozenset({"torch", "threading", "time", "os", "socket"}),
}
"""By room or module; what is said of a module counts instead of what is said of its room."""

# What runs code, or builds objects, from bytes.
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"})
UNSAFE_CALLS = frozenset(
    {"eval", "exec", "torch.load", "torch.serialization.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
    | {
        f"torch.distributed.{module}{name}"
        for module in ("", "distributed_c10d.")
        for name in (
            "all_gather_object",
            "broadcast_object_list",
            "gather_object",
            "recv_object_list",
            "scatter_object_list",
            "send_object_list",
        )
    }
)

# `topology` discovers ranks. `process.compiled` asks where caches belong, `process.compiler` turns off translations.
# `triton.provider` asks whether Triton interprets kernels. DeepEP's queues are as long as NVSHMEM_QP_DEPTH says, and a
# variable keeps its second API from recording streams. The Mooncake engine is configured by its environment alone,
# so its adapter sets what it needs, where unset, and logs all of it. The doctor tells what it says.
ENVIRONMENT_READERS = frozenset(
    {
        *(
            "parallel.topology",
            "process.compiled",
            "process.compiler",
            "kernels.triton.provider",
            "moe.dispatchers.deep_ep_elastic",
            "moe.dispatchers.deep_ep_limits",
            "kv.transports.mooncake",
        ),
        "diagnosis.machine",
    }
)
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
EMPTY_WORDS = frozenset({"manager", "helper", "helpers", "util", "utils", "impl", "misc"})
MUTABLE_CALLS = frozenset(
    {"dict", "list", "set", "bytearray", "collections.defaultdict", "collections.deque", "collections.Counter"}
)

MAX_FILE_LINES = 400
LONGER: dict[str, str] = {
    "engine.engine": "one object: what every engine does around its steps, also after one that was interrupted",
    "kv.channel.rooms": "one set of rules: a room at both ends, the tokens it covers, the rooms aborted early",
    "model.decode_rows": "one object: the sequences of a step, and the block of memory that has them on a device",
    "pairing.broker": "one object: what happens to requests, whatever their ports do, and what interrupts left undone",
}
"""Files of up to MAX_LONGER_LINES, and why they are not cut: each is one idea."""
MAX_LONGER_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES, MAX_METHODS = 300, 30


@attrs.frozen
class Module:
    """One source file. `name` is dotted, below the package ("kv.view"; "__init__" for the package itself)."""

    name: str
    text: str
    path: str
    is_folder: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree, walked once: most rules look at every node."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[ast.stmt | ast.expr, str, str]]:
        """(node, "a.b", "name" or "") of every import, wherever it stands: in a function, under TYPE_CHECKING, by
        string. The name is what follows `from a.b import`: a module or something in it, which only the caller can
        know."""
        return list(_imports(self))

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"


def read_modules(root: Path, folder: str) -> list[Module]:
    """Every Python file below `root / folder`, by name; their paths in complaints are relative to `root`."""
    modules = []
    for file in sorted((root / folder).rglob("*.py")):
        parts = file.relative_to(root / folder).with_suffix("").parts
        is_folder = parts[-1] == "__init__" and len(parts) > 1
        name = ".".join(parts[:-1] if is_folder else parts)
        modules.append(Module(name, file.read_text("utf-8"), str(file.relative_to(root)), is_folder))
    return modules


def _imports(module: Module) -> Iterator[tuple[ast.stmt | ast.expr, str, str]]:
    package = ["pdinfer", *module.name.split(".")] if module.is_folder else ["pdinfer", *module.name.split(".")[:-1]]
    for node in module.nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node, alias.name, ""
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node, source, alias.name
            case ast.Call(args=[ast.Constant(value=str(source)), *_]) if _dotted(node.func).endswith(
                ("import_module", "__import__")
            ):
                yield node, source, ""


def _dotted(node: ast.expr, aliases: dict[str, str] | None = None) -> str:
    """`torch.load` for that expression, with the first name spelled out by `aliases`; "" for any other expression."""
    match node:
        case ast.Name(id=name):
            return (aliases or {}).get(name, name)
        case ast.Attribute(value=value, attr=attr):
            prefix = _dotted(value, aliases)
            return f"{prefix}.{attr}" if prefix else ""
    return ""


def _aliases(module: Module) -> dict[str, str]:
    """What the names bound by imports stand for: {"np": "numpy", "load": "torch.load"}."""
    aliases = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return aliases


def _targets(module: Module, known: frozenset[str]) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """(node, "kv.view") for every import of a pdinfer module; "__init__" for names taken from the package itself."""
    for node, source, name in module.imports:
        root, _, inside = source.partition(".")
        if root != "pdinfer":
            continue
        deeper = f"{inside}.{name}".strip(".")
        yield node, deeper if deeper in known else inside or "__init__"


def layers(modules: Sequence[Module]) -> list[str]:
    """Imports go downwards in ROOMS, and see of a room no more than ONLY allows."""
    places = {f"{room}.{name}".strip(".") for room, rows in ROOMS.items() for row in rows for name in row}
    known = frozenset(module.name for module in modules) | places
    complaints = []
    for module in modules:
        if missing := _unplaced(module.name):
            complaints.append(f"{module.path} has no place: give {missing} in ROOMS, tests/architecture.py")
            continue
        for node, target in _targets(module, known):
            if missing := _unplaced(target):
                complaints.append(f"{module.at(node)} imports pdinfer.{target}, which has no place: {missing} in ROOMS")
            elif problem := _upwards(module, target) or _beyond(module.name, target):
                complaints.append(f"{module.at(node)} {module.name} {problem}")
    return complaints


def _unplaced(name: str) -> str:
    """What ROOMS lacks to place a module; "" when it has a place."""
    room = ""
    for part in name.split("."):
        if room not in ROOMS:
            return f"{room!r} an order of its own"
        if not any(part in row for row in ROOMS[room]):
            return f"{part!r} a row of {room or 'the package'!r}"
        room = f"{room}.{part}".strip(".")
    return ""


def _upwards(module: Module, target: str) -> str:
    """How an import breaks the order of the first room in which both ends stand; "" when it keeps it."""
    mine, theirs = module.name.split("."), target.split(".")
    depth = 0
    while depth < min(len(mine), len(theirs)) and mine[depth] == theirs[depth]:
        depth += 1
    if depth == len(mine) or depth == len(theirs):  # a folder's `__init__` and what is in it
        return "" if module.is_folder else f"imports {target}, the room it is in; import the file"
    level = {name: index for index, row in enumerate(ROOMS[".".join(mine[:depth])]) for name in row}
    if level[theirs[depth]] < level[mine[depth]]:
        return f"imports {target}, which is above it"
    if level[theirs[depth]] == level[mine[depth]]:
        return f"imports {target}, its neighbour"
    return ""


def _beyond(name: str, target: str) -> str:
    """How an import sees more than ONLY allows, which a module inherits from its rooms."""
    for owner, rules in ONLY.items():
        if not f"{name}.".startswith(f"{owner}."):
            continue
        for room, allowed in rules.items():
            if f"{target}.".startswith(f"{room}.") and target not in allowed:
                return f"imports {target}; of {room} it may see {' and '.join(sorted(allowed)) or 'nothing'}"
    return ""


def charters(modules: Sequence[Module]) -> list[str]:
    """Every folder says in its `__init__` what it is for, what each file in it is, and which rooms it may import."""
    known = frozenset(module.name for module in modules)
    complaints = []
    for room in [module for module in modules if module.is_folder]:
        charter = ast.get_docstring(room.tree, clean=False) or ""
        listed = set(re.findall(r"^ {4}(\w+)(?:\.py|/) ", charter, re.MULTILINE))
        inside = {
            name.removeprefix(f"{room.name}.").split(".")[0] for name in known if name.startswith(f"{room.name}.")
        }
        complaints += [f"{room.path} does not tell what {name} is" for name in sorted(inside - listed - {"__main__"})]
        complaints += [f"{room.path} tells of {name}, which is not there" for name in sorted(listed - inside)]
        may = re.search(r"^May import: (.*)\.\s*\Z", charter, re.MULTILINE | re.DOTALL)
        said = set(may[1].replace("\n", " ").split(", ")) - {"the ground"} if may else set()
        does = _imported_rooms(room.name, modules, known)
        complaints += [f"{room.path} does not say that it may import {name}" for name in sorted(does - said)]
        complaints += [f"{room.path} may import {name}, and does not" for name in sorted(said - does)]
    return complaints


def _imported_rooms(room: str, modules: Sequence[Module], known: frozenset[str]) -> set[str]:
    """What the files of a room import outside of it and the ground: rooms, or what stands next to it in its own."""
    found = set()
    for module in modules:
        if f"{module.name}.".startswith(f"{room}."):
            for _, target in _targets(module, known):
                parts, depth = target.split("."), 0
                while room.split(".")[depth : depth + 1] == parts[depth : depth + 1] != []:
                    depth += 1
                if depth < len(room.split(".")) and depth < len(parts):
                    found.add(".".join(parts[: depth + 1]))
    return found - GROUND


def _rooms_of(name: str) -> Iterator[str]:
    """The module itself, then the rooms around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def libraries(modules: Sequence[Module]) -> list[str]:
    """Every library is a declared one, a heavy one stays in its adapter, and some modules do without torch."""
    complaints = []
    for module in modules:
        forbidden = next(
            (FORBIDDEN_IMPORTS[name] for name in _rooms_of(module.name) if name in FORBIDDEN_IMPORTS), frozenset[str]()
        )
        for node, source, _ in module.imports:
            library = source.split(".")[0]
            if library in forbidden:
                complaints.append(f"{module.at(node)} {module.name} must not import {library}")
            elif library == "pdinfer" or library in sys.stdlib_module_names:
                continue
            elif library not in LIBRARIES:
                complaints.append(f"{module.at(node)} imports {library}, a dependency that LIBRARIES does not know")
            elif not any(fnmatch(module.name, pattern) for pattern in LIBRARIES[library]):
                users = ", ".join(LIBRARIES[library]) or "tests"
                complaints.append(f"{module.at(node)} {module.name} imports {library}, which belongs to {users}")
    return complaints


def unsafe(modules: Sequence[Module]) -> list[str]:
    """Nothing turns bytes into code or arbitrary objects."""
    complaints = []
    for module in modules:
        for node, source, name in module.imports:
            if source.split(".")[0] in UNSAFE_MODULES:
                complaints.append(f"{module.at(node)} imports {source}")
            elif f"{source}.{name}" in UNSAFE_CALLS:
                complaints.append(f"{module.at(node)} imports {source}.{name}")
        aliases = _aliases(module)
        for node in module.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = _dotted(node.func, aliases)
            allows_pickle = any(
                keyword.arg == "allow_pickle"
                and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                for keyword in node.keywords
            )
            if called in UNSAFE_CALLS:
                complaints.append(f"{module.at(node)} calls {called}")
            elif allows_pickle:
                complaints.append(f"{module.at(node)} calls {called or 'something'} with allow_pickle")
    return complaints


def manners(modules: Sequence[Module]) -> list[str]:
    """No reading of the environment but for ranks, no module-level state, no names that say nothing. Ruff finds prints
    and `global`."""
    complaints = []
    for module in modules:
        aliases = _aliases(module)
        for node in module.nodes:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if words := _words(name) & EMPTY_WORDS:
                        complaints.append(f"{module.at(node)} {name}: {', '.join(words)} says nothing; name what it is")
                case ast.Attribute() | ast.Name() if (
                    _dotted(node, aliases) in ENVIRONMENT and module.name not in ENVIRONMENT_READERS
                ):
                    complaints.append(f"{module.at(node)} touches {_dotted(node, aliases)}; take an argument instead")
            if isinstance(node, ast.FunctionDef) and node.name == "__init__" and (unread := _unread(node)):
                complaints.append(f"{module.at(node)} does not read {unread}: whoever gives it gets nothing for it")
        if words := _words(Path(module.path).stem) & EMPTY_WORDS:
            complaints.append(f"{module.path}: {', '.join(words)} says nothing; name what it holds")
        complaints += _state(module, aliases)
    return complaints


def _unread(function: ast.FunctionDef) -> str:
    """Return the arguments of an `__init__` that its body never reads."""
    names = {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    given = [*function.args.posonlyargs, *function.args.args[1:], *function.args.kwonlyargs]
    unread = [each.arg for each in given if each.arg not in names and not each.arg.startswith("_")]
    return ", ".join(unread)


def _words(name: str) -> set[str]:
    """{"page", "pool"} of PagePool and of page_pool."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _state(module: Module, aliases: dict[str, str]) -> Iterator[str]:
    """Module-level containers that look as if they change: empty ones, and those not named as a CONSTANT."""
    for statement in module.tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        match value:
            case ast.Dict(keys=items) | ast.List(elts=items) | ast.Set(elts=items):
                suspect, empty = True, not items
            case ast.DictComp() | ast.ListComp() | ast.SetComp():
                suspect, empty = True, False
            case ast.Call(func=func, args=args, keywords=keywords):
                called = _dotted(func, aliases)
                suspect, empty = called in MUTABLE_CALLS, called.startswith("collections.") or not [*args, *keywords]
            case _:
                continue
        if suspect and name != "__all__" and (empty or not name.isupper()):
            yield f"{module.at(statement)} {name} is module-level state; give it an owner, or make it a constant"


def sizes(modules: Sequence[Module]) -> list[str]:
    """Files, classes and functions that fit in a head."""
    complaints = []
    for module in modules:
        lines = len(module.text.splitlines())
        most = MAX_LONGER_LINES if module.name in LONGER else MAX_FILE_LINES
        if lines > most:
            complaints.append(f"{module.path} has {lines} lines, more than {most}")
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                num_methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                sizes = [(_lines(node), "lines", MAX_CLASS_LINES), (num_methods, "methods", MAX_METHODS)]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                sizes = [(_lines(node), "lines", MAX_FUNCTION_LINES)]
            else:
                continue
            complaints += [
                f"{module.at(node)} {node.name} has {size} {what}, more than {limit}"
                for size, what, limit in sizes
                if size > limit
            ]
    return complaints


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


MAKE_TENSORS = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}


def tensors(modules: Sequence[Module]) -> list[str]:
    """What makes a tensor names its dtype and its device: without them they are whatever the host has set."""
    complaints = []
    for module in modules:
        for node in module.nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in MAKE_TENSORS:
                    missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
                    if missing:
                        complaints.append(f"{module.at(node)} torch.{name} names no {' and no '.join(sorted(missing))}")
    return complaints
