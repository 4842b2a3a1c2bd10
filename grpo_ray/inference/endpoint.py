"""OpenAI-compatible HTTP endpoint of the engine, through which programs of the user sample the turns of their rows.

Each row has a program of its own: a function in a thread, which may start processes. Requests go to the engine in
rounds, as with tools: a round begins when every running program waits for an answer, and takes the requests in the
order of the rows. The sampled tokens therefore do not depend on the order in which requests arrive.

Starlette routes the requests, and uvicorn serves them in a thread. That thread only parses requests and refuses invalid
ones; tokenization and generation run in the thread that called the rollout function.
"""

import asyncio
import json
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from grpo_ray.inference.chat_requests import (
    MODEL,
    TOO_LONG,
    ChatRequest,
    RefusedRequest,
    read_chat_request,
    require_continuation,
)
from grpo_ray.inference.trajectories import EndpointAccess, Message, Trajectory, TrajectoryRules
from grpo_ray.loopback import ADDRESS, UVICORN_OPTIONS

if TYPE_CHECKING:
    from grpo_ray.inference.rollout_function import RolloutPolicy

Program = Callable[[EndpointAccess], object]
"""Function that samples the turns of one row. Its result is ignored; the endpoint raises its exception again."""

MAX_BYTES = 4 * 2**20
"""Largest body of a request. A conversation of 100,000 tokens takes about 0.5 MB."""
READ_SECONDS = 30
"""Seconds within which the body of a request must arrive."""
STOP_SECONDS = 1
"""Seconds that unfinished responses get when the endpoint is closed."""
CONNECTIONS = 4
"""Connections per program. The limit on all of them is for the running programs and this number of further ones; above
it, requests get status 503."""
CLOSED = "the endpoint is closed: the row's program has ended, or another one has failed"


@dataclass(eq=False)
class _Session:
    """State of a row's conversation. Used by the thread of the rollout function only."""

    place: int
    access: EndpointAccess
    history: list[Message] = field(default_factory=list)
    """Messages with which the next request must begin."""
    reply: Future[Mapping[str, Any]] | None = None
    """Future of the answer while a request waits for its round; None otherwise."""
    max_tokens: int | None = None
    turns: int = 0
    ended: bool = False


class Endpoint:
    """Endpoint for one program per row."""

    def __init__(
        self,
        policy: "RolloutPolicy",
        trajectories: Sequence[Trajectory],
        *,
        rules: TrajectoryRules,
        sampling: Mapping[str, Any],
        at_once: int,
    ) -> None:
        """Bind a free port.

        Args:
            trajectories: an empty one for each row; their prompts are replaced by those of the first requests.
            rules: conditions that prompts must meet.
            sampling: arguments of `vllm.SamplingParams` with which the policy samples.
            at_once: maximum number of programs that run at the same time.
        """
        self.policy, self.rules, self.sampling = policy, rules, sampling
        self.at_once = min(at_once, len(trajectories))
        self.socket = socket.create_server((ADDRESS, 0))
        self.base_url = f"http://{ADDRESS}:{self.socket.getsockname()[1]}/v1"
        keys = [secrets.token_urlsafe(32) for _ in trajectories]
        self._sessions = {
            key: _Session(place, EndpointAccess(self.base_url, key, trajectory))
            for place, (key, trajectory) in enumerate(zip(keys, trajectories, strict=True))
        }
        """Session of each key, in the order of the rows."""
        self._events: queue.SimpleQueue[tuple[_Session, ChatRequest | None, Future[Any]]] = queue.SimpleQueue()
        """Requests with the futures of their answers; ended programs, with None as request and the program's future."""
        self._is_closed = False
        server = uvicorn.Config(
            Starlette(
                routes=[
                    Route("/v1/chat/completions", self._complete, methods=["POST"]),
                    Route("/v1/models", self._list_models, methods=["GET"]),
                ],
                exception_handlers={RefusedRequest: _show_refusal, HTTPException: _show_refusal},
            ),
            limit_concurrency=CONNECTIONS * (self.at_once + CONNECTIONS),
            timeout_graceful_shutdown=STOP_SECONDS,
            **UVICORN_OPTIONS,
        )
        self._server = uvicorn.Server(server)
        self._thread = threading.Thread(
            target=self._server.run, args=([self.socket],), name="rollout-endpoint", daemon=True
        )

    def run(self, program: Program) -> list[Trajectory]:
        """Run the program of each row, answer the requests, and close the endpoint.

        Returns:
            The trajectory of each row.

        Raises:
            BaseException: error of a program; if several failed, that of the first row.
        """
        sessions = list(self._sessions.values())
        pool = ThreadPoolExecutor(self.at_once, thread_name_prefix="rollout-program")
        self._thread.start()
        try:
            for session in sessions:
                pool.submit(program, session.access).add_done_callback(partial(self._note_end, session))
            self._answer_until_ended(sessions)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._close()  # before waiting for programs, which may be waiting for answers
            pool.shutdown()
        return [session.access.trajectory for session in sessions]

    def _note_end(self, session: _Session, ended: Future[Any]) -> None:
        self._events.put((session, None, ended))

    def _answer_until_ended(self, sessions: Sequence[_Session]) -> None:
        """Answer requests in rounds until all programs have ended, or one has failed."""
        failures: dict[int, BaseException] = {}
        running = len(sessions)
        while running:
            session, request, future = self._events.get()
            self.policy.note_progress()
            if request is not None:
                self._take(session, request, future)
            else:
                running -= 1
                session.ended = True
                self._refuse_waiting(session)
                if error := future.exception():
                    failures[session.place] = error
            waiting = [each for each in sessions if each.reply is not None]
            if len(waiting) < min(self.at_once, running):
                continue
            if failures:  # only between rounds, so that the error does not depend on the programs' speed
                raise failures[min(failures)]
            if waiting:
                self._run_round(waiting)

    def _take(self, session: _Session, request: ChatRequest, reply: Future[Any]) -> None:
        """Append the request's new messages to the trajectory, or refuse the request."""
        try:
            if session.ended:
                raise RefusedRequest(CLOSED, status=410)
            if session.reply is not None:
                raise RefusedRequest("another request of this key waits for its answer; make them one after another")
            self._extend(session.access.trajectory, session.history, request.messages)
        except RefusedRequest as refused:
            reply.set_exception(refused)
        else:
            session.history, session.max_tokens, session.reply = request.messages, request.max_tokens, reply

    def _extend(self, trajectory: Trajectory, history: Sequence[Message], messages: list[Message]) -> None:
        """Set the prompt of a new trajectory, or append the last message. Raises RefusedRequest."""
        if history:
            if not self.policy.respond(trajectory, require_continuation(messages, history)["content"]):
                limits = "grpo.max_completion_length and the engine's context"
                raise RefusedRequest(
                    f"there is no space for another turn within {limits}, or max_tokens has cut off the last one",
                    "messages",
                    code=TOO_LONG,
                )
            return
        try:
            [prompt_ids] = self.policy.render([messages])
        except TemplateError as error:
            raise RefusedRequest(f"the chat template does not render these messages: {error}", "messages") from None
        if mistake := self.rules.prompt_mistake(prompt_ids):
            raise RefusedRequest(mistake, "messages", code=TOO_LONG)
        trajectory.prompt_ids = prompt_ids

    def _run_round(self, sessions: Sequence[_Session]) -> None:
        trajectories = [session.access.trajectory for session in sessions]
        starts = [len(each.context) for each in trajectories]
        most = self.policy.max_model_len
        self.policy.turn(trajectories, [session.max_tokens or most for session in sessions])
        for session, start in zip(sessions, starts, strict=True):
            reply, session.reply = session.reply, None
            assert reply is not None
            reply.set_result(self._answer(session, start))

    def _answer(self, session: _Session, start: int) -> dict[str, Any]:
        """Return the answer to a request, and add it to the history with which the next request must begin.

        Args:
            start: number of tokens before the turn.
        """
        trajectory = session.access.trajectory
        row = trajectory.row
        turn = trajectory.context[start:]
        text = self.policy.tokenizer.decode(turn, skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        session.history = [*session.history, message]
        session.turns += 1
        return {
            # No clock and no random number, since a program may depend on any field of the answer.
            "id": f"chatcmpl-{row.id}-{row.epoch}-{row.index}-{session.turns}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": "length" if trajectory.truncated else "stop",
                }
            ],
            "usage": {
                "prompt_tokens": start,
                "completion_tokens": len(turn),
                "total_tokens": start + len(turn),
            },
        }

    def _refuse_waiting(self, session: _Session) -> None:
        if session.reply is not None:
            session.reply.set_exception(RefusedRequest(CLOSED, status=410))
            session.reply = None

    def _close(self) -> None:
        """Refuse the waiting requests, close the port, and wait for the thread of the server."""
        self._is_closed = True
        for session in self._sessions.values():
            self._refuse_waiting(session)
        while not self._events.empty():
            _, request, reply = self._events.get()
            if request is not None:
                reply.set_exception(RefusedRequest(CLOSED, status=410))
        self._server.should_exit = True
        self._thread.join()

    # The methods below run in the thread of the server.

    async def _complete(self, request: Request) -> Response:
        session = self._authorized(request)
        chat = read_chat_request(await _read_body(request), self.sampling)
        if self._is_closed:
            raise RefusedRequest(CLOSED, status=410)
        reply: Future[Mapping[str, Any]] = Future()
        reply.set_running_or_notify_cancel()  # a stopping server cannot cancel it while it is answered
        self._events.put((session, chat, reply))
        return _json(await asyncio.wrap_future(reply))

    async def _list_models(self, request: Request) -> Response:
        self._authorized(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo_ray"}
        return _json({"object": "list", "data": [model]})

    def _authorized(self, request: Request) -> _Session:
        """Return the session that the request's key belongs to. Called before the body is read."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key) if scheme.lower() == "bearer" else None
        if session is None:
            raise RefusedRequest("the API key is missing or wrong", status=401, code="invalid_api_key")
        return session


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    raise RefusedRequest(f"the body has more than {MAX_BYTES} bytes", status=413)
    except TimeoutError:
        raise RefusedRequest(f"the body has not arrived within {READ_SECONDS} s", status=408) from None
    return bytes(body)


async def _show_refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of Starlette: an unknown path or method
        error = RefusedRequest(error.detail, status=error.status_code)
    assert isinstance(error, RefusedRequest)
    # A body that has not been read must not be taken for the next request.
    return _json(error.body, error.status, {"Connection": "close"} if error.status in (401, 408, 413) else None)


def _json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers, media_type="application/json")  # in ASCII
