"""Keys of config.json that an engine acts on."""

from __future__ import annotations

from collections.abc import Iterator

from drafttrain.export.doctor.case import EAGLE, Case
from drafttrain.export.doctor.finding import Finding, Mend, error, warning
from drafttrain.export.doctor.layouts import mistyped
from drafttrain.export.doctor.rules.rule import Rule

# What each engine resolves (vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.4). vLLM puts Eagle or Eagle3 before a name that
# lacks it, TensorRT-LLM EAGLE3 where there is a draft_vocab_size.
_WRITTEN = {
    ("vllm", "eagle3"): "LlamaForCausalLMEagle3",
    ("vllm", "eagle1"): "LlamaForCausalLM",
    ("vllm", "medusa"): "MedusaModel",
    ("sglang", "eagle3"): "LlamaForCausalLMEagle3",
    ("sglang", "eagle1"): "LlamaForCausalLMEagle",
    ("trtllm", "eagle3"): "LlamaForCausalLMEagle3",
}
_LOADED = {
    ("vllm", "eagle3"): (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
        "PeagleLlamaForCausalLM",
        "PEagleDraftModel",
        "Qwen3ForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "PeagleQwen3ForCausalLM",
        "Eagle3DeepseekV2ForCausalLM",
        "Eagle3DeepseekV3ForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    ),
    ("vllm", "eagle1"): (
        "LlamaForCausalLM",
        "EagleLlamaForCausalLM",
        "EagleCohereForCausalLM",
        "EagleMiniCPMForCausalLM",
        "EagleMistralForCausalLM",
    ),
    ("vllm", "medusa"): ("MedusaModel",),
    ("sglang", "eagle3"): ("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
    ("sglang", "eagle1"): ("LlamaForCausalLMEagle",),
    ("trtllm", "eagle3"): ("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
}


def types(case: Case) -> Iterator[Finding]:
    """Values that no engine can read; other rules take them for missing."""
    for problem in mistyped(case.draft.config):
        yield error(problem, "the engine fails on it, or computes with something else", "correct it")


def architecture(case: Case) -> Iterator[Finding]:
    """A class that the engine does not have, or that is of another family."""
    draft, key = case.draft, (case.engine, str(case.draft.family))
    known = _LOADED.get(key)
    if known is None or draft.is_speculators or not draft.config:
        return
    names = draft.flat.get("architectures")
    if not names and draft.family == "medusa":
        return  # vLLM fills it in
    if not names or names[0] not in known:
        yield error(
            f"architectures is {names}, which {case.engine} does not load as {draft.family}",
            "the engine finds its class by this name: it fails, or builds a model of another kind",
            f"set it to {[_WRITTEN[key]]}",
            Mend(keys={"architectures": [_WRITTEN[key]]}),
        )


def model_type(case: Case) -> Iterator[Finding]:
    """Without it transformers cannot read the config."""
    draft = case.draft
    if not draft.config or draft.is_speculators or draft.flat.get("model_type") or draft.family is None:
        return
    if draft.family == "medusa" and case.engine == "vllm":
        return  # given by the method
    wanted = {"eagle1": "llama", "eagle3": "llama", "medusa": "medusa"}.get(draft.family)
    yield error(
        "model_type is missing",
        "the config class is chosen by it: the engine cannot read this config",
        f"set it to {wanted!r}" if wanted else "copy it from the model that the draft was made of",
        Mend(keys={"model_type": wanted}) if wanted else None,
    )


def activation(case: Case) -> Iterator[Finding]:
    """An activation that came with a copied target config."""
    act = case.draft.flat.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        yield error(
            f"hidden_act is {act!r}",
            "the engines' EAGLE layers are Llama's and know silu alone: they fail",
            "set it to 'silu' if the draft was trained so; a draft trained with another cannot be served",
        )


def bias_key(case: Case) -> Iterator[Finding]:
    """`"bias": true`, as EAGLE's original configs have it."""
    if case.draft.flat.get("bias"):
        key = case.draft.key("bias")
        yield error(
            '"bias": true',
            "it means fc to EAGLE's own code, but q, k, v and o to Llama classes: they get biases that no tensor fills",
            "take the key out",
            Mend(drop_keys=(key,)),
        )


def attention_bias(case: Case) -> Iterator[Finding]:
    """`attention_bias` against the biases that are stored."""
    draft = case.draft
    said = bool(draft.flat.get("attention_bias"))
    stored = sorted(name for name in draft.tensors if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")))
    key = draft.key("attention_bias")
    if said and not stored:
        yield error(
            "attention_bias is true, and no bias is stored",
            "the engine makes room for biases that nothing fills",
            "set it to false",
            Mend(keys={key: False}),
        )
    if stored and not said:
        yield error(
            f"biases of q, k and v are stored ({stored[0]} ...), and attention_bias is not true",
            "the engine has no room for them: it fails, or drops what the draft was trained with",
            "set attention_bias to true",
            Mend(keys={key: True}),
        )


def tied_head(case: Case) -> Iterator[Finding]:
    """A draft whose head is its own must not say that it is the embedding."""
    draft = case.draft
    own = draft.family == "eagle3" and "lm_head.weight" in draft.tensors
    if draft.flat.get("tie_word_embeddings") and (own or draft.family in ("eagle1", "medusa")):
        yield error(
            "tie_word_embeddings is true",
            "engines and trainers may put the embedding in place of the head that the draft was trained with",
            "set it to false",
            Mend(keys={draft.key("tie_word_embeddings"): False}),
        )


def quantised_draft(case: Case) -> Iterator[Finding]:
    """A quantisation that came with a copied target config."""
    draft = case.draft
    if not draft.config.get("quantization_config") and not draft.flat.get("quantization_config"):
        return
    packed = [name for name, info in draft.stored.items() if not info.is_float and info.dtype not in ("I64", "BOOL")]
    if not packed:
        keys = tuple({"quantization_config", draft.key("quantization_config")})
        yield error(
            "quantization_config is there, and no tensor is quantised",
            "it was copied from the target: the engine looks for scales that do not exist",
            "take the key out",
            Mend(drop_keys=keys),
        )


def layer_count(case: Case) -> Iterator[Finding]:
    """Layers that are said against layers that are stored."""
    draft, stored = case.draft, len(case.layer_prefixes())
    said = draft.number("num_hidden_layers")
    if said is not None and stored and said != stored:
        yield error(
            f"num_hidden_layers is {said}, {stored} decoder layers are stored",
            "the engine builds layers that nothing fills, or finds tensors without a layer",
            f"set it to {stored}",
            Mend(keys={draft.key("num_hidden_layers"): stored}),
        )
    if case.engine in ("sglang", "trtllm") and draft.family == "eagle3" and stored > 1:
        yield error(
            f"{stored} decoder layers",
            f"{case.engine_name} names the norms of layers beyond the first otherwise: they are not loaded",
            "serve it with vLLM, or train one layer",
        )


def no_family(case: Case) -> Iterator[Finding]:
    """Families that the engine does not have."""
    lacks = {"sglang": {"medusa": "Medusa"}, "trtllm": {"medusa": "Medusa", "eagle1": "EAGLE-1"}}
    name = lacks.get(case.engine, {}).get(str(case.draft.family))
    if name is not None:
        yield error(f"the draft is of the family {name}", f"{case.engine_name} has no {name}", "serve it with vLLM")


def lacking(case: Case) -> Iterator[Finding]:
    """Families, switches and forms that the engine does not have."""
    yield from no_family(case)
    draft, name = case.draft, case.engine_name
    if case.engine not in ("sglang", "trtllm"):
        return
    if draft.flat.get("norm_before_residual"):
        yield error(
            "norm_before_residual is on",
            f"{name}'s residual is the raw state: it loads the draft and accepts less",
            "serve it with vLLM, or train without it",
        )
    if draft.family == "eagle3" and case.taps_in_fc == 1:
        yield error(
            "fc reads a single state",
            f"{name} leaves fc out, in silence, where the states are as wide as an embedding",
            "serve it with vLLM, or train on two states or more",
        )
    if draft.is_speculators:
        yield error(
            "a config in speculators' form",
            f"{name} does not read it",
            "export or convert the draft to the raw layout",
        )


def speculators_keys(case: Case) -> Iterator[Finding]:
    """What `vllm serve DRAFT` alone needs."""
    draft = case.draft
    if not draft.is_speculators:
        return
    outer = draft.config.get("speculators_config")
    methods = outer.get("proposal_methods") if isinstance(outer, dict) else None
    verifier = outer.get("verifier") if isinstance(outer, dict) else None
    missing = []
    if not (isinstance(methods, list) and methods and isinstance(methods[0], dict)) or not methods[0].get(
        "speculative_tokens"
    ):
        missing.append("speculators_config.proposal_methods[0].speculative_tokens")
    if not isinstance(verifier, dict) or not verifier.get("name_or_path"):
        missing.append("speculators_config.verifier.name_or_path")
    if not isinstance(draft.config.get("transformer_layer_config"), dict):
        missing.append("transformer_layer_config")
    for key in missing:
        yield error(
            f"{key} is missing",
            "vLLM refuses such a config: it takes target and depth from it",
            "add it",
        )
    if draft.family == "eagle3" and "norm_before_residual" not in draft.config:
        yield warning(
            "norm_before_residual is missing",
            "vLLM takes it as true in this form, and as false in the raw one",
            "write the value that the draft was trained with; the trial tries both",
        )


RULES = (
    Rule("config-types", types),
    Rule("architecture", architecture),
    Rule("model-type", model_type),
    Rule("activation", activation, EAGLE),
    Rule("bias-key", bias_key, EAGLE),
    Rule("attention-bias", attention_bias, EAGLE),
    Rule("tied-head", tied_head, (*EAGLE, "medusa")),
    Rule("quantised-draft", quantised_draft),
    Rule("layer-count", layer_count, EAGLE),
    Rule("engine-lacks", lacking),
    Rule("speculators-config", speculators_keys),
)
