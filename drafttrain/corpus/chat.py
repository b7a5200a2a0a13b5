"""Chat templates: prompts as a server renders them, and the exact loss mask of a conversation.

Where does an assistant turn begin? At the end of what a server would have sent: the conversation so far plus
the generation prompt. Where does it end? At the end-of-turn token, which the model has to emit itself.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, cast

from drafttrain.corpus.types import Message
from drafttrain.errors import DataError
from drafttrain.files import sha256_text

_PROBE_USER, _PROBE_ANSWER = "Qxq", "Zwz"


class ChatTokenizer(Protocol):
    """The part of a transformers (fast) tokenizer that the corpus uses."""

    name_or_path: str
    chat_template: Any
    eos_token_id: int | None
    is_fast: bool
    added_tokens_decoder: dict[int, Any]
    backend_tokenizer: Any

    def __call__(self, text: str, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        template_kwargs: extra template variables, such as `enable_thinking`.

    Raises:
        DataError: no template, no token offsets, or a template that shows or ends no assistant turn.
    """

    def __init__(self, tokenizer: ChatTokenizer, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template",
                where=tokenizer.name_or_path,
                remedy="use an instruction-tuned target, or put a chat_template.jinja beside its tokenizer",
            )
        if not tokenizer.is_fast:
            raise DataError(
                "the tokenizer gives no token offsets (not a fast one)", where=tokenizer.name_or_path
            )
        template = json.dumps(
            [tokenizer.chat_template, self.template_kwargs], sort_keys=True, ensure_ascii=False
        )
        self.template_hash = sha256_text(template)
        self.tokenizer_hash = sha256_text(tokenizer.backend_tokenizer.to_str())
        self.name = (
            f"chat template of {tokenizer.name_or_path or 'the tokenizer'} ({self.template_hash[:12]})"
        )
        self._probe()

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation. Raises DataError where the template refuses it."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.template_kwargs,
            )
        except (
            Exception
        ) as error:  # templates raise whatever they like: jinja errors, TypeError, raise_exception()
            raise DataError(f"the template refuses the conversation: {error}", where=self.name) from error
        return cast(str, text)

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids that a server feeds the model: `messages` and the generation prompt."""
        return self.encode(self.render(messages, tools, generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text. Templates write their own BOS, so no special tokens are added."""
        return cast(list[int], self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer_text(self, tokens: list[int], limit: int) -> tuple[str, bool]:
        """Text of generated tokens, and whether the model ended it (False: it was cut at `limit` tokens).

        A stop token at the end of `tokens` is optional. A character cut in the middle is left out.
        """
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        finished = stopped or len(tokens) < limit
        text = cast(str, self.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True))
        return (text if finished else text.rstrip("\ufffd")), finished

    def _probe(self) -> None:
        """Learn from a two-message conversation which token ends an assistant turn."""
        user = {"role": "user", "content": _PROBE_USER}
        text = self.render([user, {"role": "assistant", "content": _PROBE_ANSWER}])
        if _PROBE_ANSWER not in text:
            raise DataError(
                "the template never shows an assistant turn: the loss mask would be all 0",
                where=self.name,
                remedy="use a chat template that renders assistant messages",
            )
        special = set(self.tokenizer.added_tokens_decoder)
        if self.tokenizer.eos_token_id is not None:
            special.add(self.tokenizer.eos_token_id)
        after = self.encode(text[text.rindex(_PROBE_ANSWER) :])
        end = next((token for token in after if token in special), None)
        if end is None:
            raise DataError(
                "the template ends an assistant turn without a special token: a served model could not stop",
                where=self.name,
            )
        self.end_of_turn: int = end
        eos = self.tokenizer.eos_token_id
        self.stop_ids: frozenset[int] = frozenset({end} if eos is None else {end, eos})
        """Tokens at which generation ends: the template's end of turn and the tokenizer's EOS."""
