"""One engine worker: one model on this machine, fed from the log."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence as Arguments
from typing import Final

from prometheus_client import CollectorRegistry

from common import garbage, last_words
from common.config import Loaded, Settings, load_or_exit
from common.errors import ConfigError
from common.model_card import ModelCard
from common.telemetry.logging import configure_logging, get_logger
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.metrics_server import MetricsServer
from common.telemetry.settings import MetricsServerSettings, TelemetrySettings
from common.telemetry.tracing import Tracing
from common.tokenization.tokenizer import Tokenizer
from common.transport.client import RedisSettings
from engine_worker.assembly import Assembly, EngineSettings, load_engine
from engine_worker.config import (
    ComputeSettings,
    KvCacheSettings,
    LeaseSettings,
    ModelSettings,
    SchedulerSettings,
    WorkerSettings,
)
from engine_worker.io_loop import IoSettings, Served
from engine_worker.runner.kv_tensors import KvCachePlan
from engine_worker.runner.loading import LoadedModel
from engine_worker.worker import Worker, worker_name

log: Final = get_logger(__name__)

GROUPS: Final[tuple[type[Settings], ...]] = (
    ModelSettings,
    ComputeSettings,
    SchedulerSettings,
    KvCacheSettings,
    WorkerSettings,
    LeaseSettings,
    MetricsServerSettings,
    RedisSettings,
    TelemetrySettings,
)

EXIT_CONFIG: Final = 2


def main(argv: Arguments[str], prog: str = "python -m engine_worker") -> int:
    """Load the model and serve it until stopped. Returns the exit code: 2 when settings or model cannot be used."""
    loaded = load_or_exit(GROUPS, argv, prog=prog, description=(__doc__ or "").partition("\n")[0])
    configure_logging("worker", loaded[TelemetrySettings])
    # The name is drawn once, for traces and lease alike.
    settings = loaded[WorkerSettings].model_copy(update={"worker_name": worker_name(loaded[WorkerSettings])})
    log.info("starting", worker=settings.worker_name, settings=loaded.given())
    tracing = Tracing.configure("worker", settings.worker_name, loaded[TelemetrySettings])
    try:
        return _serve(loaded, settings, tracing)
    except ConfigError as error:
        last_words.leave(error.message)
        log.error("cannot start", reason=error.message)
        return EXIT_CONFIG
    except Exception as error:
        last_words.leave(f"{type(error).__name__}: {error}")
        raise
    finally:
        tracing.shutdown()


def _serve(loaded: Loaded, settings: WorkerSettings, tracing: Tracing) -> int:
    assembly = load_engine(
        EngineSettings(
            loaded[ModelSettings], loaded[ComputeSettings], loaded[SchedulerSettings], loaded[KvCacheSettings]
        )
    )
    model = assembly.model
    log.info(
        "model loaded",
        model=model.served_names[0],
        seconds=round(model.load_s, 1),
        backend=" ".join(filter(None, (model.backend, model.native_target))),
        dtype=model.dtype,
        quantization=model.quantization,
        is_batch_invariant=model.is_batch_invariant,
        kv_cache_dtype=model.kv_cache_dtype,
        kv_cache_tokens=assembly.plan.num_tokens,
        max_model_len=assembly.plan.max_model_len,
        full_length_requests=round(assembly.plan.full_length_requests, 1),
        kv_cache=str(assembly.plan),
    )
    served = _served(assembly, loaded[SchedulerSettings].max_num_seqs)
    metrics_server = loaded[MetricsServerSettings]
    metrics = WorkerMetrics(served.card.name, metrics_server.metrics_engine, CollectorRegistry())
    worker = Worker(
        assembly.engine,
        served,
        IoSettings(loaded[RedisSettings], loaded[LeaseSettings], settings),
        metrics=metrics,
        tracing=tracing,
    )
    listener = _listen(metrics_server, metrics, worker)
    garbage.settle()
    try:
        return worker.run()
    finally:
        listener.close()


def _served(assembly: Assembly, max_num_seqs: int) -> Served:
    model = assembly.model
    card = _card(model, assembly.plan, max_num_seqs)
    tokenizer = Tokenizer.from_json(model.tokenizer_json, model.tokenizer_config)
    return Served(card, {card.tokenizer_blob: model.tokenizer_json}, tokenizer, assembly)


def _card(model: LoadedModel, plan: KvCachePlan, max_num_seqs: int) -> ModelCard:
    return ModelCard(
        name=model.served_names[0],
        served_names=model.served_names,
        weights_fingerprint=model.fingerprint,
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_blob=hashlib.sha256(model.tokenizer_json).hexdigest(),
        tokenizer_config=dict(model.tokenizer_config),
        chat_template=model.chat_template,
        generation_defaults=model.generation_defaults,
        root=model.root,
        architecture=model.architecture,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        kv_cache_tokens=plan.num_tokens,
        max_num_seqs=max_num_seqs,
        block_size=plan.block_size,
        capabilities=("grammar", "logprobs", "prompt_logprobs"),
        created_s=time.time(),
    )


def _listen(settings: MetricsServerSettings, metrics: WorkerMetrics, worker: Worker) -> MetricsServer:
    try:
        listener = MetricsServer(settings, metrics.registry, worker.not_ready)
    except OSError as error:  # the port is taken, by another worker of this machine more often than not
        log.warning("metrics port is not free, taking another", port=settings.metrics_port, reason=str(error))
        listener = MetricsServer(settings.model_copy(update={"metrics_port": 0}), metrics.registry, worker.not_ready)
    log.info("metrics", host=settings.metrics_host, port=listener.port)
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
