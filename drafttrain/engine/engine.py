"""Speculative generation: propose, one target forward over root and draft tokens, verify, keep what was accepted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.records import Completion, Request, RoundRecord
from drafttrain.engine.sampling import RowStreams
from drafttrain.engine.verify import Proposal, Verdict, verify_chain
from drafttrain.engine.verify_tree import verify_tree
from drafttrain.errors import EngineError
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

    Attributes:
        records: one a row and round, since the last `reset`.
        prefill_s, decode_s: seconds spent so far.
    """

    def __init__(
        self,
        target: CausalLM,
        proposer: Proposer | None = None,
        *,
        k: int = 4,
        max_batch: int = 1,
        max_length: int = 2048,
    ) -> None:
        if proposer is not None and k < 1:
            raise EngineError(f"k is {k}", remedy="a draft proposes at least one token a round")
        self.target, self.proposer = target, proposer
        if not any(parameter.requires_grad for parameter in target.parameters()):
            target.prepare_for_inference()
        self.k = k if proposer is not None else 0
        width = self.k
        if proposer is not None and proposer.tree is not None:
            self.k, width = proposer.tree.depth, proposer.tree.nodes
        self.max_batch = max_batch
        context = int(getattr(target.config, "max_position_embeddings", 0) or max_length)
        self.max_length = min(max_length, context)
        # A row near its end takes part in rounds as wide as the others': its draft tokens are written behind it.
        length = self.max_length + width
        self.cache = target.new_cache(max_batch, length)
        self.spec = FeatureSpec() if proposer is None else proposer.feature_spec
        if proposer is not None:
            proposer.reserve(max_batch, length)
        self.rows: list[Row] = []
        self.reset()

    def reset(self) -> None:
        """Forget records and clocks."""
        self.records: list[RoundRecord] = []
        self.prefill_s = 0.0
        self.decode_s = 0.0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run all requests; completions come in the order of the requests."""
        seen = {request.id for request in requests}
        if len(seen) != len(requests):
            raise EngineError("request ids are not unique", remedy="give each request of a call an id of its own")
        done = {completion.id: completion for completion in self.stream(requests)}
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def stream(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Run requests, pulled as rows become free; completions come as they finish."""
        self._drop_rows()
        waiting = deque[Request]()
        source = iter(requests)
        exhausted = False
        try:
            while True:
                while not exhausted and len(waiting) + len(self.rows) < self.max_batch:
                    try:
                        waiting.append(self._checked(next(source)))
                    except StopIteration:
                        exhausted = True
                yield from self._admit(waiting)
                if not self.rows and not waiting and exhausted:
                    return
                if self.rows:
                    yield from self._round()
        finally:
            self._drop_rows()

    def _drop_rows(self) -> None:
        self.rows.clear()
        self.cache.lengths.zero_()

    def _checked(self, request: Request) -> Request:
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
        largest = max(request.prompt_ids)
        if largest >= self.target.vocab_size or min(request.prompt_ids) < 0:
            raise EngineError(
                f"request {request.id}: token id {largest} is outside the target's vocabulary "
                f"of {self.target.vocab_size}",
                remedy="tokenise the prompt with the target's tokenizer",
            )
        return request

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
        logits = self.target.lm_head(last)[:, None]
        empty = Proposal(
            torch.zeros(len(new), 0, dtype=torch.int64, device=logits.device),
            torch.zeros(len(new), dtype=torch.int64),
        )
        verdict = self._verify(logits, empty, new)
        for row, token in zip(new, verdict.bonus.tolist(), strict=True):
            row.tokens.append(token)
            row.writers.append(0)
        self.rows.extend(new)
        if self.proposer is not None:
            self.proposer.admit(first, new, out.taps)

    def _round(self) -> Iterator[Completion]:
        rows = self.rows
        start = self._now()
        room = torch.tensor([row.room - 1 for row in rows])
        k = min(self.k, int(room.max()))
        proposal = self._propose(rows, k, room)
        drafted = self._now()
        tokens = torch.cat([self._roots(rows), proposal.tokens.to(self.target.device)], 1)
        self.cache.begin(len(rows), tokens.shape[1], None if proposal.tree is None else proposal.tree.sees)
        out = self.target(tokens, cache=self.cache, taps=self.spec.taps)
        logits = self.target.lm_head(out.final)
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
        reasons = [self._reason(row) for row in rows]
        appended = self._now()
        if self.proposer is not None and not all(reasons):
            self.proposer.observe(rows, out.taps, verdict.accepted, verdict.path)
        observed = self._now()
        draft_s, verify_s = drafted - start + observed - appended, verified - drafted
        counts, depths, accepted = proposal.counts.tolist(), proposal.deepest().tolist(), verdict.accepted.tolist()
        facts = list(zip(rows, counts, depths, accepted, emitted, reasons, strict=True))
        finished = list(self._retire())
        end = self._now()
        host_s = end - start - draft_s - verify_s
        for row, proposed, depth, kept, count, reason in facts:
            self.records.append(
                RoundRecord(
                    row.request.id,
                    row.request.turn,
                    row.rounds,
                    proposed,
                    kept,
                    count,
                    reason,
                    len(facts),
                    draft_s,
                    verify_s,
                    host_s,
                    depth,
                )
            )
            row.rounds += 1
        self.decode_s += end - start
        yield from finished

    def _propose(self, rows: list[Row], k: int, room: Tensor) -> Proposal:
        if self.proposer is None or k == 0:
            none = torch.zeros(len(rows), 0, dtype=torch.int64, device=self.target.device)
            return Proposal(none, torch.zeros(len(rows), dtype=torch.int64))
        proposal = self.proposer.propose(rows, k)
        tree, q = proposal.tree, proposal.q
        if tree is None:
            counts = torch.minimum(proposal.counts, room)
            width = int(counts.max())
            q = None if q is None else q[:, :width]
        else:
            # In level order, what a row has room for comes first.
            counts = torch.minimum(proposal.counts, (tree.depths.cpu() <= room[:, None]).sum(1))
            width = int(counts.max())
            tree = tree.first(width)
        return Proposal(proposal.tokens[:, :width], counts, q, proposal.vocab_map, tree)

    def _keep_path(self, path: Tensor, drafts: Tensor, taps: dict[Tap, Tensor]) -> tuple[Tensor, dict[Tap, Tensor]]:
        """Bring the kept path of each row to the front: in the cache, of the tokens and of the features."""
        self.cache.compact(path)
        each, place = torch.arange(len(path))[:, None], path.to(self.target.device)
        kept = {tap: feature[each.to(feature.device), place] for tap, feature in taps.items()}
        return drafts.gather(1, path[:, 1:] - 1), kept

    @staticmethod
    def _verify(logits: Tensor, proposal: Proposal, rows: list[Row]) -> Verdict:
        generators = [None if row.streams is None else row.streams.verdict(len(row.tokens)) for row in rows]
        verify = verify_chain if proposal.tree is None else verify_tree
        return verify(logits, proposal, [row.request.sampling for row in rows], generators)

    def _roots(self, rows: list[Row]) -> Tensor:
        return torch.tensor([[row.tokens[-1]] for row in rows], device=self.target.device)

    @staticmethod
    def _append(row: Row, kept: list[int], bonus: int) -> int:
        """Add the round's tokens to a row, cut behind a stop id; return how many."""
        new = [*kept, bonus]
        writers = [*range(1, len(kept) + 1), 0]
        for index, token in enumerate(new):
            if token in row.request.stop_ids:
                new, writers = new[: index + 1], writers[: index + 1]
                break
        row.tokens.extend(new)
        row.writers.extend(writers)
        return len(new)

    @staticmethod
    def _reason(row: Row) -> str | None:
        if row.tokens[-1] in row.request.stop_ids:
            return "stop"
        if row.room <= 0:
            return "length" if row.emitted >= row.request.max_new_tokens else "context"
        return None

    def _retire(self) -> Iterator[Completion]:
        """Take finished rows out; the last row fills each hole."""
        for index in range(len(self.rows) - 1, -1, -1):
            row = self.rows[index]
            reason = self._reason(row)
            if reason is None:
                continue
            last = len(self.rows) - 1
            self.cache.move_row(last, index)
            if self.proposer is not None and last != index:
                self.proposer.move_row(last, index)
            self.rows[index] = self.rows[last]
            self.rows.pop()
            output = row.tokens[len(row.request.prompt_ids) :]
            yield Completion(row.request.id, row.request.turn, output, reason, row.writers)


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
