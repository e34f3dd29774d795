"""The models that workers registered, as this edge knows them, with tokenizers and templates ready for use.

A background task reads the registry; requests only look into memory. Tokenizers are found by the hash of their content,
so a restarted worker or a second name of the same model costs nothing, and kept in an LRU of bounded size.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from common.errors import HeadraceError, InvalidRequest, LogUnavailable, ModelNotFound, ModelUnavailable
from common.telemetry.logging import get_logger
from common.tokenization.chat_template import ChatTemplate
from common.tokenization.tokenizer import Tokenizer
from edge.translate.model import ServedModel

if TYPE_CHECKING:
    from common.model_card import ModelCard
    from common.telemetry.metrics import EdgeMetrics
    from common.transport import RegisteredModel, Registry
    from edge.config import CatalogSettings

NO_WORKER_RETRY_S: Final = 5.0
NAMES_IN_A_MESSAGE: Final = 10
_log = get_logger(__name__)


class ModelCatalog:
    """Used from the event loop; tokenizers are built in threads."""

    def __init__(
        self, registry: Registry, settings: CatalogSettings, metrics: EdgeMetrics, *, default_model: str = ""
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._default_model = default_model
        self._models: dict[str, RegisteredModel] = {}  # by every served name
        self._gone_at: dict[str, float] = {}  # when a card's last worker had gone, infinite while it has one
        self._refreshed = asyncio.Event()
        self._loads: OrderedDict[bytes, asyncio.Task[ServedModel]] = OrderedDict()  # by the card, least recent first
        self.is_reachable = False  # the last look at the registry succeeded

    async def run(self) -> None:
        """Keeps the catalog fresh until cancelled. While the log is away the last state stays in use."""
        while True:
            try:
                await self.refresh()
            except LogUnavailable as error:
                if self.is_reachable:
                    _log.warning("the registry cannot be read", error=error.message)
                self.is_reachable = False
                self._metrics.log_errors.labels("registry").inc()
                self._metrics.log_up.set(0)
            await asyncio.sleep(self._settings.catalog_refresh_s)

    async def refresh(self) -> None:
        """Reads the registry once. Raises `LogUnavailable`."""
        found: dict[str, RegisteredModel] = {}
        for model in await self._registry.models():
            self._metrics.live_workers.labels(model.card.name).set(len(model.live_workers))
            self._note_workers(model)
            for name in model.card.served_names or (model.card.name,):
                known = found.get(name)
                if known is None or (model.live_workers and not known.live_workers):
                    found[name] = model
        self._models = found
        self.is_reachable = True
        self._metrics.log_up.set(1)
        self._refreshed.set()
        self._refreshed.clear()

    @property
    def models(self) -> dict[str, RegisteredModel]:
        """Every served name with its model."""
        return self._models

    @property
    def has_live_model(self) -> bool:
        """Whether any model can be asked for: it has a worker, or will soon have one again."""
        return any(self.is_offered(model.card.name) for model in self._models.values())

    def absent_s(self, card_name: str) -> float:
        """For how long the model has had no live worker: 0 while it has one, infinite if this edge never saw one."""
        return max(0.0, time.monotonic() - self._gone_at.get(card_name, -math.inf))

    def is_offered(self, card_name: str) -> bool:
        """Whether the model has a live worker, or had one so lately that its requests wait for the next."""
        return self.absent_s(card_name) <= self._settings.no_worker_grace_s

    def has_patience(self, card_name: str) -> bool:
        """Whether requests of the model may be queued: it has a worker, had one lately, or need not have one."""
        return self._settings.accept_without_worker or self.is_offered(card_name)

    async def refreshed(self) -> None:
        """Waits for the next look at the registry that succeeds."""
        await self._refreshed.wait()

    def find(self, name: str | None) -> RegisteredModel:
        """The model of a name, or the default one for None. Raises `ModelNotFound`, `InvalidRequest`."""
        if not name:
            return self._default()
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models)[:NAMES_IN_A_MESSAGE]) or "none yet"
            raise ModelNotFound(
                f"The model `{name[:100]}` does not exist. Models of this server: {known}.", param="model"
            )
        return model

    async def serving(self, name: str | None) -> ServedModel:
        """A model that can take a request now. Raises `ModelNotFound`, `ModelUnavailable`, `LogUnavailable`."""
        model = self.find(name)
        if not model.live_workers and not self.has_patience(model.card.name):
            raise ModelUnavailable(
                f"The model `{model.card.name}` has no live worker at the moment.",
                retry_after_s=NO_WORKER_RETRY_S,
                param="model",
            )
        return await self.loaded(model.card)

    async def known(self, name: str | None) -> ServedModel:
        """A model with its tokenizer, whether it has a worker or not. Raises as `serving` does."""
        return await self.loaded(self.find(name).card)

    async def loaded(self, card: ModelCard) -> ServedModel:
        """The card with its tokenizer and template. Raises `ModelUnavailable` when its files cannot be had."""
        key = msgspec.msgpack.encode(card)
        task = self._loads.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loads[key] = asyncio.create_task(self._load(card))
            while len(self._loads) > self._settings.tokenizer_cache:
                self._loads.popitem(last=False)
        self._loads.move_to_end(key)
        return await asyncio.shield(task)

    async def _load(self, card: ModelCard) -> ServedModel:
        try:
            tokenizer_json = await self._registry.blob(card.tokenizer_blob)
            return await asyncio.to_thread(_build, card, tokenizer_json, self._settings)
        except LogUnavailable:
            raise
        except HeadraceError as error:
            _log.error("a model's files cannot be used", model=card.name, error=error.message)
            raise ModelUnavailable(
                f"The tokenizer of `{card.name}` cannot be loaded.", retry_after_s=NO_WORKER_RETRY_S, param="model"
            ) from error

    def _note_workers(self, model: RegisteredModel) -> None:
        name = model.card.name
        if model.live_workers:
            self._gone_at[name] = math.inf
        elif self._gone_at.get(name) == math.inf:
            self._gone_at[name] = time.monotonic()

    def _default(self) -> RegisteredModel:
        if self._default_model:
            return self.find(self._default_model)
        cards = {id(model): model for model in self._models.values()}
        live = [model for model in cards.values() if model.live_workers] or list(cards.values())
        if len(live) == 1:
            return live[0]
        if not live:
            raise ModelUnavailable("No model is being served yet.", retry_after_s=NO_WORKER_RETRY_S, param="model")
        names = ", ".join(sorted(self._models)[:NAMES_IN_A_MESSAGE])
        raise InvalidRequest(f"you must name a model; this server has {names}", param="model")


def _build(card: ModelCard, tokenizer_json: bytes, settings: CatalogSettings) -> ServedModel:
    tokenizer = Tokenizer.from_json(tokenizer_json, card.tokenizer_config)
    template = None
    if card.chat_template:
        template = ChatTemplate(card.chat_template, tokenizer.special_tokens, tokenizer.control_tokens)
    return ServedModel(
        card=card,
        tokenizer=tokenizer,
        template=template,
        tool_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
