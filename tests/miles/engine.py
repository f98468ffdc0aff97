"""A stub of the inference engine: answers chat completions as SGLang does, without a model.

Like SGLang behind Miles' session server it

- takes the prompt as token ids (``input_ids``) and answers with the ids and logprobs of what it generated
  (``meta_info.output_token_logprobs``), the end-of-turn token included;
- parses tool calls out of the generated text with SGLang's own parser, only if one is configured
  (``--sglang-tool-call-parser``), and builds its answer with SGLang's own classes;
- refuses a prompt that does not fit into the context, with the words of
  sglang/srt/managers/tokenizer_manager.py, by which agents know it.

What is said comes from policies.py. Which policy plays, and for which episode, stands in the conversation: see ``ask``.
"""

import asyncio
import copy
import re
import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from local_stack.environment_policy import find_row
from local_stack.scripted_policy import UnknownTask, find_task
from pydantic import TypeAdapter
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    ErrorResponse,
    FunctionResponse,
    Tool,
    ToolCall,
    UsageInfo,
)
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from .policies import POLICIES, Reply, Task, turns
from .tokenizer import END_OF_TURN

_MARK = re.compile(r"\[policy (\S+), episode (\S+)\]")
_MAX_REQUEST_BYTES = 2**26
WEIGHT_VERSION = "7"


def ask(task: Task, policy: str, episode: str) -> Task:
    """A task for one episode that a policy plays: the statement says so, since nothing else reaches the engine.

    Args:
        task: SWE-bench instance or NeMo Gym row.
        policy: key of ``POLICIES``.
        episode: key of ``Engine.calls``.
    """
    mark = f"\n\n[policy {policy}, episode {episode}]"
    if "responses_create_params" not in task:
        return {**task, "problem_statement": task["problem_statement"] + mark}
    marked = copy.deepcopy(task)
    first = next(item for item in marked["responses_create_params"]["input"] if item.get("role") == "user")
    first["content"] += mark
    return marked


@dataclass
class Call:
    """One answered request: what went in, what was said, which tokens it was, and how the request was answered."""

    prompt_ids: list[int]
    parameters: dict[str, Any]
    messages: list[dict[str, Any]]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: int = 200


class Engine:
    """The engine as an aiohttp application.

    Args:
        tokenizer: of the checkpoint.
        tasks: SWE-bench instances with their gold patches, NeMo Gym rows, or both.
        tool_call_parser: name of SGLang's parser; None leaves tool calls in the text, as SGLang does by default.
        context_length: tokens of prompt and reply together.
    """

    def __init__(
        self,
        tokenizer: Any,
        tasks: list[Task],
        *,
        tool_call_parser: str | None = "qwen25",
        context_length: int = 1 << 20,
    ) -> None:
        self._tokenizer = tokenizer
        self._rows = [task for task in tasks if "responses_create_params" in task]
        self._tasks = [task for task in tasks if "responses_create_params" not in task]
        self._tool_call_parser = tool_call_parser
        self._context_length = context_length
        self._end_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.aborts = 0
        self.url = ""  # set by who serves it: routers list their engines
        self.app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        self.app.router.add_post("/v1/chat/completions", self._complete)
        self.app.router.add_post("/abort_request", self._abort)
        # A router in front of one engine.
        self.app.router.add_get("/list_workers", self._list_workers)
        self.app.router.add_get("/workers", self._list_workers)

    def accepted(self, episode: str) -> list[Call]:
        """The calls of an episode that were answered with 200, in order."""
        return [call for call in self.calls[episode] if call.status == 200]

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        parsed = ChatCompletionRequest.model_validate(body)
        if not (body.get("input_ids") and parsed.logprobs and body.get("return_meta_info")):
            return _error(400, "expected input_ids, logprobs and return_meta_info: the session server sends them")
        policy, episode = _marked(body["messages"])
        call = Call(
            prompt_ids=body["input_ids"],
            parameters={key: value for key, value in body.items() if key not in ("messages", "tools", "input_ids")},
            messages=body["messages"],
        )
        reply = POLICIES[policy](self._find(body["messages"]), body["messages"])
        if reply.hangs:
            await asyncio.Event().wait()
        if reason := self._does_not_fit(call):
            reply = Reply(status=400)
        call.status = reply.status
        self.calls[episode].append(call)
        if call.status != 200:
            return _error(call.status, reason or f"the stub engine plays an error in turn {turns(body['messages'])}")
        finish = self._generate(call, reply)
        return web.json_response(self._answer(call, parsed, finish).model_dump())

    def _find(self, messages: list[dict[str, Any]]) -> Task:
        try:
            return find_row(self._rows, messages)
        except UnknownTask:
            return find_task(self._tasks, messages)

    def _does_not_fit(self, call: Call) -> str:
        prompt, limit = len(call.prompt_ids), self._context_length
        if prompt >= limit:
            return f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens)."
        asked = call.parameters.get("max_tokens") or 0
        if prompt + asked > limit:
            return (
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {prompt + asked} tokens: {prompt} tokens from the input messages and {asked} tokens for the "
                "completion."
            )
        return ""

    def _generate(self, call: Call, reply: Reply) -> str:
        """Fill in what was generated; returns why it ended."""
        ids = self._tokenizer.encode(reply.text, add_special_tokens=False)
        finish = reply.finish
        if finish == "stop":
            ids.append(self._end_id)
        left = self._context_length - len(call.prompt_ids)
        limit = min(call.parameters.get("max_tokens") or left, left)
        if len(ids) > limit:
            ids, finish = ids[:limit], "length"
        call.token_ids = ids
        call.text = self._tokenizer.decode(ids)
        call.logprobs = [-0.01 * (1 + position % 50) for position in range(len(ids))]
        return finish

    def _answer(self, call: Call, request: ChatCompletionRequest, finish: str) -> ChatCompletionResponse:
        content, tool_calls = self._parse(call.text.removesuffix(END_OF_TURN), request.tools)
        if tool_calls and finish == "stop":
            finish = "tool_calls"
        identifier = secrets.token_hex(16)
        choice = ChatCompletionResponseChoice(
            index=0,
            message=ChatMessage(role="assistant", content=content, tool_calls=tool_calls or None),
            finish_reason=finish,
            meta_info={
                "id": identifier,
                "finish_reason": {"type": finish},
                "prompt_tokens": len(call.prompt_ids),
                "completion_tokens": len(call.token_ids),
                "cached_tokens": 0,
                "weight_version": WEIGHT_VERSION,
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(call.logprobs, call.token_ids, strict=True)
                ],
            },
        )
        usage = UsageInfo(
            prompt_tokens=len(call.prompt_ids),
            completion_tokens=len(call.token_ids),
            total_tokens=len(call.prompt_ids) + len(call.token_ids),
        )
        return ChatCompletionResponse(id=identifier, model=request.model, choices=[choice], usage=usage)

    def _parse(self, text: str, tools: list[Tool] | None) -> tuple[str, list[ToolCall]]:
        if not tools or self._tool_call_parser is None:
            return text, []
        parser = FunctionCallParser(TypeAdapter(list[Tool]).validate_python(tools), self._tool_call_parser)
        content, items = parser.parse_non_stream(text)
        calls = [
            ToolCall(
                id=f"call_{secrets.token_hex(12)}",
                index=item.tool_index,
                function=FunctionResponse(name=item.name, arguments=item.parameters),
            )
            for item in items
        ]
        return content, calls

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        return web.json_response({"success": True})

    async def _list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({"urls": [self.url], "workers": [{"url": self.url}]})


def _marked(messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The policy and the episode that ``ask`` named."""
    for message in messages:
        if message.get("role") == "user" and (mark := _MARK.search(str(message.get("content")))):
            return mark[1], mark[2]
    raise web.HTTPBadRequest(text="the conversation names no policy")


def _error(status: int, message: str) -> web.Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return web.json_response(ErrorResponse(message=message, type=kind, code=status).model_dump(), status=status)
