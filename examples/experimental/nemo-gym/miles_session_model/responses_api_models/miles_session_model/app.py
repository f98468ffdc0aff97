"""A NeMo Gym model server that sends each episode's calls to that episode's Miles session.

``vllm_model`` with another answer to one question: which endpoint a call goes to. Conversion between the Responses, chat
and Anthropic APIs, tools, reasoning and sampling are the base class's. A call that belongs to no allowed session is
refused with HTTP 403 and the reason; nothing else is ever called.

NeMo Gym finds this server through NEMO_GYM_EXTRA_ROOTS, and configs/miles_session_model.yaml starts it.
"""

from typing import Any

from aiohttp import ClientConnectionError
from fastapi import HTTPException, Request
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
)
from nemo_gym.rollout_correlation import current_rollout_id
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from pydantic import PrivateAttr
from responses_api_models.miles_session_model.sessions import (
    AllowList,
    SessionRefused,
    restore_tool_call_indices,
    session_of,
)
from responses_api_models.vllm_model.app import ReasoningFieldMode, VLLMModel, VLLMModelConfig

# A pooled connection may be closed just as the next call is written to it. The session server rolls a repeated turn back.
_CONNECTION_ATTEMPTS = 3


class MilesSessionModelConfig(VLLMModelConfig):
    """``vllm_model``'s settings, without an endpoint of its own.

    Attributes:
        allowed_sessions: session servers that may be called; see ``AllowList``.
        uses_reasoning_parser: whether the engine has one (``--sglang-reasoning-parser``). Said wrongly, an assistant turn
            comes back to the session server in other words than it was recorded.
    """

    allowed_sessions: list[str]
    base_url: list[str] = []
    api_key: str = "EMPTY"
    model: str = "model"
    return_token_id_information: bool = False
    uses_reasoning_parser: bool = False
    reasoning_field: ReasoningFieldMode = "reasoning_content"  # the one that Miles compares


class MilesSessionModel(VLLMModel):
    """See the module."""

    config: MilesSessionModelConfig
    _allowed: AllowList = PrivateAttr()

    def _post_init(self) -> None:
        super()._post_init()
        self._allowed = AllowList(self.config.allowed_sessions)

    async def chat_completions(
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        """Answer with the session's own answer.

        Raises:
            HTTPException: 403 for a call of no allowed session, 502 where the session server cannot be reached.
        """
        try:
            return await super().chat_completions(request, body)
        except SessionRefused as error:
            raise HTTPException(403, f"{type(self).__name__}: {error}") from None
        except ClientConnectionError as error:
            raise HTTPException(502, f"{type(self).__name__}: no answer from the session server: {error}") from None

    def _preprocess_chat_completion_create_params(self, request: Request, body_dict: dict[str, Any]) -> dict[str, Any]:
        body = super()._preprocess_chat_completion_create_params(request, body_dict)
        restore_tool_call_indices(body["messages"], body.get("tools") or [])
        return body

    def _resolve_client(self, request: Request) -> NeMoGymAsyncOpenAI:
        # What a session server answers is final: behind it the trainer has tried again already.
        return NeMoGymAsyncOpenAI(
            base_url=session_of(current_rollout_id(), self._allowed).base_url,
            api_key=self.config.api_key,
            default_headers=self.config.default_headers,
            max_connection_retries=_CONNECTION_ATTEMPTS,
            max_http_attempts=1,
        )


if __name__ == "__main__":
    MilesSessionModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = MilesSessionModel.run_webserver()
