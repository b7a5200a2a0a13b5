"""Stop strings, penalties, cancellation, failures, memory: what a request may ask and becomes.

Cases 29, 31 and 32 of docs/cases.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import transformers

from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.engine import memory
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import (
    EarlyExit,
    NGramProposer,
    OracleProposer,
    Proposer,
    ReaderProposer,
    RouterProposer,
    SuffixProposer,
    build_proposer,
)
from drafttrain.engine.records import Completion, Request
from drafttrain.engine.sampling import SamplingParams, Typical, probabilities
from drafttrain.engine.stops import Stops
from drafttrain.engine.tree import TreeShape
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target

FEW = 12


class Letters:
    """A tokenizer whose tokens are one or two letters: strings end in the middle of tokens, and across them."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(97 + i % 5) + (chr(97 + i % 3) if i % 2 else "") for i in ids)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny_target(vocab_size=FEW)


def _requests(count: int = 16, **options: object) -> list[Request]:
    prompts = [[t % FEW for t in p] for p in RAGGED_PROMPTS]
    return [Request(str(i), p, count, **options) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


def _proposers(target: CausalLM) -> Iterator[Proposer | None]:
    yield None
    yield RouterProposer(SuffixProposer(), build_proposer(new_draft(Eagle3Config(), target, 1)), longest=6)
    yield ReaderProposer(EarlyExit(target, 3), tree=TreeShape.from_branching((2, 2)))


def test_stop_strings_end_where_they_are_complete(target: CausalLM) -> None:
    """Against the text cut by hand, across tokens and inside them, with drafts and without."""
    free = Engine(target, max_batch=7, max_length=64).generate(_requests()[:4])
    decode = Letters().decode
    for length in (1, 3):
        stop = (decode(free[0].tokens)[5 : 5 + length], decode(free[2].tokens)[7 : 7 + length])
        for proposer in _proposers(target):
            engine = Engine(target, proposer, k=4, max_batch=3, max_length=64, tokenizer=Letters())
            for plain, done in zip(free, engine.generate(_requests(stop=stop)[:4]), strict=True):
                ends = [n for n in range(1, 17) if any(s in decode(plain.tokens[:n]) for s in stop)]
                assert done.tokens == plain.tokens[: min(ends, default=16)]
                assert done.reason == ("stop" if ends else "length") and len(done.writers) == len(done.tokens)


def test_stop_ids_and_strings_together(target: CausalLM) -> None:
    request = Request("a", [1], 9, stop_ids=frozenset({7}), stop=("ab",))
    stops = Stops(Letters())
    assert stops.end(request, [2], [4, 7, 9]) == 2
    assert stops.end(request, [0], [6, 9]) == 1  # "a" + "b"
    assert stops.end(request, [2], [4, 0, 11, 3]) == 3  # "a" + "bc"
    assert stops.end(Request("a", [1], 9), [2], [4, 7, 9]) is None


@pytest.mark.parametrize("cut", range(4))
def test_tokens_beyond_a_stop_id(cut: int) -> None:
    request = Request("a", [1], 9, stop_ids=frozenset({7}), beyond=2)
    output = [4, 7, 9, 3, 5]
    ends = [Stops(None).end(request, output[:cut], output[cut:upto]) for upto in range(cut, 6)]
    # It ends with 3, wherever the rounds divide it.
    assert ends == [None if upto < 4 else 4 - cut for upto in range(cut, 6)]
    assert Stops(None).end(request, [4], [7, 7, 9]) == 3
    assert Stops(None).end(request, [4, 7, 9], [7]) == 1


def test_stop_strings_need_a_tokenizer(target: CausalLM) -> None:
    with pytest.raises(EngineError, match="no tokenizer"):
        Engine(target, max_length=32).generate(_requests(4, stop=("x",)))
    with pytest.raises(EngineError, match="empty stop string"):
        Engine(target, max_length=32, tokenizer=Letters()).generate(_requests(4, stop=("",)))


def test_repetition_penalty_is_that_of_transformers() -> None:
    target = tiny_target()
    params = SamplingParams(repetition_penalty=1.7)
    # 2 is the end of text in the tiny models' configuration.
    requests = [Request(str(i), p, 14, params, frozenset({2})) for i, p in enumerate(RAGGED_PROMPTS)]
    theirs = []
    for request in requests[:4]:
        ids = torch.tensor([request.prompt_ids])
        config = transformers.GenerationConfig(
            max_new_tokens=14, do_sample=False, repetition_penalty=1.7, eos_token_id=2, pad_token_id=0
        )
        out = target.hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        theirs.append(out[0, ids.shape[1] :].tolist())
    draft = build_drafter(DraftLMConfig(layers=(0, 1, 2, 3)), target.config, None)
    init_from_target(draft, target)
    for proposer, rows in (
        (None, 1),
        (build_proposer(draft), 3),
        (build_proposer(draft, tree=TreeShape.from_branching((3, 2, 1))), 2),
        (NGramProposer(shortest=1), 4),
    ):
        engine = Engine(target, proposer, k=4, max_batch=rows, max_length=64)
        assert [c.tokens for c in engine.generate(requests[:4])] == theirs
    # The perfect draft knows of the penalty too.
    engine = Engine(target, build_proposer(draft), k=4, max_length=64)
    engine.generate(requests[:4])
    assert all(r.accepted == r.proposed or r.reason for r in engine.records)


def test_min_p_is_that_of_transformers() -> None:
    logits = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.15)
    scores = logits / 1.3
    for warper in (
        transformers.TopKLogitsWarper(20),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.15),
    ):
        scores = warper(torch.zeros(6, 1, dtype=torch.int64), scores)
    torch.testing.assert_close(probabilities(logits, [params] * 6), scores.softmax(-1))
    one = probabilities(logits, [SamplingParams(temperature=1.0, min_p=1.0)] * 6)
    assert torch.equal(one.argmax(-1), logits.argmax(-1)) and bool((one.amax(-1) == 1).all())


@pytest.mark.parametrize(
    "wrong", [{"min_p": -0.1}, {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"repetition_penalty": float("inf")}]
)
def test_bad_sampling(wrong: dict[str, float]) -> None:
    with pytest.raises(EngineError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="epsilon"):
        Typical(epsilon=0.0)


def test_typical_acceptance_leaves_greedy_rows_alone(target: CausalLM) -> None:
    plain = Engine(target, max_batch=7, max_length=64).generate(_requests())
    params = SamplingParams(typical=Typical())
    assert not params.lossy
    engine = Engine(target, ReaderProposer(EarlyExit(target, 3)), max_batch=7, max_length=64)
    assert [c.tokens for c in engine.generate(_requests(sampling=params))] == [c.tokens for c in plain]


def test_cancelled_requests_leave_and_the_others_do_not_notice(target: CausalLM) -> None:
    plain = {c.id: c.tokens for c in Engine(target, max_batch=7, max_length=64).generate(_requests())}
    for proposer in _proposers(target):
        engine = Engine(target, proposer, k=3, max_batch=3, max_length=64)
        done: dict[str, Completion] = {}

        def source(engine: Engine = engine) -> Iterator[Request]:
            for number, request in enumerate(_requests()[:6]):
                if number == 4:
                    engine.cancel("3")  # it runs, or has just ended
                    engine.cancel("5")  # it is still to come
                yield request

        engine.cancel("1")
        for completion in engine.stream(source()):
            done[completion.id] = completion
        assert len(done) == 6 and not engine.rows and not engine.cache.lengths.any()
        assert done["1"].tokens == [] and done["1"].reason == done["5"].reason == "cancelled"
        for name in ("0", "2", "4"):
            assert done[name].tokens == plain[name]
        assert done["3"].tokens == plain["3"][: len(done["3"].tokens)]


def test_a_request_that_fails_does_not_take_the_batch_with_it(target: CausalLM) -> None:
    good = _requests(8)[:4]
    plain = {c.id: c.tokens for c in Engine(target, max_length=64).generate(good)}
    bad = [Request("empty", [], 3), Request("far", [FEW], 3), Request("2", [1], 3), Request("unknown", [4, 5], 8)]
    oracle = OracleProposer({name: plain[name] for name in plain})
    engine = Engine(target, oracle, max_batch=6, max_length=64)
    done = list(engine.stream([good[0], bad[0], good[1], bad[1], good[2], bad[2], bad[3], good[3]]))
    assert len(done) == 8
    assert {c.id: c.tokens for c in done if c.error is None} == plain
    assert sorted(str(c.error).split("\n")[0] for c in done if c.error is not None) == [
        "a request 2 is running",
        "request empty has an empty prompt",
        f"request far: token id {FEW} is outside the target's vocabulary of {FEW}",
        "the oracle has no recorded output for request unknown",
    ]
    assert all(c.reason == "error" for c in done if c.error is not None)
    with pytest.raises(EngineError, match="no recorded output for request unknown"):
        engine.generate([good[0], bad[3]])
    assert engine.generate(good)[3].tokens == plain["3"]


def test_a_row_that_is_not_finite_fails_alone_and_leaves_nothing_behind() -> None:
    target = tiny_target()
    good = [Request(str(i), p, 8) for i, p in enumerate(RAGGED_PROMPTS[:5])]
    plain = {c.id: c.tokens for c in Engine(target, max_length=64).generate(good)}
    drafted = range(5, 25)
    unused = set(range(VOCAB)) - {t for p in RAGGED_PROMPTS for t in p} - {t for o in plain.values() for t in o}
    broken = max(unused - set(drafted))
    draft = new_draft(Eagle3Config(draft_vocab_size=len(drafted)), target, 1, VocabMap.from_ids(drafted, VOCAB))
    with torch.no_grad():
        target.embedding_weight[broken] = torch.nan
    for proposer in (None, build_proposer(draft)):
        engine = Engine(target, proposer, k=3, max_batch=2, max_length=64)
        done = {c.id: c for c in engine.stream([good[0], Request("nan", [5] * 20 + [broken], 8), *good[1:]])}
        assert "not finite" in str(done.pop("nan").error)
        assert {name: c.tokens for name, c in done.items()} == plain


def test_memory_is_known_before_and_refused(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = new_draft(DraftLMConfig(layers=(0, 3)), target)
    proposer = build_proposer(draft, tree=TreeShape.from_branching((3, 2)))
    engine = Engine(target, proposer, max_batch=4, max_length=50)
    assert engine.memory.cache == engine.cache.bytes()
    weights = sum(p.numel() * p.element_size() for p in draft.parameters())
    assert engine.memory.draft == proposer.memory_bytes() - weights
    assert engine.memory.round == 4 * 10 * FEW * 8
    assert memory.available_bytes(torch.device("cpu")) is None or memory.available_bytes(torch.device("cpu")) > 0
    monkeypatch.setattr("drafttrain.engine.engine.available_bytes", lambda device: 4096)
    with pytest.raises(EngineError, match=r"4 rows of 64 tokens need .* GiB .* 0\.00 are free"):
        Engine(target, proposer, max_batch=4, max_length=50)


def test_a_draft_elsewhere_takes_its_memory_there(target: CausalLM) -> None:
    proposer = build_proposer(new_draft(DraftLMConfig(layers=(0, 3)), target))
    beside = memory.room_for(target, proposer, k=4, rows=4, longest=50)
    assert proposer.device == target.device and beside.memory.draft > 0 and beside.elsewhere.total == 0
    proposer.device = torch.device("meta")
    apart = memory.room_for(target, proposer, k=4, rows=4, longest=50)
    assert apart.memory.draft == 0 and apart.elsewhere.total == beside.memory.draft


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_soak() -> None:
    """2,000 requests on 64 rows, of random length, with stops, sampling and cancellations: no row is lost, every output
    is that of its run alone."""
    target = tiny_target(vocab_size=FEW, num_hidden_layers=2, hidden_size=16, intermediate_size=16)
    chance = random.Random(0)
    requests = [
        Request(
            str(number),
            [chance.randrange(FEW) for _ in range(chance.randint(1, 24))],
            chance.randint(0, 12),
            SamplingParams(temperature=chance.choice((0.0, 0.0, 0.8)), top_p=chance.choice((1.0, 0.9)), seed=number),
            frozenset({chance.randrange(FEW)}) if chance.random() < 0.4 else frozenset(),
            stop=("abca",) if chance.random() < 0.2 else (),
        )
        for number in range(2000)
    ]
    proposer = RouterProposer(
        SuffixProposer(),
        build_proposer(new_draft(Eagle3Config(taps=(0, 1, "pre_norm")), target, 1), tree=TreeShape((-1, -1, 0))),
    )
    engine = Engine(target, proposer, k=3, max_batch=64, max_length=36, tokenizer=Letters())

    def source() -> Iterator[Request]:
        for number, request in enumerate(requests):
            if chance.random() < 0.15:
                # Before it comes, while it runs, or too late.
                engine.cancel(str(number + chance.randint(-70, 10)))
            yield request

    done = {c.id: c for c in engine.stream(source())}
    assert len(done) == len(requests)
    assert not engine.rows and not engine.cache.lengths.any()
    alone = Engine(target, max_batch=1, max_length=36, tokenizer=Letters())
    ended = {reason: 0 for reason in ("cancelled", "length", "stop")}
    for request in requests:
        (plain,) = alone.generate([request])
        mine = done[request.id]
        ended[mine.reason] += 1
        if mine.reason == "cancelled":
            assert mine.tokens == plain.tokens[: len(mine.tokens)]
        else:
            assert (mine.tokens, mine.reason) == (plain.tokens, plain.reason)
    assert min(ended.values()) > 100
