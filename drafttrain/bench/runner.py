"""Runs a suite: every draft and the engine without one, over the same prompts, in turns.

All drafts of a setting see identical prompts: the history of a conversation is made of the *baseline's*
answers, so one token that differs in the first turn does not turn the second into another question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from drafttrain.bench.divergence import AnswerPair, exact_match, top2_gap
from drafttrain.bench.journal import Journal, SettingRun, now
from drafttrain.bench.lengths import AnswerKey, by_length
from drafttrain.bench.metrics import acceptance, by_category
from drafttrain.bench.prompts import EvalPrompt, select
from drafttrain.bench.result import BASELINE, AnswerText, DraftResult, Memory, Setting
from drafttrain.bench.rounds import round_times
from drafttrain.bench.speed import disturbed, speed, time_split
from drafttrain.bench.suite import SuiteConfig
from drafttrain.bench.tokens import token_texts
from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.types import Message
from drafttrain.engine.engine import Engine
from drafttrain.engine.memory import Memory as EngineMemory
from drafttrain.engine.memory import available_bytes, require, room_for
from drafttrain.engine.proposers.base import Proposer
from drafttrain.engine.records import Completion, Request, RoundRecord
from drafttrain.engine.sampling import SamplingParams, Typical
from drafttrain.errors import DataError
from drafttrain.targets.model import TargetModel

Progress = Callable[[str, int, int], None]
"""Called with (what is running, conversations done, conversations in all) of a setting."""

# Room for the template's own tokens around a turn when the length of a later turn has to be guessed.
_TEMPLATE_TOKENS = 64
_BATCHES_A_CHUNK = 4


@dataclass(frozen=True)
class Contender:
    """A draft to measure.

    Attributes:
        name, family: as reports show them.
        proposer: what the engine drafts with.
        learn: called with the baseline's completions before the contender answers the same requests (the
            oracle).
        variant: the end of the name that says what is proposed where that is no chain, such as a tree.
    """

    name: str
    family: str
    proposer: Proposer
    learn: Callable[[Sequence[Completion]], None] | None = None
    variant: str = ""


@dataclass
class _Log:
    """What one engine did in one setting.

    Attributes:
        records: as the engine wrote them, the rows of a round together.
        rounds: the same by answer.
    """

    records: list[RoundRecord] = field(default_factory=list)
    rounds: dict[AnswerKey, list[RoundRecord]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[AnswerKey, Completion] = field(default_factory=dict)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers.values())

    @property
    def end_to_end_tps(self) -> float | None:
        seconds = self.prefill_s + self.decode_s
        return self.tokens / seconds if seconds > 0 else None


@dataclass
class SuiteRun:
    """All that `run_suite` measured; `records` by setting and draft, for whoever wants to derive more."""

    drafts: list[DraftResult] = field(default_factory=list)
    texts: list[AnswerText] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: dict[tuple[Setting, str], list[RoundRecord]] = field(default_factory=dict)

    def add(self, found: SettingRun) -> None:
        """Take in a setting."""
        self.drafts += found.drafts
        self.texts += found.texts
        self.notes += [note for note in found.notes if note not in self.notes]
        self.records |= {(found.setting, name): records for name, records in found.records.items()}


def run_suite(
    target: TargetModel,
    suite: SuiteConfig,
    prompts: Sequence[EvalPrompt],
    contenders: Sequence[Contender],
    progress: Progress | None = None,
    template_kwargs: dict[str, Any] | None = None,
    journal: Journal | None = None,
) -> SuiteRun:
    """Measure `contenders` and the baseline in every setting of the suite.

    Args:
        target: answers everything.
        suite: settings; its own `prompts` and `drafts` are not read.
        prompts: conversations, ids unique.
        contenders: drafts, names unique.
        progress: told what is running.
        template_kwargs: extra variables of the chat template, as the draft was trained with.
        journal: where finished settings are kept, and found again.

    Raises:
        DataError: a prompt leaves no room for an answer in the target's context, or names are not unique.
    """
    names = [BASELINE, *(contender.name for contender in contenders)]
    if len(set(names)) != len(names):
        raise DataError(f"drafts need names of their own, got {', '.join(names[1:])}")
    renderer = ChatRenderer(target.tokenizer, template_kwargs, target.stop_ids)
    _check_room(target, renderer, prompts)
    longest = _longest(target, suite, renderer, prompts)
    _check_memory(target, suite, contenders, longest)
    weights = {contender.name: contender.proposer.memory_bytes() for contender in contenders}
    run = SuiteRun()
    if suite.typical and any(suite.temperatures):
        run.notes.append(
            "drafts were accepted by typicality at temperatures above 0: lossy, outputs do not follow the target's "
            "distribution"
        )
    shown: Setting | None = None
    for setting in settings(suite):
        texts = shown is None and (setting.temperature == 0 or 0 not in suite.temperatures)
        shown = setting if texts else shown
        kept = None if journal is None else journal.kept.get(setting)
        if kept is not None:
            run.notes.append(f"{setting} was measured before an interruption, until {kept.finished}")
            run.add(kept)
            continue
        # Not held beyond this line: the next setting's caches take the place of these.
        found = _Measurement(
            target, suite, renderer, prompts, longest, _fitting(suite, contenders, setting), setting, weights
        ).run(progress, texts)
        run.add(found)
        if journal is not None:
            journal.add(found)
    return run


def settings(suite: SuiteConfig) -> list[Setting]:
    """Every combination, temperatures outermost: greedy results come first where they are asked for first."""
    return [
        Setting(k, temperature, batch) for temperature in suite.temperatures for batch in suite.batch for k in suite.k
    ]


def _fitting(suite: SuiteConfig, contenders: Sequence[Contender], setting: Setting) -> list[Contender]:
    """Those that are measured in a setting."""
    return [
        contender
        for contender in contenders
        if (contender.learn is None or setting.temperature == 0)
        # A tree has its own depth, whatever k is.
        and (contender.proposer.tree is None or setting.k == suite.k[0])
    ]


def _check_memory(target: TargetModel, suite: SuiteConfig, contenders: Sequence[Contender], longest: int) -> None:
    """Refuse, before the first setting is measured, one whose engines do not fit beside each other.

    Raises:
        EngineError: naming it.
    """
    available = available_bytes(target.device)
    recorded = target.device.type == "cuda" and suite.on_device is not False
    for setting in settings(suite):
        proposers = [None, *(contender.proposer for contender in _fitting(suite, contenders, setting))]
        needed = [
            room_for(target, each, k=setting.k, rows=setting.batch, longest=longest, recorded=recorded).memory
            for each in proposers
        ]
        together = EngineMemory(
            cache=sum(memory.cache for memory in needed),
            draft=sum(memory.draft for memory in needed),
            round=max(memory.round for memory in needed),  # they take turns
            graphs=sum(memory.graphs for memory in needed),
        )
        require(together, available, f"{setting}: {len(needed)} engines")


def rotated(names: Sequence[str], by: int, learners: frozenset[str]) -> list[str]:
    """Whose turn it is: another one starts each time; learners follow the baseline, from which they learn."""
    shift = by % len(names)
    order = [*names[shift:], *names[:shift]]
    return [n for n in order if n not in learners] + [n for n in order if n in learners]


class _Measurement:
    """One setting."""

    def __init__(
        self,
        target: TargetModel,
        suite: SuiteConfig,
        renderer: ChatRenderer,
        prompts: Sequence[EvalPrompt],
        longest: int,
        contenders: Sequence[Contender],
        setting: Setting,
        weights: Mapping[str, int],
    ) -> None:
        self.target, self.suite, self.renderer, self.setting = target, suite, renderer, setting
        self.prompts, self.contenders, self.weights = prompts, contenders, weights
        self.notes: list[str] = []
        self.families = {BASELINE: "", **{c.name: c.family for c in contenders}}
        proposers: dict[str, Proposer | None] = {BASELINE: None, **{c.name: c.proposer for c in contenders}}
        self.engines = {
            name: Engine(
                target,
                proposer,
                k=setting.k,
                max_batch=setting.batch,
                max_length=longest,
                on_device=suite.on_device,
                compile=suite.compile,
            )
            for name, proposer in proposers.items()
        }
        self.learn = {c.name: c.learn for c in contenders if c.learn is not None}
        self.logs = {name: _Log() for name in self.engines}
        self.prompt_ids: dict[AnswerKey, list[int]] = {}

    def run(self, progress: Progress | None, texts: bool) -> SettingRun:
        """Measure; with the answers of some prompts if `texts`."""
        suite = self.suite
        if suite.warmup:
            self._chunk(self.prompts[: suite.warmup], 0, 0, None)
            self.logs = {name: _Log() for name in self.engines}
        # A chunk has to keep the batch full for most of its time.
        size = max(suite.chunk, _BATCHES_A_CHUNK * self.setting.batch)
        total = len(self.prompts) * suite.repeats
        done = 0
        for repeat in range(suite.repeats):
            # The same prompts again: what a draft remembers of their answers would be no draft.
            self._forget()
            for number, start in enumerate(range(0, len(self.prompts), size)):
                chunk = self.prompts[start : start + size]

                def tell(name: str, done: int = done) -> None:
                    if progress is not None:
                        progress(f"{self.setting}: {name}", done, total)

                self._chunk(chunk, repeat, number, tell)
                done += len(chunk)
        if progress is not None:
            progress(str(self.setting), total, total)
        return SettingRun(
            setting=self.setting,
            drafts=self.summary(),
            records={name: log.records for name, log in self.logs.items()},
            texts=self.texts() if texts else [],
            notes=self.notes,
            finished=now(),
        )

    def _forget(self) -> None:
        for contender in self.contenders:
            contender.proposer.forget()

    def _chunk(self, chunk: Sequence[EvalPrompt], repeat: int, number: int, tell: Callable[[str], None] | None) -> None:
        """All turns of some conversations, by every engine."""
        histories: dict[str, list[Message]] = {prompt.id: [] for prompt in chunk}
        order = rotated(list(self.engines), number + repeat, frozenset(self.learn))
        for turn in range(max(len(prompt.turns) for prompt in chunk)):
            requests = list(self._requests(chunk, histories, turn, repeat))
            if not requests:
                return
            plain: list[Completion] = []
            for name in order:
                if tell is not None:
                    tell(name)
                if name in self.learn:
                    self.learn[name](plain)
                answers = self._answer(name, requests, repeat)
                if name == BASELINE:
                    plain = answers
            for answer in plain:
                text, _ = self.renderer.answer_text(answer.tokens, self.suite.max_new_tokens)
                histories[answer.id].append({"role": "assistant", "content": text})

    def _requests(
        self, chunk: Sequence[EvalPrompt], histories: dict[str, list[Message]], turn: int, repeat: int
    ) -> Iterator[Request]:
        suite = self.suite
        sampling = SamplingParams(
            temperature=self.setting.temperature,
            top_p=suite.top_p,
            top_k=suite.top_k,
            min_p=suite.min_p,
            repetition_penalty=suite.repetition_penalty,
            typical=Typical() if suite.typical else None,
            # A request's random stream comes from its id and the seed; turns and repeats share the id.
            seed=suite.seed + 1_000 * turn + 1_000_000 * repeat,
        )
        for prompt in chunk:
            history = histories.get(prompt.id)
            if history is None or turn >= len(prompt.turns):
                continue
            history.append({"role": "user", "content": prompt.turns[turn]})
            ids = self.renderer.prompt_ids(history)
            if len(ids) >= self.engines[BASELINE].max_length:
                note = f"{prompt.id}: from turn {turn + 1} on it does not fit the context and was left out"
                if note not in self.notes:
                    self.notes.append(note)
                del histories[prompt.id]
                continue
            self.prompt_ids[prompt.id, turn, repeat] = ids
            yield Request(
                id=prompt.id,
                prompt_ids=ids,
                max_new_tokens=suite.max_new_tokens,
                sampling=sampling,
                stop_ids=self.renderer.stop_ids,
                stop=tuple(suite.stop),
                turn=turn,
            )

    def _answer(self, name: str, requests: Sequence[Request], repeat: int) -> list[Completion]:
        engine, log = self.engines[name], self.logs[name]
        engine.reset()
        answers = engine.generate(requests)
        log.records += engine.records
        for record in engine.records:
            log.rounds[record.request, record.turn, repeat].append(record)
        log.prefill_s += engine.prefill_s
        log.decode_s += engine.decode_s
        log.answers |= {(answer.id, answer.turn, repeat): answer for answer in answers}
        return answers

    def summary(self) -> list[DraftResult]:
        """Metrics of every engine, the baseline first."""
        results = [
            self._alone(name, log) if name == BASELINE else self._against_plain(self._alone(name, log), log)
            for name, log in self.logs.items()
        ]
        plain = results[0]
        if self.setting.batch == 1 and plain.split is not None:
            doubt = disturbed(plain.split, plain.acceptance.rounds)
            if doubt is not None:
                self.notes.append(f"no draft at {self.setting}: {doubt}")
        return results

    def _alone(self, name: str, log: _Log) -> DraftResult:
        """What can be said of an engine by itself."""
        categories = {prompt.id: prompt.category for prompt in self.prompts}
        variants = {contender.name: contender.variant for contender in self.contenders}
        return DraftResult(
            draft=name,
            family=self.families[name],
            setting=self.setting,
            requests=len({request for request, _, _ in log.answers}),
            answers=len({(request, turn) for request, turn, _ in log.answers}),
            tokens=log.tokens,
            acceptance=acceptance(log.records, samples=self.suite.bootstrap, seed=self.suite.seed),
            categories={
                category: acceptance(rows, samples=self.suite.bootstrap, seed=self.suite.seed)
                for category, rows in by_category(log.records, categories).items()
            },
            split=time_split(log.records),
            speed=None,
            exact=None,
            prefill_s=log.prefill_s,
            decode_s=log.decode_s,
            variant=variants.get(name, ""),
            prefills=len(log.answers),
            prompt_tokens=sum(len(self.prompt_ids[key]) for key in log.answers),
            memory=self._memory(name),
            timings=round_times(log.records),
        )

    def _against_plain(self, alone: DraftResult, log: _Log) -> DraftResult:
        """With what is told by the baseline's answers to the same prompts."""
        suite, plain = self.suite, self.logs[BASELINE]
        measured = speed(
            log.records,
            plain.records,
            end_to_end_tps=log.end_to_end_tps,
            baseline_end_to_end_tps=plain.end_to_end_tps,
            samples=suite.bootstrap,
            seed=suite.seed,
        )
        if measured is not None and measured.flag is not None:
            self.notes.append(f"{alone.draft} at {self.setting}: {measured.flag}")
        exact = None
        if self.setting.temperature == 0:
            exact = exact_match(self._pairs(log), partial(top2_gap, self.target, penalty=suite.repetition_penalty))
        buckets = partial(by_length, log.rounds, plain.rounds, samples=suite.bootstrap, seed=suite.seed)
        prompt_lengths = {key: len(self.prompt_ids[key]) for key in plain.answers}
        output_lengths = {key: len(answer.tokens) for key, answer in plain.answers.items()}
        return replace(
            alone,
            speed=measured,
            exact=exact,
            by_prompt=buckets(prompt_lengths, suite.prompt_buckets),
            by_output=buckets(output_lengths, suite.output_buckets),
        )

    def _memory(self, name: str) -> Memory:
        """What an engine holds beyond the plain one's; of that one, the target and its cache."""
        engine, plain = self.engines[name], self.engines[BASELINE]
        rows, length = plain.max_batch, plain.cache.length
        if engine.proposer is None:
            weights = sum(p.numel() * p.element_size() for p in self.target.parameters())
            return Memory(weights, plain.cache.bytes(), rows, length)
        added = engine.proposer.memory_bytes() + engine.cache.bytes() - plain.cache.bytes()
        return Memory(self.weights[name], added - self.weights[name], rows, length)

    def _pairs(self, log: _Log) -> Iterator[AnswerPair]:
        plain = self.logs[BASELINE].answers
        for key, answer in log.answers.items():
            request, turn, _ = key
            yield AnswerPair(request, turn, self.prompt_ids[key], answer.tokens, plain[key].tokens)

    def texts(self) -> list[AnswerText]:
        """Answers to a few prompts of each category; the oracle's are the baseline's and are left out."""
        chosen = select(list(self.prompts), self.suite.texts) if self.suite.texts else []
        names = [c.name for c in self.contenders if c.learn is None] or [c.name for c in self.contenders]
        texts = []
        for prompt in chosen:
            for turn, question in enumerate(prompt.turns):
                for name in names:
                    answer = self.logs[name].answers.get((prompt.id, turn, 0))
                    if answer is None:
                        continue
                    pieces = token_texts(self.target.tokenizer, answer.tokens)
                    texts.append(
                        AnswerText(
                            draft=name,
                            request=prompt.id,
                            category=prompt.category,
                            turn=turn,
                            prompt=question,
                            pieces=list(zip(pieces, answer.writers, strict=True)),
                            reason=answer.reason,
                        )
                    )
        return texts


def _longest(target: TargetModel, suite: SuiteConfig, renderer: ChatRenderer, prompts: Sequence[EvalPrompt]) -> int:
    """Tokens that the longest conversation may take, at most the target's context."""
    longest = 0
    for prompt in prompts:
        first = len(renderer.prompt_ids([{"role": "user", "content": prompt.turns[0]}]))
        later = sum(len(renderer.encode(turn)) + _TEMPLATE_TOKENS + suite.max_new_tokens for turn in prompt.turns[1:])
        longest = max(longest, first + later + suite.max_new_tokens)
    return min(longest, target.context)


def _check_room(target: TargetModel, renderer: ChatRenderer, prompts: Sequence[EvalPrompt]) -> None:
    if not prompts:
        raise DataError("the suite has no prompts", remedy="raise `limit` or give another prompt file")
    for prompt in prompts:
        length = len(renderer.prompt_ids([{"role": "user", "content": prompt.turns[0]}]))
        if length >= target.context:
            raise DataError(
                f"prompt {prompt.id} has {length} tokens, the target's context {target.context}",
                remedy="take the prompt out of the set or use a target with a longer context",
            )
