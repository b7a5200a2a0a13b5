"""Chat templates: prompts as a server renders them, and the exact loss mask of a conversation.

Where does an assistant turn begin? At the end of what a server would have sent: the conversation so far plus
the generation prompt. Where does it end? At the end-of-turn token, which the model has to emit itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import date
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from drafttrain.corpus.mask import TemplateTraits, lay_out
from drafttrain.corpus.tool_calls import as_rendered
from drafttrain.corpus.types import Conversation, Message, Reject, Sample
from drafttrain.errors import DataError
from drafttrain.files import sha256_text

TODAY = date(2024, 7, 26)
"""The day that templates are told which ask for it: data must not depend on when it was rendered."""
_CLOCK = "strftime_now"
_DIRECTIVES = (*"aAbBdeHIjmMpSyY", "-d", "-m")
_DATE = (
    f"{{%- macro {_CLOCK}(format) -%}}{{{{ format"
    + "".join(f" | replace('%{code}', '{TODAY.strftime('%' + code)}')" for code in _DIRECTIVES)
    + " }}{%- endmacro %}\n"
)
"""Before a template, in place of the clock that transformers gives it."""
_PROBE_USER, _PROBE_ANSWER = "Qxq", "Zwz"


class ChatTokenizer(Protocol):
    """The part of a transformers (fast) tokenizer that the corpus uses."""

    name_or_path: str
    chat_template: Any
    eos_token_id: int | None
    is_fast: bool
    added_tokens_decoder: dict[int, Any]
    backend_tokenizer: Any

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def get_chat_template(self, chat_template: None, tools: Any) -> str: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        template_kwargs: extra template variables, such as `enable_thinking`.
        stop_ids: further tokens that end a turn, such as those of the target's generation config.

    Raises:
        DataError: no template, no token offsets, or a template that shows or ends no assistant turn.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template_kwargs: dict[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template",
                where=tokenizer.name_or_path,
                remedy="use an instruction-tuned target, or put a chat_template.jinja beside its tokenizer",
            )
        if not tokenizer.is_fast:
            raise DataError("the tokenizer gives no token offsets (not a fast one)", where=tokenizer.name_or_path)
        template = json.dumps([tokenizer.chat_template, self.template_kwargs], sort_keys=True, ensure_ascii=False)
        self.template_hash = sha256_text(template)
        self.day = str(TODAY) if _CLOCK in str(tokenizer.chat_template) else None
        """That the template is told, if it asks for one."""
        self.name = f"chat template of {tokenizer.name_or_path or 'the tokenizer'} ({self.template_hash[:12]})"
        self._has_marks = re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)) is not None
        self._encoder = _untrimmed(tokenizer.backend_tokenizer)
        self.tokenizer_hash = sha256_text(self._encoder.to_str())
        self.end_of_turn, self._traits = self._probe()
        """Token that ends an assistant turn."""
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stop_ids: frozenset[int] = frozenset((self.end_of_turn, *eos, *stop_ids))
        """Tokens that end generation: the template's end of turn, the tokenizer's EOS, and those given."""

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
                [as_rendered(message) for message in messages],
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                chat_template=_DATE + self.tokenizer.get_chat_template(None, tools) if self.day else None,
                **self.template_kwargs,
            )
        except Exception as error:  # templates raise whatever they like: jinja errors, TypeError, raise_exception()
            raise DataError(
                f"the template refuses the conversation: {error}",
                where=self.name,
                remedy="mend the template beside the tokenizer, or give it what it wants by data.template_kwargs",
            ) from error
        return cast(str, text)

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids that a server feeds the model: `messages` and the generation prompt."""
        return self.encode(self.render(messages, tools, generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text. Templates write their own BOS, so no special tokens are added."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    def answer_text(self, tokens: list[int], limit: int) -> tuple[str, bool]:
        """Text of generated tokens, and whether the model ended it (False: it was cut at `limit` tokens).

        A stop token at the end of `tokens` is optional. A character cut in the middle is left out.
        """
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        finished = stopped or len(tokens) < limit
        text = cast(str, self.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True))
        return (text if finished else text.rstrip("\ufffd")), finished

    def sample(self, conversation: Conversation, max_length: int) -> Sample | Reject:
        """Tokenise one conversation; the spans are what the served model would emit in this very context.

        Turns that the template shows otherwise than they were emitted (reasoning removed from history) are
        context and not supervised; `samples` trains them too. Messages after the last answer are left out.

        Args:
            max_length: tokens; the rest is cut off.

        Raises:
            DataError: the whole conversation would be supervised (a mask of all 1).
        """
        outcome, _ = self._tokenise(conversation, max_length, covered=set())
        return outcome

    def samples(self, conversation: Conversation, max_length: int) -> list[Sample] | Reject:
        """Samples that supervise each assistant turn once, in the context it was emitted in.

        One sample where the template keeps its history; else one more for each turn that it rewrites.
        """
        messages, found, covered = conversation.messages, list[Sample](), set[int]()
        refusal: Reject | None = None
        for index in reversed(range(len(messages))):
            if messages[index].get("role") != "assistant" or index in covered:
                continue
            whole = refusal is None and not found
            part = Conversation(
                conversation.id if whole else f"{conversation.id}@{index}",
                messages[: index + 1],
                conversation.tools,
                conversation.meta,
                conversation.cut,
                conversation.tokens,
            )
            outcome, turns = self._tokenise(part, max_length, covered)
            covered |= turns
            if isinstance(outcome, Sample):
                found.append(outcome)
            else:
                refusal = refusal or outcome
                if self._traits.keeps_history:
                    break
        return found or refusal or Reject(conversation.id, "no assistant turn")

    def _tokenise(
        self, conversation: Conversation, max_length: int, covered: set[int]
    ) -> tuple[Sample | Reject, set[int]]:
        """The sample without turns in `covered`, and the message indices that it settles."""

        def refuse(reason: str) -> tuple[Reject, set[int]]:
            return Reject(conversation.id, reason), set()

        answers = [i for i, message in enumerate(conversation.messages) if message.get("role") == "assistant"]
        if not answers:
            return refuse("no assistant turn")
        messages = conversation.messages[: answers[-1] + 1]
        cut = frozenset(conversation.cut)
        try:
            text, turns = lay_out(self.render, self._traits, messages, conversation.tools, cut)
        except DataError as error:
            return refuse(error.what)
        if not turns:
            return refuse(f"no turn is shown as the model would emit it (all-0 mask) by the {self.name}")
        encoding = self._encoder.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int32)
        # A token that straddles the start (an answer's newline merged into the header) is not emitted.
        begins = np.fromiter((begin for begin, _ in encoding.offsets), dtype=np.int64, count=len(ids))
        pieces: list[NDArray[np.int32]] = []
        copied = shift = 0
        firsts = np.searchsorted(begins, [turn.start for turn in turns], side="left").tolist()
        if firsts[0] >= max_length:
            return refuse(f"the prompt has {firsts[0]} tokens, which leaves no room in a context of {max_length}")
        marks = self._marks(messages, conversation.tools, ids)
        ends = np.flatnonzero(np.isin(ids, list(self.stop_ids)))
        spans: list[tuple[int, int]] = []
        for number, (turn, first) in enumerate(zip(turns, firsts, strict=True)):
            limit = firsts[number + 1] if number + 1 < len(firsts) else len(ids)
            at = int(np.searchsorted(ends, first))
            last = int(ends[at]) if at < len(ends) and ends[at] < limit else None
            if turn.message in cut and last is not None:
                last -= 1
            elif turn.message in cut and limit == len(ids):
                last = limit - 1
            if last is None or last < first:  # never ended, or cut before it said anything
                continue
            if marks is not None:
                marked = np.flatnonzero(marks[first : last + 1])
                if not len(marked):
                    continue
                first += int(marked[0])
            length = last + 1 - first
            emitted = self._emitted(conversation, turn.message) if begins[first] == turn.start else None
            if emitted is not None:
                pieces += [ids[copied:first], emitted]
                copied, length = last + 1, len(emitted)
            span = first + shift, min(first + shift + length, max_length) - 1
            shift += length - (last + 1 - first)
            if turn.message not in covered and span[1] > span[0]:
                spans.append(span)
        ids = np.concatenate([*pieces, ids[copied:]])
        settled = {turn.message for turn in turns}
        if not spans:
            return Reject(conversation.id, "no answer has a token to learn after its first"), settled
        sample = Sample(conversation.id, ids[:max_length], spans)
        if sample.supervised == len(sample.ids):
            raise DataError(
                f"conversation {conversation.id!r} would be supervised from its first token (all-1 mask)",
                where=self.name,
                remedy="use a chat template that renders the user's turn before the answer",
            )
        return sample, settled

    def _emitted(self, conversation: Conversation, message: int) -> NDArray[np.int32] | None:
        """The very tokens of an answer, if they are known and still say what the message says."""
        tokens = conversation.tokens.get(message)
        if not tokens:
            return None
        stopped = tokens[-1] in self.stop_ids
        text = str(self.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True))
        if text.rstrip("\ufffd") != str(conversation.messages[message].get("content")).rstrip("\ufffd"):
            return None
        whole = stopped or message in conversation.cut
        return np.asarray(tokens if whole else [*tokens, self.end_of_turn], dtype=np.int32)

    def _marks(
        self, messages: list[Message], tools: list[dict[str, Any]], ids: NDArray[np.int32]
    ) -> NDArray[np.bool_] | None:
        """Tokens inside the template's generation marks, or None where it has none or shows another text."""
        if not self._has_marks:
            return None
        marked = self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.template_kwargs,
        )
        mask = np.asarray(marked["assistant_masks"], dtype=np.bool_)
        return mask if np.array_equal(np.asarray(marked["input_ids"]), ids) else None

    def _probe(self) -> tuple[int, TemplateTraits]:
        """Learn from short conversations which token ends a turn, and whether history stays as it was."""
        user, answer = (
            {"role": "user", "content": _PROBE_USER},
            {"role": "assistant", "content": _PROBE_ANSWER},
        )
        text = self.render([user, answer])
        if _PROBE_ANSWER not in text:
            raise DataError(
                "the template shows no assistant turn: the loss mask would be all 0",
                where=self.name,
                remedy="use a chat template that renders assistant messages",
            )
        begin = text.rindex(_PROBE_ANSWER)
        if begin == 0:
            raise DataError(
                "the template shows nothing before an answer: the loss mask would be all 1",
                where=self.name,
                remedy="use a chat template that renders the user's turn before the answer",
            )
        special = set(self.tokenizer.added_tokens_decoder)
        if self.tokenizer.eos_token_id is not None:
            special.add(self.tokenizer.eos_token_id)
        end = next((token for token in self.encode(text[begin:]) if token in special), None)
        if end is None:
            raise DataError(
                "the template ends an assistant turn without a special token: a served model could not stop",
                where=self.name,
                remedy="use a chat template that ends assistant messages with the EOS token",
            )
        end_text = self.tokenizer.convert_ids_to_tokens(end)
        opened, context = self.render([user]), self.render([user], generation_prompt=True)
        header = context.removeprefix(opened) if context.startswith(opened) else ""
        shown = text[: text.rindex(end_text) + len(end_text)]
        return end, TemplateTraits(
            header=header if header and text[:begin] == context else None,
            end_of_turn=end_text,
            keeps_history=self.render([user, answer, user, answer]).startswith(shown),
        )


def _untrimmed(tokenizer: Tokenizer) -> Tokenizer:
    """A copy whose offsets cover the spaces of a token, as byte-level post-processors (Llama 3) do not.

    Nothing else is lost but the special tokens that a post-processor adds, and templates write their own.
    A copy, because transformers leaves the truncation of its last call in the original.
    """
    state = json.loads(tokenizer.to_str())
    state["post_processor"] = state["truncation"] = state["padding"] = None
    return Tokenizer.from_str(json.dumps(state))
