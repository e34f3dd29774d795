"""From a body to an answer: translate, submit or attach, follow, render. The same for chat and completions.

Order of side effects: a place in this process is taken first, then the body is translated, then the request is put
into the log, then the answer begins. Whatever is undone when it goes wrong stands on the `ExitStack` in that order:
the place is given back, the reader closed (which cancels a request that nobody waits for any more).
"""

from __future__ import annotations

import hashlib
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from common.errors import HeadraceError, InvalidRequest, StreamExpired
from common.telemetry.genai import request_attributes
from common.transport import Duplicate, RequestPhase
from edge.body import read_body, watching
from edge.delivery import RUNS_WITHOUT_READER, Delivery, delivery_of
from edge.dependencies import INLINE_BYTES, QUICK_BYTES, Services, services_of
from edge.errors import Draining, error_document
from edge.http_protocol import direct_body
from edge.queue_watch import QueueWatch
from edge.reader import GenerationReader
from edge.request_context import RequestContext, context_of
from edge.request_status import known_to, status_document
from edge.sse import HANDED_OVER, EventStream, StreamHandedOver, frame_bare
from edge.stream_body import DocumentBody, StreamBody
from edge.translate.requests import (
    Admission,
    Translated,
    TranslationLimits,
    is_plain,
    is_plain_chat,
    parse_chat,
    parse_completion,
    translate_chat,
    translate_completion,
)
from edge.translate.responses import DONE, AnswerBuilder, StreamRenderer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from starlette.requests import Request

    from common.events import EngineRequest
    from common.tokenization.tokenizer import Tokenizer
    from common.transport import Attached


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the two ways to ask for a generation."""

    name: str  # label of metrics
    operation: str  # in the words of the GenAI conventions
    parse: Callable[[bytes], Any]
    translate: Callable[..., Translated]
    is_plain: Callable[[Any], bool]  # no schema or grammar, which may take long to build


CHAT: Final = Endpoint("chat", "chat", parse_chat, translate_chat, is_plain_chat)
COMPLETION: Final = Endpoint("completion", "text_completion", parse_completion, translate_completion, is_plain)


async def create(request: Request, endpoint: Endpoint) -> Response:
    """Answers POST /v1/chat/completions or /v1/completions. Raises every error of `edge.errors`, and `ClientGone`."""
    services, context = services_of(request), context_of(request.scope)
    _refuse_when_closed(services)
    delivery = delivery_of(request.headers, services.streams, is_idempotent=context.is_idempotent)
    tally = services.occupancy.tally(context.tenant)
    raw = await read_body(request, services.limits, tally)
    with ExitStack() as undo:
        undo.callback(tally.give, len(raw))
        _take_place(services, context.tenant, undo)
        with services.tracing.span("validate"):
            body = await _parse(services, endpoint, raw)
            model = await services.catalog.serving(body.model)
        if body.background:
            delivery = replace(delivery, grace_s=RUNS_WITHOUT_READER)
        admission = _admission(services, context, delivery, request, is_stream=bool(body.stream))
        started = time.perf_counter()
        with services.tracing.span("render"):

            def translate() -> tuple[Translated, str]:
                fingerprint = hashlib.sha256(endpoint.name.encode() + b"\n" + raw).hexdigest()
                return endpoint.translate(body, model, admission, _limits(services)), fingerprint

            is_quick = len(raw) <= QUICK_BYTES and endpoint.is_plain(body)
            translated, fingerprint = translate() if is_quick else await services.in_thread(translate)
        services.metrics.render_seconds.observe(time.perf_counter() - started)
        if translated.ignored:
            context.outcome["ignored_parameters"] = list(translated.ignored)[:20]
        spec, reader = await _admit(services, context, translated, delivery, endpoint, fingerprint)
        undo.callback(reader.close)
        if body.background and not translated.stream:
            reader.goes_on_as("accepted")
            return await accepted(services, spec.request_id)
        answer = _Answer(services, context, spec, model.tokenizer, reader, delivery)
        if translated.stream:
            return await answer.as_stream(request, undo)
        return await answer.as_document(request)


async def accepted(services: Services, request_id: str) -> Response:
    """202: the request is in the log, runs to its end whoever reads it, and can be read at /v1/streams."""
    status = await status_document(services, request_id)
    return Response(status, 202, {"X-Headrace-Request-Id": request_id}, media_type="application/json")


async def resume(request: Request, request_id: str, delivery: Delivery, *, whole: bool = False) -> Response:
    """Answers GET /v1/streams/{request_id}: the stream of a request from any position, by any edge; or, ``whole``, its
    answer as one document, once there is one."""
    services, context = services_of(request), context_of(request.scope)
    _refuse_when_closed(services)
    with ExitStack() as undo:
        _take_place(services, context.tenant, undo)
        known = await known_to(services, context.tenant, request_id)  # a stranger leaves no reader behind
        spec = known.spec
        _refuse_beyond(delivery, known)
        follower = services.relay.follow(request_id, from_log=True, tally=services.occupancy.tally(context.tenant))
        undo.callback(services.relay.leave, follower)
        await services.relay.attach(follower)
        model = await services.catalog.known(spec.model)
        reader = GenerationReader(services, context, spec, follower, ends_with_reader=False, endpoint="stream")
        undo.callback(reader.close)
        services.metrics.resumed_streams.inc()
        answer = _Answer(services, context, spec, model.tokenizer, reader, delivery)
        if whole:
            return await answer.as_document(request)
        return await answer.as_stream(request, undo, is_over=known.phase is RequestPhase.DONE)


class _Answer:
    """One answer in one of its two forms."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        spec: EngineRequest,
        tokenizer: Tokenizer,
        reader: GenerationReader,
        delivery: Delivery,
    ) -> None:
        self._services = services
        self._context = context
        self._spec = spec
        self._tokenizer = tokenizer
        self._reader = reader
        self._delivery = delivery
        self._watch = QueueWatch(services.reading, spec.request_id, with_ids=delivery.with_ids)
        # A scored prompt takes tens of microseconds a token to write down: seconds, for long ones of several choices.
        self._is_heavy = spec.sampling.prompt_logprobs is not None

    async def as_stream(self, request: Request, undo: ExitStack, *, is_over: bool = False) -> Response:
        """Server-sent events, once a worker has taken the request up (or the hold is over). Of a request that
        ``is_over`` a place behind its end is refused with `InvalidRequest`; else that is told in the stream."""
        renderer = StreamRenderer(self._spec, self._tokenizer, after=self._delivery.after)
        direct = None if self._is_heavy else direct_body(request.scope)
        body = StreamBody(renderer, self._delivery, direct)
        await self._reader.started(request, self._services.streams.first_frame_hold_s)
        headers = {"X-Headrace-Request-Id": self._spec.request_id} if self._delivery.with_ids else {}
        if self._delivery.with_queue_status:
            headers |= await self._watch.headers()
        rendered = self._rendered(body)
        first = await anext(rendered, b"") if is_over and self._delivery.is_resumed else b""
        return EventStream(
            self._blocks(first, rendered),
            self._services.streams,
            with_ids=self._delivery.with_ids,
            headers=headers,
            on_close=undo.pop_all().close,
            on_hang_up=self._reader.client_gone,
            direct=direct,
        )

    async def as_document(self, request: Request) -> Response:
        """The whole answer as one JSON document. Raises what failed the request, and `ClientGone`."""
        builder = AnswerBuilder(self._spec, self._tokenizer)
        try:
            with watching(request, self._reader.client_gone):
                await self._collect(builder)
        except HeadraceError as error:
            self._reader.fail(error)
            raise
        return Response(await self._written(builder.body), media_type="application/json")

    async def _written(self, write: Callable[[], bytes]) -> bytes:
        """What ``write`` gives; beside the event loop where that would keep other streams waiting."""
        return await self._services.in_thread(write) if self._is_heavy else write()

    async def _collect(self, builder: AnswerBuilder) -> None:
        body = DocumentBody(builder)
        while not builder.ended:
            body.take(await self._reader.next(body))

    async def _rendered(self, body: StreamBody) -> AsyncGenerator[bytes]:
        """What does not go to the connection directly. One write for all events that are there, however many."""
        while not body.ended:
            events = await self._reader.next(body)
            block = await self._written(partial(body.block, events))
            if block:
                yield block
        if body.num_missing:
            raise InvalidRequest(
                f"{self._delivery.named}: the stream has {body.num_missing} chunks fewer", param=self._delivery.named
            )

    async def _blocks(self, first: bytes, rendered: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """``first`` and ``rendered``, with what is said around them."""
        delivery = self._delivery
        is_resumable = delivery.with_ids and self._reader.may_be_handed_over()
        try:
            if first:
                yield first
            if delivery.with_queue_status:
                async for comment in self._watch.comments(self._reader.is_silent):
                    yield comment
            async for block in rendered:
                yield block
        except HeadraceError as error:
            if is_resumable and isinstance(error, Draining):
                self._reader.goes_on_as("handed_over")
                yield HANDED_OVER
                raise StreamHandedOver from error
            self._reader.fail(error)
            yield frame_bare([error_document(error, self._context.shown_id), DONE])


async def _admit(
    services: Services,
    context: RequestContext,
    translated: Translated,
    delivery: Delivery,
    endpoint: Endpoint,
    fingerprint: str,
) -> tuple[EngineRequest, GenerationReader]:
    """The request in the log, new or found there, and a reader of it. The reader is there first: no frame is missed."""
    request = translated.request
    if delivery.is_resumed:  # what is gone is not begun again: its beginning would be another one than the client's
        await services.reading.status(request.request_id)
    if context.span is not None and services.tracing.enabled:
        for key, value in request_attributes(request, endpoint.operation, is_stream=translated.stream).items():
            context.span.set_attribute(key, value)
    with ExitStack() as undo, services.tracing.span("submit"):
        request = msgspec.structs.replace(request, trace=services.tracing.inject())
        tally = services.occupancy.tally(context.tenant)
        follower = services.relay.follow(request.request_id, from_log=False, tally=tally)
        undo.callback(services.relay.leave, follower)

        async def submit() -> object:
            return await services.submitter.submit(request, fingerprint=fingerprint, grace_s=delivery.grace_s)

        outcome = await submit()
        spec = request
        if isinstance(outcome, Duplicate):
            attached = await services.relay.attach(follower)
            _refuse_beyond(delivery, attached)
            spec = attached.spec
            context.outcome["attached"] = True
            services.metrics.resumed_streams.inc(delivery.is_resumed)
        reader = GenerationReader(
            services, context, spec, follower, ends_with_reader=delivery.ends_with_reader, endpoint=endpoint.name
        )
        reader.resubmit_with(submit)
        undo.pop_all()
        return spec, reader


def _refuse_beyond(delivery: Delivery, attached: Attached) -> None:
    """Behind the end of what is over is nothing and never was; what still runs may have lost its tail in a failover."""
    if delivery.after <= attached.last_n:
        return
    said = f"{delivery.named}: position {delivery.after} is beyond the log, which ends at {attached.last_n}"
    if attached.phase is RequestPhase.DONE:
        raise InvalidRequest(f"{said}.", param=delivery.named)
    raise StreamExpired(
        f"{said} and is still being written: either nobody was given that position, or what stood there was lost in a "
        "failover. Read the stream again from a place that it has, or from its beginning.",
        param=delivery.named,
    )


def _refuse_when_closed(services: Services) -> None:
    if services.lifecycle.is_closed:
        raise Draining("This server is shutting down.", retry_after_s=1.0)


def _take_place(services: Services, tenant: str, undo: ExitStack) -> None:
    services.occupancy.take_generation(tenant)
    undo.callback(services.occupancy.give_generation, tenant)
    services.metrics.requests_in_flight.inc()
    undo.callback(services.metrics.requests_in_flight.dec)


async def _parse(services: Services, endpoint: Endpoint, raw: bytes) -> Any:
    if len(raw) <= INLINE_BYTES:
        return endpoint.parse(raw)
    return await services.in_thread(lambda: endpoint.parse(raw))


def _admission(
    services: Services, context: RequestContext, delivery: Delivery, request: Request, *, is_stream: bool
) -> Admission:
    patience_s = min(services.limits.request_timeout_s, delivery.deadline_s or math.inf)
    if not is_stream and delivery.ends_with_reader:
        # OpenAI's SDKs say how long they will wait; after that they are gone, and the same POST comes again.
        announced = request.headers.get("x-stainless-read-timeout", "")
        if announced.isascii() and announced.replace(".", "", 1).isdigit() and float(announced[:10]) > 0:
            patience_s = min(patience_s, float(announced[:10]))
    return Admission(
        request_id=context.request_id,
        arrival_s=context.arrival_s,
        deadline_s=context.arrival_s + patience_s,
        tenant=context.tenant,
        weight=services.limits.tenant_weights.get(context.tenant, 1.0),
        priority=delivery.priority,
    )


def _limits(services: Services) -> TranslationLimits:
    limits = services.limits
    return TranslationLimits(
        compat=services.api.compat,
        max_choices=limits.max_choices,
        max_prompts=limits.max_prompts,
        max_logprobs=limits.max_logprobs,
    )
