"""The ASGI application of the query service: routes, start and end, errors, protection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from embedder.plugins.serve import hand_on_routes, info_routes, item_routes, search_routes
from embedder.plugins.serve.item_paths import WholeItemIds
from embedder.plugins.serve.openapi import describe
from embedder.plugins.serve.page_files import PageFiles, docs_page
from embedder.plugins.serve.protection import ProtectedApp
from embedder.plugins.serve.serve_errors import HANDLERS
from embedder.plugins.serve.serve_metrics import ObservedApp
from embedder.plugins.serve.serve_settings import ServeSettings
from embedder.plugins.serve.service import Service


def create_app(settings: ServeSettings) -> ASGIApp:
    """Make the application of one server, with its protection; ConfigError if the token file can't be used."""
    return add_limits(create_routes(settings), settings)


def add_limits(routes: FastAPI, settings: ServeSettings) -> ASGIApp:
    """Wrap the routes in limits and measurements; ConfigError if the token file can't be used."""
    return ObservedApp(ProtectedApp(routes, settings), routes)


def create_routes(settings: ServeSettings) -> FastAPI:
    """Make the application without its protection; while it runs, `app.state.service` is its state."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            service = app.state.service = Service(settings)
        except Exception as error:
            app.state.problem = error
            raise
        try:
            await service.start()
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="embedder serve",
        version=version("embedder"),
        description="Search of the images and videos of one store.",
        lifespan=lifespan,
        exception_handlers=HANDLERS,
        middleware=[Middleware(WholeItemIds)],
        redoc_url=None,
        docs_url=None,
        redirect_slashes=False,
    )
    for routes in (search_routes, item_routes, hand_on_routes, info_routes):
        app.include_router(routes.router)
    app.openapi = cache(lambda: describe(app))  # type: ignore[method-assign]  # FastAPI's own way
    page = PageFiles()
    for path in ("/", "/page/{name}"):
        app.add_route(path, page.answer, ["GET"], include_in_schema=False)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    return app
