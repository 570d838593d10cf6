"""The HTTP API's bodies, version 1 (contract §5): what the service answers and takes, shared by both sides.

Times are RFC 3339, ids are opaque strings, sizes are bytes, lengths are tokens. Unknown fields in a request are an error.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, SerializationInfo, field_serializer, model_validator

T = TypeVar("T")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
FinalName = Literal["post_norm", "pre_norm", "both", "none"]
CompressionName = Literal["none", "zstd"]
DtypeName = Literal["bfloat16", "float16", "float32"]


class Request(BaseModel):
    """A body that the service takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Answer(BaseModel):
    """A body that the service gives. Newer services may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Page(Answer, Generic[T]):
    """One page of a list; ask again with `cursor`, which is null on the last page."""

    items: list[T]
    cursor: str | None = None


class Problem(Answer):
    """RFC 9457. `line` and `field` name the place in a dataset or body; `errors` lists all that a validation found wrong."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    line: int | None = None
    field: str | None = None
    errors: list[dict[str, Any]] | None = None


class DatasetFromPath(Request):
    path: str = Field(description="A file below one of the service's dataset roots.")


class Dataset(Answer):
    id: str
    name: str
    model: str = Field(description="The tokenizer that the dataset is bound to.")
    samples: int
    tokens: int
    max_tokens: int = Field(description="The longest sample's tokens.")
    sha256: str = Field(description="Over the canonical (id, ids, mask) records.")
    created_at: datetime


class Capture(Request):
    """What to capture. By default what the workers are configured to capture; a job that names something else is refused."""

    preset: Literal["eagle3", "speculators", "all-trainers", "mtp"] | None = None
    aux_layer_ids: list[int] | None = None
    final: FinalName | None = None
    identity: Literal["tokens", "count"] | None = Field(
        default=None, description="How dumps are matched; `count` is strict mode. Default: tokens where a worker can, else count."
    )


class PlacementChoice(Request):
    order: Literal["dataset", "permutation"] = "dataset"
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    rows_per_shard: int | None = Field(default=None, ge=1, lt=2**31)
    rows_per_chunk: int | None = Field(default=None, ge=1, lt=2**31)


class JobRequest(Request):
    dataset: str
    store: str = Field(description="Where the store is or will be: a path below a store root, or a URL below an object store.")
    name: str | None = Field(default=None, max_length=200)
    priority: int = Field(default=0, ge=-1000, le=1000, description="Higher goes first.")
    capture: Capture = Capture()
    placement: PlacementChoice = PlacementChoice()
    compression: CompressionName = Field(
        default="none", description="Of the hidden states: `zstd` takes about 0.7 of the space, and a core for every 0.2 GB/s."
    )
    on_over_long: Literal["fail", "truncate", "skip"] = "fail"
    ignore_space: bool = Field(default=False, description="Accept the job even if the store lacks the space.")


class SampleCounts(Answer):
    total: int
    pending: int
    stored: int
    failed: int
    cancelled: int
    skipped: int


class Progress(Answer):
    """Of a job, now. Rates are over the last minute of work; `eta_seconds` is null where it cannot be told."""

    samples: SampleCounts
    tokens_total: int
    tokens_stored: int
    bytes_total: int = Field(description="Bytes of hidden states that the whole job needs, uncompressed.")
    bytes_stored: int
    units_total: int
    units_committed: int
    tokens_per_second: float
    bytes_per_second: float
    eta_seconds: float | None


class LayerNorms(Answer):
    """L2 norms of one layer's hidden states, over a few rows of every stored capture; `layer` is null for a final state."""

    layer: int | None = Field(description="The model's layer, as in `aux_layer_ids`; null for a final state.")
    rows: Literal["first", "later"] = Field(description="A sample's first row, often an attention sink, or those after it.")
    count: int
    min: float
    mean: float
    max: float


class Job(Answer):
    id: str
    name: str
    state: Literal["planning", "running", "paused", "cancelling", "completed", "cancelled", "failed"]
    reason: str | None = Field(default=None, description="Why it is in this state, where that needs saying.")
    priority: int
    dataset: str
    store: str
    model_path: str
    model_fingerprint: str
    aux_layer_ids: list[int]
    final: FinalName
    dtype: DtypeName
    identity: Literal["tokens", "count"]
    compression: CompressionName = "none"
    progress: Progress
    failures: dict[str, int] = Field(description="Failed and skipped samples by reason.")
    workers: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="By worker name: samples `stored`, `attempts` made, and `lost` attempts."
    )
    layer_norms: dict[str, list[LayerNorms]] = Field(
        default_factory=dict, description="By hidden array, of what is stored; empty in lists of jobs."
    )
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class Sample(Answer):
    """One sample of a job. `index` is its place in the dataset, `row_start` its first row in the store."""

    index: int
    id: str
    status: Literal["pending", "stored", "failed", "cancelled", "skipped"]
    reason: str | None
    attempts: int
    worker: str | None
    row_start: int
    length: int
    digest: str | None = Field(description="XXH3-64 of its bytes, 16 hex digits, once stored.")


def _absolute(path: str) -> str:
    if "\0" in path or not path.startswith("/"):
        raise ValueError("must be an absolute path: the service's working directory is nobody's business")
    return path


def _http_url(url: str) -> str:
    """What is at fault is not told: the text may hold a password."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        named = False
    if not named or any(char.isspace() for char in url):
        raise ValueError("must be a URL such as http://127.0.0.1:30000")
    if "@" in parts.netloc:
        raise ValueError("must hold no user and password: a URL is shown to whoever may look; a worker's key goes into api_key")
    return url


def _header_value(secret: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]+", secret.get_secret_value()):
        raise ValueError("must be printable ASCII without spaces")
    return secret


# What validators of our own demand is told as patterns too, as far as patterns go.
AbsolutePath = Annotated[str, AfterValidator(_absolute), Field(json_schema_extra={"pattern": "^/"})]
HttpUrl = Annotated[str, AfterValidator(_http_url), Field(json_schema_extra={"pattern": r"^https?://[^/@\s]+(/\S*)?$"})]
ApiKey = Annotated[SecretStr, AfterValidator(_header_value), Field(json_schema_extra={"pattern": "^[!-~]+$"})]
REVEALED = {"secrets": "revealed"}
"""The serialisation context in which secrets are written out; in any other they are masked."""


class PluginDumps(Request):
    """Dumps by the plugin or the embedded worker. `dir` is the dump root; the worker's taps are below `<dir>/<worker name>/`."""

    kind: Literal["plugin"] = "plugin"
    dir: AbsolutePath


class PlainDumps(Request):
    """Dumps by a hand-patched server, matched by token count (strict mode): what a beacon would tell is declared here."""

    kind: Literal["plain"]
    dir: AbsolutePath
    format: Literal["safetensors", "pt"] = "safetensors"
    published_by: Literal["rename", "DONE", "meta.json"] = "rename"
    tensors: dict[str, str] = Field(
        default_factory=dict, description="Statetap's tensor names to the server's; default: the same."
    )
    aux_layer_ids: list[int]
    final: FinalName
    model_path: str
    model_fingerprint: str = Field(min_length=1)
    num_layers: int = Field(ge=1, lt=2**31)
    hidden_size: int = Field(ge=1, lt=2**31)
    vocab_size: int = Field(ge=1, lt=2**31)
    dtype: DtypeName
    chunked_prefill_size: int | None = Field(default=None, ge=1, lt=2**31)
    context_length: int | None = Field(default=None, ge=1, lt=2**31)
    budget_bytes: int = Field(default=8 << 30, ge=1, lt=2**63)
    quiet_period_seconds: float = Field(default=0.05, ge=0, description="How long after its dumps a lifecycle closes.")

    @model_validator(mode="after")
    def _is_a_capture(self) -> Self:
        ids = self.aux_layer_ids
        if ids != sorted(set(ids)) or any(not 0 <= layer < self.num_layers for layer in ids):
            raise ValueError(f"aux_layer_ids must be ascending, distinct and within 0 to {self.num_layers - 1}, not {ids}")
        wanted = ["aux_hidden_states"] if ids else []
        wanted += ["last_hidden_states"] if self.final in ("post_norm", "both") else []
        wanted += ["last_hidden_states_prenorm"] if self.final in ("pre_norm", "both") else []
        if not wanted:
            raise ValueError("aux_layer_ids and final name nothing to capture")
        if strangers := sorted(self.tensors.keys() - set(wanted)):
            raise ValueError(f"tensors names {', '.join(strangers)}; what is captured is {', '.join(wanted)}")
        return self


Dumps = Annotated[PluginDumps | PlainDumps, Field(discriminator="kind")]


class WorkerRequest(Request):
    name: Name
    url: HttpUrl
    dumps: Dumps
    requests_per_second: float | None = Field(default=None, gt=0, description="A rate limit; none by default.")
    api_key: ApiKey | None = Field(default=None, description="What the worker itself wants as `Authorization: Bearer`.")

    @field_serializer("api_key", when_used="json-unless-none")
    def _masked(self, key: SecretStr, info: SerializationInfo) -> str:
        return key.get_secret_value() if info.context == REVEALED else str(key)


class Worker(Answer):
    name: str
    url: str
    dumps: Dumps
    requests_per_second: float | None = None
    has_api_key: bool = Field(default=False, description="Whether the service brings a key when it calls the worker.")
    state: Literal["starting", "ready", "suspect", "draining", "refused", "unreachable", "quarantined", "dead"]
    reason: str | None = Field(description="Why it is not ready; of a ready one, that it is on probation, and why.")
    in_flight: int = Field(description="0 or 1: exactly one request is in flight per worker.")
    requests: int
    failures: int
    model_path: str | None
    model_fingerprint: str | None
    context_length: int | None
    dump_bytes: int = Field(description="Bytes of its dumps that are held, or reserved for what is to come.")
    budget_bytes: int | None


class Event(Answer):
    id: int
    event: str
    at: datetime
    data: dict[str, Any]


class Health(Answer):
    status: Literal["ok", "not ready"]
    detail: str = ""
