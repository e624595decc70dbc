"""Control routes of a gateway without tasks: open a session, freeze it, take its trajectory.

| route | answer |
|---|---|
| `POST /sessions` | `session_id`, `key`, `base_url`, `base_urls`; the body may give `task_id`, `sampling`, `profile`, … |
| `POST /sessions/{id}/freeze` | `{"session_id", "calls"}` |
| `GET /sessions/{id}/trajectory?builder=…&reward=…` | the trajectory in its published shape |
"""

import asyncio
import hmac
import math
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar.errors import PolarError, UnknownKey, UsageError
from polar.specs import BuilderName, HarnessProfile, ReasoningHistory, SamplingSpec
from polar.store.captured import read_captured
from polar.trajectory.builders import build
from polar.trajectory.export import trajectory_json

if TYPE_CHECKING:
    from polar.gateway.gateway import Gateway


class _Open(msgspec.Struct, forbid_unknown_fields=True):
    task_id: str = ""
    sampling: SamplingSpec = SamplingSpec()
    profile: HarnessProfile = HarnessProfile()
    reasoning_history: ReasoningHistory = "as_sampled"
    metadata: dict[str, str] = {}


class ControlApp(Starlette):
    """The routes, behind the control key."""

    def __init__(self, gateway: "Gateway", capture: Path, control_key: str) -> None:
        self._gateway = gateway
        self._capture = capture
        self._key = control_key
        super().__init__(
            routes=[
                Route("/sessions", self._open, methods=["POST"]),
                Route("/sessions/{session_id}/freeze", self._freeze, methods=["POST"]),
                Route("/sessions/{session_id}/trajectory", self._trajectory, methods=["GET"]),
            ],
            exception_handlers={PolarError: _refuse},
        )

    async def _open(self, request: Request) -> Response:
        self._authorise(request)
        body = await request.body()
        try:
            wanted = msgspec.json.decode(body, type=_Open) if body else _Open()
        except msgspec.DecodeError as error:
            raise UsageError(f"POST /sessions: {error}") from None
        opened = await self._gateway.sessions.open(
            task_id=wanted.task_id,
            profile=wanted.profile,
            sampling=wanted.sampling,
            reasoning_history=wanted.reasoning_history,
            metadata=wanted.metadata,
        )
        base = self._gateway.base_url(opened.key)
        urls = {"openai": f"{base}/v1", "anthropic": base, "gemini": base}
        return _json({"session_id": opened.session_id, "key": opened.key, "base_url": base, "base_urls": urls}, 201)

    async def _freeze(self, request: Request) -> Response:
        self._authorise(request)
        session = await self._gateway.sessions.freeze(request.path_params["session_id"])
        self._gateway.sessions.forget(session.session_id)  # its traces come from the file; its key stays known as closed
        return _json({"session_id": session.session_id, "calls": session.arrived})

    async def _trajectory(self, request: Request) -> Response:
        self._authorise(request)
        session = self._gateway.sessions.by_id(request.path_params["session_id"])
        if not session.frozen:
            raise UsageError(f"session {session.session_id} is open: freeze it first")
        builder = _builder(request)
        captured = await asyncio.to_thread(read_captured, self._capture, session.session_id)
        trajectory = build(captured, builder=builder, status="completed", reward=_reward(request), findings=session.findings())
        return _json(trajectory_json(trajectory))

    def _authorise(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._key.encode()):
            raise UnknownKey("the control key is missing or wrong")


def _builder(request: Request) -> BuilderName:
    value = request.query_params.get("builder", "prefix_merging")
    for name in get_args(BuilderName):
        if value == name:
            known: BuilderName = name
            return known
    raise UsageError(f"unknown builder {value!r}; there are {', '.join(get_args(BuilderName))}")


def _reward(request: Request) -> float | None:
    value = request.query_params.get("reward")
    try:
        reward = None if value is None else float(value)
    except ValueError:
        reward = math.nan
    if reward is not None and not math.isfinite(reward):
        raise UsageError(f"reward: expected a finite number, got {value!r}")
    return reward


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    status = 401 if isinstance(error, UnknownKey) else 400 if isinstance(error, UsageError) else 503
    return _json({"error": {"message": str(error), "type": type(error).__name__}}, status)
