"""Puts the api together: settings and a model folder in, an ASGI app out. Owns what lives as long as the process
(engine channels, store, background tasks) and how every failure becomes a response."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from services.api import anthropic_routes, responses_routes, routes, text_routes
from services.api.ahead import Ahead
from services.api.chat import Chats
from services.api.config import ApiConfig, variable
from services.api.disk import Disk
from services.api.engines import Engines
from services.api.errors import ApiError, InvalidRequest, MethodNotAllowed, NotFound
from services.api.exchange import Exchange
from services.api.logs import EXTRA
from services.api.metrics import Metrics
from services.api.middleware import REQUEST_ID, Guarded, Observed, error_response
from services.api.model_folder import ModelFolder, load_model_folder
from services.api.naming import Naming
from services.api.openapi import publish
from services.api.records import RecordMemory
from services.api.responses_memory import ResponseMemory
from services.api.retries import Retries
from services.api.saving import Saving
from services.api.snapshots import Snapshots
from services.api.spilling import Spilling
from services.api.store import Store
from services.api.usage import StoreUsage

log = logging.getLogger(__name__)


def build_app(config: ApiConfig, redis_url: str, reader_url: str = "") -> FastAPI:
    """`redis_url` is where the store really is: config.redis_url, or the embedded server's; `reader_url` is for who may
    only read there. Raises ModelFolderError, SettingError, and OSError for a disk folder that cannot be used."""
    folder = load_model_folder(config.model_dir)
    api_key = config.read_api_key()
    metrics = Metrics(version("thimble"))
    disk = _open_disk(config) if redis_url else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = None
        if redis_url:
            store = Store(redis_url, config.redis_timeout_ms / 1000, config.snapshot_ttl_s, reader_url)
        engines = Engines(config.engine_addresses)
        usage = StoreUsage(store, metrics) if store else None
        app.state.chats = chats = _build_chats(config, folder, engines, store, metrics, disk)
        app.state.responses = responses = ResponseMemory()
        app.state.retries = retries = Retries()
        try:
            yield
        finally:
            retries.close()
            await responses.close()
            if chats.ahead is not None:
                await chats.ahead.close()
            await chats.saving.close(config.stop_timeout_s)
            await engines.close()
            if usage:
                await usage.close()
            if store:
                await store.close()

    app = FastAPI(
        title="Thimble",
        version=version("thimble"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for module in (routes, text_routes, anthropic_routes, responses_routes):
        app.include_router(module.router)
    publish(app)
    app.state.ping_interval_s = config.ping_interval_s

    def told(error: Exception) -> ApiError:
        """What a client is told of any failure; of our own bugs no more than that there was one."""
        found = (
            error if isinstance(error, ApiError) else ApiError("something went wrong inside the server; see its log")
        )
        metrics.errors[found.code,].inc()
        if found is not error:
            log.error("a request failed by our own fault", exc_info=error)
        elif found.status >= 500:
            log.warning("%s", found, extra={EXTRA: {"code": found.code}})
        return found

    async def api_error(request: Request, error: Exception) -> Response:
        return error_response(told(error), request.url.path)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            found: ApiError = MethodNotAllowed(f"{place}: another method is needed here")
        elif error.status_code == 404:
            found = NotFound(f"there is no {place} on this server")
        else:
            found = InvalidRequest(str(error.detail))
        response = await api_error(request, found)
        response.headers.update(error.headers or {})
        return response

    app.state.on_error = told
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    # The last one added is the outermost.
    app.add_middleware(Guarded, api_key=api_key, max_body_bytes=config.max_body_bytes, metrics=metrics)
    if config.cors_origin_list:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin_list,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    app.add_middleware(Observed, metrics=metrics, on_error=told)
    return app


def _open_disk(config: ApiConfig) -> Disk | None:
    if not config.snapshot_disk_dir:
        return None
    sizes = (int(config.snapshot_disk_gb * 1e9), int(config.snapshot_disk_daily_gb * 1e9))
    try:
        return Disk(Path(config.snapshot_disk_dir), *sizes, config.snapshot_ttl_s)
    except OSError as error:
        what = f"{error.filename or config.snapshot_disk_dir}: {error.strerror}" if error.strerror else str(error)
        raise OSError(f"{variable('snapshot_disk_dir')}: {what}; give a folder that is the api's own") from error


def _build_chats(
    config: ApiConfig, folder: ModelFolder, engines: Engines, store: Store | None, metrics: Metrics, disk: Disk | None
) -> Chats:
    memory = RecordMemory()
    exchange = Exchange(config.exchange_dir)
    spilling = Spilling(disk, store, metrics, config.snapshot_disk_rest_s) if disk and store else None
    naming = Naming()
    cuts = (config.snapshot_min_tokens, config.snapshot_every_tokens)
    snapshots = Snapshots(folder, store, memory, metrics, *cuts, exchange, naming, spilling)
    saving = Saving(folder, store, memory, metrics, config.snapshot_writes, config.snapshot_write_s, naming, spilling)
    ahead = Ahead(folder, snapshots, saving, metrics, config.request_timeout_s) if config.read_ahead else None
    limits = (config.default_max_tokens, config.request_timeout_s)
    return Chats(folder, engines, snapshots, saving, ahead, metrics, *limits, may_fetch=config.fetch_pictures)
