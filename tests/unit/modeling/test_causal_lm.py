"""The adapter against transformers' own outputs, for every architecture we name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drafttrain.errors import TargetError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap
from tests.support import KINDS, VOCAB, tiny_hf

ATOL = 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_taps_are_transformers_own(kind: str) -> None:
    hf = tiny_hf(kind)
    hf.set_attn_implementation("eager")
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = hf(ids, output_hidden_states=True)
        model = CausalLM(hf)
        taps = [*(Tap.block(i) for i in range(4)), Tap.pre_norm, Tap.final]
        ours = model(ids, taps=taps)
        scale = theirs.logits.abs().max()
        torch.testing.assert_close(model.lm_head(ours.final) / scale, theirs.logits / scale, atol=ATOL, rtol=0)
        for index in range(4):
            state = theirs.hidden_states[index]
            torch.testing.assert_close(ours.taps[Tap.block(index)], state, atol=ATOL * state.abs().max(), rtol=0)
        torch.testing.assert_close(ours.taps[Tap.final], ours.final)
        torch.testing.assert_close(ours.final, theirs.hidden_states[-1], atol=ATOL * ours.final.abs().max(), rtol=0)
        torch.testing.assert_close(model.final_norm(ours.taps[Tap.pre_norm]), ours.final)
        assert not torch.allclose(ours.taps[Tap.pre_norm], ours.final)


@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "qwen2-window", "mistral-window", "gemma2", "gemma3", "phi"])
def test_cached_ragged_rows_equal_whole_sequences(kind: str) -> None:
    model = CausalLM(tiny_hf(kind))
    ids = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(2))
    first = torch.tensor([7, 12])
    with torch.no_grad():
        whole = model(ids).final
        cache = model.new_cache(3, 40)
        cache.begin(2, 12)
        model(ids[:, :12], cache=cache)
        cache.commit(first)
        cache.begin(2, 8)
        following = torch.stack([ids[row, start : start + 8] for row, start in enumerate(first.tolist())])
        out = model(following, cache=cache).final
        cache.commit(torch.tensor([8, 8]))
        assert cache.lengths.tolist() == [15, 20, 0]
        # Row 1 takes row 0's place and goes on.
        cache.move_row(1, 0)
        cache.begin(1, 4)
        moved = model(ids[1:, 20:24], cache=cache).final
    for row, start in enumerate(first.tolist()):
        torch.testing.assert_close(out[row], whole[row, start : start + 8], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(moved[0], whole[1, 20:24], atol=1e-4, rtol=1e-4)


def test_tree_mask_equals_each_path() -> None:
    """Teacher-forced logits of a tree equal plain ones along every root-to-leaf path."""
    model = CausalLM(tiny_hf())
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    parents = [-1, 0, 0, 1, 2]
    sees = torch.eye(5, dtype=torch.bool)
    depth = [0] * 5
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
            depth[node] = depth[parent] + 1
    with torch.no_grad():
        cache = model.new_cache(1, 16)
        cache.begin(1, 5)
        model(prompt, cache=cache)
        cache.commit(torch.tensor([5]))
        cache.begin(1, 5, tail_mask=sees)
        tree = model(tokens, positions=torch.tensor([depth]) + 5, cache=cache).final[0]
        for leaf in (3, 4):
            path = [node for node in range(5) if sees[leaf, node]]
            plain = model(torch.cat([prompt, tokens[:, path]], 1)).final[0, 5:]
            torch.testing.assert_close(tree[path], plain, atol=1e-5, rtol=1e-5)


def test_only_the_taps_asked_for_are_kept() -> None:
    model = CausalLM(tiny_hf())
    out = model(torch.tensor([[3, 4]]), taps=[Tap.block(1)])
    assert set(out.taps) == {Tap.block(1)}
    assert not model(torch.tensor([[3, 4]])).taps


def test_threads_that_run_one_model_get_their_own_taps() -> None:
    """One is in the middle of its forward while another makes a whole one."""
    model = CausalLM(tiny_hf())
    slow, quick = torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7]])
    asked = {"slow": [Tap.block(0), Tap.block(3), Tap.pre_norm], "quick": [Tap.block(1)]}
    alone = {"slow": model(slow, taps=asked["slow"]).taps, "quick": model(quick, taps=asked["quick"]).taps}
    reached, go_on = threading.Event(), threading.Event()

    def stop_in_the_middle(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0].shape[1] == slow.shape[1]:
            reached.set()
            assert go_on.wait(60)

    model.layers[2].register_forward_pre_hook(stop_in_the_middle)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(lambda: model(slow, taps=asked["slow"]).taps)
        assert reached.wait(60)
        found = {"quick": model(quick, taps=asked["quick"]).taps}
        go_on.set()
        found["slow"] = under_way.result(60)
    for name, taps in alone.items():
        assert found[name].keys() == taps.keys()
        assert all(torch.equal(found[name][tap], value) for tap, value in taps.items())


def test_taps_are_named_and_checked() -> None:
    assert [Tap.parse(v) for v in (2, "2", "final", "pre_norm")] == [
        Tap.block(2),
        Tap.block(2),
        Tap.final,
        Tap.pre_norm,
    ]
    assert [str(t) for t in (Tap.block(2), Tap.final, Tap.pre_norm)] == ["2", "final", "pre_norm"]
    with pytest.raises(ValueError, match="'last' is no tap"):
        Tap.parse("last")
    with pytest.raises(ValueError, match="counts from 0"):
        Tap.block(-1)
    with pytest.raises(ValueError, match="the output of the last block is 'pre_norm'"):
        FeatureSpec.of([4]).check(4)
    FeatureSpec.of([0, 3, "final", "pre_norm"]).check(4)


def test_cache_refuses_more_than_it_holds() -> None:
    cache = CausalLM(tiny_hf()).new_cache(2, 8)
    with pytest.raises(ValueError, match="holds 8 tokens a row, 9 were asked for"):
        cache.begin(1, 9)


def test_layers_of_other_kinds_are_refused_by_name() -> None:
    hf = tiny_hf("qwen2")
    hf.config.layer_types = ["linear_attention"] * 4
    with pytest.raises(TargetError, match="'linear_attention' are not supported"):
        CausalLM(hf)
