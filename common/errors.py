"""The closed tree of typed errors.

::

    HeadraceError
    ├── InvalidRequest          the client can mend it; names the field
    │   ├── ContextOverflow     prompt (and budget) over the model's context
    │   └── UnsupportedParameter
    ├── ModelNotFound           nobody ever registered this model
    ├── ModelUnavailable        registered, but no live worker
    ├── Overloaded              admission limit reached; carries retry_after_s
    │   └── TenantLimitReached  the limit of one caller
    ├── LogUnavailable          Redis cannot be reached or cannot accept (carries retry_after_s)
    ├── LogCorrupt              an event or a script's answer cannot be understood
    │   ├── UnknownEvent
    │   └── StreamGap
    ├── StreamExpired           past retention
    ├── IdempotencyConflict     same key, another body
    ├── Fenced                  this writer lost its lease or its epoch
    ├── EngineError             a request failed inside the engine
    ├── DeadlineExceeded
    ├── WeightsChanged          the rest of an answer would come from other weights than its beginning
    ├── Quarantined             the request killed its worker too often
    └── ConfigError             a setting is missing or wrong; names the setting
        └── ModelLoadError      the model cannot be loaded as asked for
            ├── ModelFileMissing    a path or file is not there
            ├── UnsupportedModel    an architecture, tensor type or tokenizer that is not served
            ├── CheckpointMismatch  a tensor is missing or has another shape than the configuration says
            └── NotEnoughMemory     estimated before anything is loaded
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """Something failed inside the server that no other code names; its log has the reason, found by the request id.

    Base of every error that this system raises on purpose. ``code`` is the stable machine-readable name, ``retryable``
    says whether the same call may succeed later.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(HeadraceError):
    """The request is wrong and can be mended by the client; ``param`` names the field."""

    code = "invalid_request"


class ContextOverflow(InvalidRequest):
    """The prompt does not fit into the model's context."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A parameter that this server does not support was sent in strict mode."""

    code = "unsupported_parameter"


class ModelNotFound(HeadraceError):
    """No worker ever registered a model of this name."""

    code = "model_not_found"


class _RetryLater(HeadraceError):
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ModelUnavailable(_RetryLater):
    """The model is known but no worker that serves it holds a lease."""

    code = "model_unavailable"


class Overloaded(_RetryLater):
    """An admission limit is reached; nothing was enqueued. ``reason`` names the limit, for metrics."""

    code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, param: str | None = None, reason: str = "overloaded"
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, param=param)
        self.reason = reason


class TenantLimitReached(Overloaded):
    """This caller holds as much as one caller may; others are served."""

    code = "tenant_limit_reached"


class LogUnavailable(_RetryLater):
    """Redis cannot be reached, is loading, or refuses writes."""

    code = "log_unavailable"


class LogCorrupt(HeadraceError):
    """Something read from the log cannot be understood."""

    code = "log_corrupt"


class UnknownEvent(LogCorrupt):
    """An event of an unknown kind or version: refuse loudly, never skip."""

    code = "unknown_event"


class StreamGap(LogCorrupt):
    """Events of one request are not contiguous."""

    code = "stream_gap"

    def __init__(self, *, expected: int, got: int) -> None:
        super().__init__(f"expected event {expected}, got {got}")
        self.expected = expected
        self.got = got


class StreamExpired(HeadraceError):
    """The request's events, or those at the position, are past their retention, lost in a failover, or never were."""

    code = "stream_expired"

    @classmethod
    def of(cls, request_id: str) -> StreamExpired:
        """In the same words whether it never existed, has expired, or is somebody else's: they tell nothing more."""
        return cls(f"request {request_id} is unknown or past its retention")


class IdempotencyConflict(HeadraceError):
    """The same Idempotency-Key came with another body."""

    code = "idempotency_conflict"


class Fenced(HeadraceError):
    """This writer no longer owns what it tried to write to."""

    code = "fenced"


class EngineError(HeadraceError):
    """A request failed inside the engine."""

    code = "engine_error"
    retryable = True


class DeadlineExceeded(HeadraceError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"


class Quarantined(HeadraceError):
    """The request was taken over too often; it probably kills its worker."""

    code = "quarantined"


class WeightsChanged(HeadraceError):
    """A half-written answer was left by a worker with other weights, and nobody with the old ones is there."""

    code = "weights_changed"
    retryable = True


class ConfigError(HeadraceError):
    """A setting is missing or wrong; the message names it and its bounds."""

    code = "config_error"


class ModelLoadError(ConfigError):
    """The model cannot be loaded as asked for; the message names the file, tensor or setting."""

    code = "model_load_error"


class ModelFileMissing(ModelLoadError):
    """A path, or a file that the model needs, is not there."""

    code = "model_file_missing"


class UnsupportedModel(ModelLoadError):
    """The architecture, a tensor type or the tokenizer is of a kind that is not served."""

    code = "unsupported_model"


class CheckpointMismatch(ModelLoadError):
    """A tensor is missing, malformed, or has another shape than the model's configuration says."""

    code = "checkpoint_mismatch"


class NotEnoughMemory(ModelLoadError):
    """The weights or the KV cache would not fit; the message says what is needed and what there is."""

    code = "not_enough_memory"
