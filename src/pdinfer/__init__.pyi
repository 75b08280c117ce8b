"""The names that hosts use. `__init__.py` reads here where each of them lives, as type checkers do."""

from pdinfer import (
    adapters as adapters,
)
from pdinfer import (
    aio as aio,
)
from pdinfer import (
    bench as bench,
)
from pdinfer import (
    kernels as kernels,
)
from pdinfer import (
    kv as kv,
)
from pdinfer import (
    metrics as metrics,
)
from pdinfer import (
    moe as moe,
)
from pdinfer import (
    planning as planning,
)
from pdinfer import (
    remote as remote,
)
from pdinfer import (
    testing as testing,
)
from pdinfer import (
    text as text,
)
from pdinfer.checkpoint.quantize import quantize_checkpoint as quantize_checkpoint
from pdinfer.config import (
    CacheConfig as CacheConfig,
)
from pdinfer.config import (
    EngineConfig as EngineConfig,
)
from pdinfer.config import (
    ModelConfig as ModelConfig,
)
from pdinfer.config import (
    PairingConfig as PairingConfig,
)
from pdinfer.diagnosis.doctor import doctor as doctor
from pdinfer.engine.decode import DecodeEngine as DecodeEngine
from pdinfer.engine.prefill import PrefillEngine as PrefillEngine
from pdinfer.errors import (
    BackendUnavailable as BackendUnavailable,
)
from pdinfer.errors import (
    CheckpointError as CheckpointError,
)
from pdinfer.errors import (
    ConfigError as ConfigError,
)
from pdinfer.errors import (
    Forked as Forked,
)
from pdinfer.errors import (
    LayoutMismatch as LayoutMismatch,
)
from pdinfer.errors import (
    Overloaded as Overloaded,
)
from pdinfer.errors import (
    PDInferError as PDInferError,
)
from pdinfer.errors import (
    RankLost as RankLost,
)
from pdinfer.errors import (
    RequestError as RequestError,
)
from pdinfer.errors import (
    TransferError as TransferError,
)
from pdinfer.execution.sampling import LogitsProcessor as LogitsProcessor
from pdinfer.kernels.ops import Ops as Ops
from pdinfer.kernels.resolve import explain_backends as explain_backends
from pdinfer.kv.channel.channel import KVChannel as KVChannel
from pdinfer.kv.pool import PagePool as PagePool
from pdinfer.model.load import load_model as load_model
from pdinfer.model.model import Model as Model
from pdinfer.moe.balance.deepseek import rebalance_experts as rebalance_experts
from pdinfer.moe.placement.placement import ExpertPlacement as ExpertPlacement
from pdinfer.pairing import policy as policy
from pdinfer.pairing.pairing import Pairing as Pairing
from pdinfer.parallel.topology import Topology as Topology
from pdinfer.types import (
    FinishReason as FinishReason,
)
from pdinfer.types import (
    Granted as Granted,
)
from pdinfer.types import (
    Handoff as Handoff,
)
from pdinfer.types import (
    PageGrant as PageGrant,
)
from pdinfer.types import (
    PeerAddress as PeerAddress,
)
from pdinfer.types import (
    Refused as Refused,
)
from pdinfer.types import (
    Request as Request,
)
from pdinfer.types import (
    SamplingParams as SamplingParams,
)
from pdinfer.types import (
    TokenEvent as TokenEvent,
)

__version__: str
