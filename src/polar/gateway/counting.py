"""How many tokens a request's prompt has, for harnesses that ask before they ask (`count_tokens`). Nothing is recorded."""

import asyncio

from polar.chat import ChatRequest
from polar.engines.protocol import CountsPrompts
from polar.engines.served import Served
from polar.errors import EngineRefusal, InvalidRequest, UnknownRoute
from polar.gateway.prompts import rendered
from polar.tokens.history import History
from polar.tokens.rendering import render_as_sent


async def count(request: ChatRequest, history: History, served: Served) -> int:
    """Tokens that `request` would send: of the policy's own rendering, or as its engine counts them.

    Raises:
        UnknownRoute: the engine renders, and counts nothing before it is asked: nobody could say a true number.
        InvalidRequest: the engine refuses to count it.
        EngineError: from the engine.
    """
    if served.renderer is None:
        if not isinstance(served.engine, CountsPrompts):
            raise UnknownRoute(f"tokens of a prompt are not counted here: {served.info.model} is rendered by its engine")
        try:
            return await served.engine.count_prompt(request)
        except EngineRefusal as error:
            raise InvalidRequest(str(error)) from error
    if not served.trains:
        return len(await asyncio.to_thread(served.renderer.render, request.messages, request.tools))
    if history.as_sent:
        return len(await asyncio.to_thread(render_as_sent, served.renderer, request.messages, request.tools))
    plan, ids = await rendered(history, history.plan(request.messages, request.tools), request.messages)
    return len(history.tree.path(plan.start)) + len(ids)
