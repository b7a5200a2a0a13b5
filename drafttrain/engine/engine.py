"""Speculative generation: propose, one target forward over root and draft tokens, verify, keep what was accepted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from drafttrain.engine.device_rounds import DeviceRounds, RoundInput
from drafttrain.engine.memory import available_bytes, require, room_for
from drafttrain.engine.penalty import penalised
from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.records import Completion, Request, RoundRecord
from drafttrain.engine.sampling import RowStreams
from drafttrain.engine.stops import Stops
from drafttrain.engine.verify import Proposal, Verdict
from drafttrain.engine.verify_batch import verify_batch
from drafttrain.errors import EngineError, RequestError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap

# Tokens in one prefill: enough to keep the processor busy, few enough to bound its activations.
_MAX_PREFILL_TOKENS = 4096
# Padding tokens in one prefill that are cheaper than another forward.
_MAX_PADDING = 64


class Engine:
    """Generates with a target and, optionally, a proposer. Without one it is the baseline of every speed-up.

    Requests join as rows become free and leave when they are done; each keeps its own acceptance, seed and limits.

    Args:
        target: the model whose distribution the outputs follow.
        proposer: the draft, or None.
        k: draft tokens a round of a proposer of chains; a tree brings its own depth.
        max_batch: rows in flight.
        max_length: prompt plus output of the longest request, in tokens.
        tokenizer: finds stop strings; default the target's, where it has one.
        on_device: play greedy rounds without the host, as CUDA graphs (`device_rounds`); None = on CUDA, where the
            proposer can.
        compile: have `torch.compile` fuse what lies between attention and products of the target (`modeling.compiled`):
            for good, for whoever else uses this target.

    Attributes:
        records: one a row and round, since the last `reset`.
        prefill_s, decode_s: seconds spent so far.
        memory: what the rows hold, allocated once, here.

    Raises:
        EngineError: k below 1, more memory than there is, or no compiler where one is asked for.
    """

    def __init__(
        self,
        target: CausalLM,
        proposer: Proposer | None = None,
        *,
        k: int = 4,
        max_batch: int = 1,
        max_length: int = 2048,
        tokenizer: Any = None,
        on_device: bool | None = None,
        compile: bool = False,
    ) -> None:
        if proposer is not None and k < 1:
            raise EngineError(f"k is {k}", remedy="a draft proposes at least one token a round")
        self.target, self.proposer = target, proposer
        if not any(parameter.requires_grad for parameter in target.parameters()):
            target.prepare_for_inference()
        if compile:
            target.compile_forward()
        on_cuda = target.device.type == "cuda"
        plays_on_device = on_cuda if on_device is None else on_device
        self.max_batch, self.max_length = max_batch, min(max_length, target.context)
        room = room_for(
            target, proposer, k=k, rows=max_batch, longest=self.max_length, recorded=on_cuda and plays_on_device
        )
        self.k, length, self.memory = room.reach.depth, room.length, room.memory
        what = f"{max_batch} rows of {length} tokens"
        require(self.memory, available_bytes(target.device), what)
        if proposer is not None and proposer.device is not None:
            require(room.elsewhere, available_bytes(proposer.device), what)
        self.cache = target.new_cache(max_batch, length)
        self.spec = FeatureSpec() if proposer is None else proposer.feature_spec
        if proposer is not None:
            proposer.attach(target, self.cache)
            proposer.reserve(max_batch, length)
        self._rounds: DeviceRounds | None = None
        if plays_on_device:
            draft = None if proposer is None else proposer.on_device(self.k)
            if proposer is None or draft is not None:
                self._rounds = DeviceRounds(target, self.cache, draft, max_batch)
        self.rows: list[Row] = []
        self._stops = Stops(getattr(target, "tokenizer", None) if tokenizer is None else tokenizer)
        self._cancelled: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget records and clocks."""
        self.records: list[RoundRecord] = []
        self.prefill_s = 0.0
        self.decode_s = 0.0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run all requests; completions come in the order of the requests.

        Raises:
            EngineError: a request cannot be served: before anything runs where that shows beforehand. To have the
                others finish all the same, use `stream`.
        """
        seen = {request.id for request in requests}
        if len(seen) != len(requests):
            raise EngineError("request ids are not unique", remedy="give each request of a call an id of its own")
        for request in requests:
            self._check(request)
        done: dict[str, Completion] = {}
        with closing(self.stream(requests)) as completions:
            for completion in completions:
                if completion.error is not None:
                    raise completion.error
                done[completion.id] = completion
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def stream(self, requests: Iterable[Request]) -> Generator[Completion]:
        """Run requests, pulled as rows become free; completions come as they finish.

        A request that fails is completed with the reason "error" and its `error`; the others go on.
        """
        self._drop_rows()
        waiting = deque[Request]()
        source = iter(requests)
        exhausted = False
        try:
            while True:
                while not exhausted and len(waiting) + len(self.rows) < self.max_batch:
                    request = next(source, None)
                    if request is None:
                        exhausted = True
                    elif (error := self._fault(request, waiting)) is not None:
                        yield Completion(request.id, request.turn, [], "error", [], error)
                    else:
                        waiting.append(request)
                yield from self._take_cancelled(waiting)
                yield from self._admit(waiting)
                if not self.rows and not waiting and exhausted:
                    return
                if self.rows:
                    try:
                        yield from self._round()
                    except RequestError as error:
                        self._fail(error)
                        yield from self._retire()
        finally:
            self._cancelled.clear()
            self._drop_rows()

    def cancel(self, request: str) -> None:
        """End a request of the running `stream` before its next round, by its id; from any thread. One that has ended
        already, or never comes, is none of the engine's business."""
        self._cancelled.add(request)

    def _take_cancelled(self, waiting: deque[Request]) -> Iterator[Completion]:
        if not self._cancelled:
            return
        for request in [request for request in waiting if request.id in self._cancelled]:
            waiting.remove(request)
            yield Completion(request.id, request.turn, [], "cancelled", [])
        for row in self.rows:
            if row.request.id in self._cancelled:
                row.reason = "cancelled"
        yield from self._retire()

    def _fail(self, error: RequestError) -> None:
        """Let the row that an error is about end with it."""
        for row in self.rows:
            if row.request.id == error.request:
                row.reason, row.error = "error", error
                return
        raise error

    def _fault(self, request: Request, waiting: Iterable[Request]) -> EngineError | None:
        """Why a request cannot be served beside the others."""
        if any(other.id == request.id for other in (*waiting, *(row.request for row in self.rows))):
            return EngineError(f"a request {request.id} is running", remedy="give each request an id of its own")
        try:
            self._check(request)
        except EngineError as error:
            return error
        return None

    def _drop_rows(self) -> None:
        self.rows.clear()
        self.cache.lengths.zero_()

    def _check(self, request: Request) -> None:
        self._stops.check(request)
        if not request.prompt_ids:
            raise EngineError(f"request {request.id} has an empty prompt", remedy="a prompt has at least one token")
        if len(request.prompt_ids) >= self.max_length and request.max_new_tokens > 0:
            raise EngineError(
                f"request {request.id}: a prompt of {len(request.prompt_ids)} tokens leaves no room in "
                f"{self.max_length}",
                remedy="shorten the prompt, or raise max_length if the model's context allows it",
            )
        if request.max_new_tokens < 0:
            raise EngineError(f"request {request.id}: max_new_tokens is {request.max_new_tokens}")
        size = self.target.vocab_size
        strange = [token for token in (max(request.prompt_ids), min(request.prompt_ids)) if not 0 <= token < size]
        if strange:
            raise EngineError(
                f"request {request.id}: token id {strange[0]} is outside the target's vocabulary of {size}",
                remedy="tokenise the prompt with the target's tokenizer",
            )

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _admit(self, waiting: deque[Request]) -> Iterator[Completion]:
        new: list[Row] = []
        while waiting:
            request = waiting.popleft()
            if request.max_new_tokens == 0:
                yield Completion(request.id, request.turn, [], "length", [])
                continue
            streams = None if request.sampling.greedy else RowStreams(request.sampling.seed, request.id)
            limit = min(request.max_new_tokens, self.max_length - len(request.prompt_ids))
            new.append(Row(request, list(request.prompt_ids), limit, streams))
        if not new:
            return
        start = self._now()
        for group in _alike_in_length(new):
            self._prefill(group)
        self.prefill_s += self._now() - start
        yield from self._retire()

    def _prefill(self, new: list[Row]) -> None:
        """Run the prompts of `new` in one forward and add their first tokens."""
        first = len(self.rows)
        longest = max(len(row.tokens) for row in new)
        ids = torch.zeros(len(new), longest, dtype=torch.int64)
        for index, row in enumerate(new):
            ids[index, : len(row.tokens)] = torch.tensor(row.tokens)
        lengths = torch.tensor([len(row.tokens) for row in new])
        self.cache.set_lengths(torch.zeros_like(lengths), first)
        self.cache.begin(len(new), longest, first_row=first)
        out = self.target(ids.to(self.target.device), cache=self.cache, taps=self.spec.taps)
        self.cache.commit(lengths)
        last = out.final[torch.arange(len(new)), (lengths - 1).to(out.final.device)]
        logits = self.target.lm_head(self._finite(last[:, None], out.taps, new, first))
        empty = Proposal(
            torch.zeros(len(new), 0, dtype=torch.int64, device=logits.device),
            torch.zeros(len(new), dtype=torch.int64),
        )
        verdict = self._verify(logits, empty, new)
        for row, token in zip(new, verdict.bonus.tolist(), strict=True):
            self._append(row, [], token)
        self.rows.extend(new)
        if self.proposer is not None:
            self.proposer.admit(first, new, out.taps)

    def _round(self) -> Iterator[Completion]:
        rows = self.rows
        if self._rounds is not None and all(row.request.sampling.plain_greedy for row in rows):
            yield from self._round_on_device(self._rounds)
            return
        start = self._now()
        room = torch.tensor([row.room - 1 for row in rows])
        k = min(self.k, int(room.max()))
        proposal = self._propose(rows, k, room)
        drafted = self._now()
        tokens = torch.cat([self._roots(rows), proposal.tokens], 1)
        self.cache.begin(len(rows), tokens.shape[1], None if proposal.tree is None else proposal.tree.sees)
        course, states = proposal.resume or (None, None)
        out = self.target(tokens, cache=self.cache, taps=self.spec.taps, course=course, states=states)
        logits = self.target.lm_head(self._finite(out.final, out.taps, rows, 0))
        verdict = self._verify(logits, proposal, rows)
        drafts = proposal.tokens.cpu()
        if verdict.path is not None:
            drafts, out.taps = self._keep_path(verdict.path, drafts, out.taps)
        self.cache.commit(verdict.accepted + 1)
        verified = self._now()
        emitted = [
            self._append(row, path[:kept], bonus)
            for row, path, kept, bonus in zip(
                rows, drafts.tolist(), verdict.accepted.tolist(), verdict.bonus.tolist(), strict=True
            )
        ]
        reasons = [row.reason for row in rows]
        appended = self._now()
        if self.proposer is not None and (self.proposer.sees_the_end or not all(reasons)):
            self.proposer.observe(rows, out.taps, verdict.accepted, verdict.path)
        observed = self._now()
        draft_s, verify_s = drafted - start + observed - appended, verified - drafted
        counts, depths, accepted = proposal.counts.tolist(), proposal.deepest().tolist(), verdict.accepted.tolist()
        facts = list(zip(rows, counts, depths, accepted, emitted, reasons, strict=True))
        yield from self._finish(facts, start, draft_s, verify_s)

    def _round_on_device(self, rounds: DeviceRounds) -> Iterator[Completion]:
        rows, start = self.rows, time.perf_counter()
        lengths = self.cache.lengths[: len(rows)].tolist()
        played = rounds.play(
            [RoundInput(length, row.tokens[-1], row.room - 1) for length, row in zip(lengths, rows, strict=True)]
        )
        accepted = torch.tensor(played.accepted)
        self.cache.lengths[: len(rows)] += accepted + 1
        if rounds.draft is not None:
            rounds.draft.commit(accepted)
        for row, finite in zip(rows, played.finite, strict=True):
            if not finite:
                self._not_finite(row)
        emitted = [self._append(*each) for each in zip(rows, played.kept, played.bonus, strict=True)]
        reasons = [row.reason for row in rows]
        facts = zip(rows, played.proposed, played.depths, played.accepted, emitted, reasons, strict=True)
        yield from self._finish(list(facts), start, played.draft_s, played.verify_s)

    def _finish(
        self,
        facts: list[tuple[Row, int, int, int, int, str | None]],
        start: float,
        draft_s: float,
        verify_s: float,
    ) -> Iterator[Completion]:
        """Record a round that began at `start` and let finished rows go.

        Args:
            facts: a row, and its tokens checked, their depth, those accepted, those emitted, and why it ended.
            start, draft_s, verify_s: seconds.
        """
        finished = list(self._retire())
        end = self._now() if self._rounds is None else time.perf_counter()
        host_s = end - start - draft_s - verify_s
        for row, proposed, depth, kept, count, reason in facts:
            self.records.append(
                RoundRecord(
                    request=row.request.id,
                    turn=row.request.turn,
                    round=row.rounds,
                    proposed=proposed,
                    accepted=kept,
                    emitted=count,
                    reason=reason,
                    batch=len(facts),
                    draft_s=draft_s,
                    verify_s=verify_s,
                    host_s=host_s,
                    depth=depth,
                )
            )
            row.rounds += 1
        self.decode_s += end - start
        yield from finished

    def _propose(self, rows: list[Row], k: int, room: Tensor) -> Proposal:
        if self.proposer is None or k == 0:
            none = torch.zeros(len(rows), 0, dtype=torch.int64, device=self.target.device)
            return Proposal(none, torch.zeros(len(rows), dtype=torch.int64))
        return self.proposer.propose(rows, k).within(room).to(self.target.device)

    def _keep_path(self, path: Tensor, drafts: Tensor, taps: dict[Tap, Tensor]) -> tuple[Tensor, dict[Tap, Tensor]]:
        """Bring the kept path of each row to the front: in the cache, of the tokens and of the features."""
        self.cache.compact(path)
        each, place = torch.arange(len(path))[:, None], path.to(self.target.device)
        kept = {tap: feature[each.to(feature.device), place] for tap, feature in taps.items()}
        return drafts.gather(1, path[:, 1:] - 1), kept

    def _finite(self, states: Tensor, taps: dict[Tap, Tensor], rows: list[Row], first: int) -> Tensor:
        """States [n, T, H] without those of rows that have failed; what of them was kept is wiped."""
        finite = torch.isfinite(states).all(-1).all(-1).cpu()
        if bool(finite.all()):
            return states
        states = states.clone()
        for index in (~finite).nonzero()[:, 0].tolist():
            row = rows[index]
            self._not_finite(row)
            states[index] = 0
            self.cache.wipe(first + index)
            for tap in taps:
                taps[tap] = taps[tap].clone()
                taps[tap][index] = 0
        return states

    @staticmethod
    def _not_finite(row: Row) -> None:
        row.reason = "error"
        row.error = RequestError(row.request.id, f"request {row.request.id}: the target's states are not finite")

    def _verify(self, logits: Tensor, proposal: Proposal, rows: list[Row]) -> Verdict:
        streams = [None if row.streams is None else row.streams.verdict(len(row.tokens)) for row in rows]
        return verify_batch(
            penalised(logits, rows, proposal), proposal, [row.request.sampling for row in rows], streams
        )

    def _roots(self, rows: list[Row]) -> Tensor:
        return torch.tensor([[row.tokens[-1]] for row in rows], device=self.target.device)

    def _append(self, row: Row, kept: list[int], bonus: int) -> int:
        """Add the round's tokens to a row, up to where its output ends; return how many."""
        if row.reason is not None:
            return 0
        new = [*kept, bonus]
        writers = [*range(1, len(kept) + 1), 0]
        end = self._stops.end(row.request, row.tokens[len(row.request.prompt_ids) :], new)
        row.tokens.extend(new[:end])
        row.writers.extend(writers[:end])
        if end is not None:
            row.reason = "stop"
        elif row.room <= 0:
            row.reason = "length" if row.emitted >= row.request.max_new_tokens else "context"
        return len(new[:end])

    def _retire(self) -> Iterator[Completion]:
        """Take finished rows out; the last row fills each hole."""
        for index in range(len(self.rows) - 1, -1, -1):
            row = self.rows[index]
            if row.reason is None:
                continue
            if row.error is not None:
                self.cache.wipe(index)
            last = len(self.rows) - 1
            self.cache.move_row(last, index)
            if self.proposer is not None and last != index:
                self.proposer.move_row(last, index)
            self.rows[index] = self.rows[last]
            self.rows.pop()
            output = row.tokens[len(row.request.prompt_ids) :]
            yield Completion(row.request.id, row.request.turn, output, row.reason, row.writers, row.error)


def _alike_in_length(rows: list[Row]) -> Iterator[list[Row]]:
    """Split rows that join into groups whose prompts are padded to one length at little cost."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        longest = len(row.tokens)
        # A forward has a cost of its own, so short prompts may be padded by more than their own length.
        padding = sum(longest - len(other.tokens) for other in group)
        if group and (padding > _MAX_PADDING or longest * (len(group) + 1) > _MAX_PREFILL_TOKENS):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
