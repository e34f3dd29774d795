"""A loaded model, its cache, a scheduler and a runner joined into one engine: for a worker, and for measuring."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.events import Grammar
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.runner.cuda_graphs import cuda_capture
from engine_worker.runner.kv_tensors import KvCachePlan, plan_kv_cache
from engine_worker.runner.loading import LoadedModel, load_engine_model
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.sampler import Sampler
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence
from engine_worker.weights.nonsense import refused_as_nonsense


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The groups that decide what is computed and how."""

    model: ModelSettings
    compute: ComputeSettings
    scheduler: SchedulerSettings
    kv_cache: KvCacheSettings


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine ready to step, and what has to be done to requests before it sees them."""

    engine: Engine
    model: LoadedModel
    plan: KvCachePlan
    kv_cache: KvCacheManager
    grammars: GrammarCompiler
    runner: ModelRunner

    def prepare(self, sequence: Sequence) -> None:
        """Hash the prompt's blocks; any thread, before `Engine.add`."""
        self.kv_cache.prepare(sequence)

    def compile(self, grammar: Grammar) -> None:
        """Make the masks of ``grammar`` ready; any thread. Raises `InvalidRequest` for one that cannot be used."""
        self.grammars.compile(grammar)


def load_engine(settings: EngineSettings) -> Assembly:
    """Load the model and size the cache by what memory is left. Raises what `load_engine_model` and `plan_kv_cache`
    raise: all of it `ConfigError`."""
    with refused_as_nonsense(settings.model.model):
        model = load_engine_model(settings.model, settings.compute)
    free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else None
    plan = plan_kv_cache(settings.kv_cache, model.ops, model.config, model.max_model_len, free)
    return assemble(
        model,
        plan,
        settings.scheduler,
        enable_prefix_caching=settings.kv_cache.enable_prefix_caching,
        cuda_graphs=settings.compute.cuda_graphs,
    )


def assemble(
    model: LoadedModel,
    plan: KvCachePlan,
    scheduler: SchedulerSettings,
    *,
    enable_prefix_caching: bool,
    cuda_graphs: bool = True,
) -> Assembly:
    """A fresh engine with an empty cache of ``plan``'s size; the weights of ``model`` may be shared by several.

    ``cuda_graphs``: whether decode steps are recorded where they can be.
    """
    scheduler = scheduler.for_device(is_cpu=model.device.type == "cpu")
    kv_cache = KvCacheManager(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=enable_prefix_caching,
    )
    with refused_as_nonsense(model.root):
        grammars = GrammarCompiler(model.tokenizer_json, model.vocab_size, model.eos_token_ids)
    capture = cuda_capture(model) if cuda_graphs else None
    sampler = Sampler(model.vocab_size, grammars)
    runner = ModelRunner(model, plan, scheduler, kv_cache.block_tables, sampler, capture=capture)
    engine = Engine(Scheduler(scheduler, kv_cache, plan.max_model_len), kv_cache, runner)
    return Assembly(engine, model, plan, kv_cache, grammars, runner)
