"""Programs that serve exports, and the rules for their verdicts on an export.

A rule is data: a class, and conditions on config.json that the program needs for this class. Rules read config.json as
it is on disk, since servers and converters do so too. Each program has the version whose sources were read. The rules
for transformers were tested: exports of every class were loaded by each version, and logits and greedy tokens were
compared (`tests/interop/test_versions.py`). llama.cpp was run with files of `hybridtron gguf`
(`examples/llama_cpp/prove.py`), and vLLM on a CPU with exports of some classes (`examples/vllm/prove.py`). SGLang was
not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hybridtron.config.export_class import SHIPPED
from hybridtron.interop.native import Settings
from hybridtron.nested import json_of
from hybridtron.safe_open import read_regular

MAX_CONFIG_BYTES = 2**24
NOT_READ = "its sources for this class were not read"
NEWEST_TRANSFORMERS = "5.24"  # the newest version that was tested


class Condition(NamedTuple):
    """A condition on config.json, with its text for a table."""

    holds: Callable[[Settings], bool]
    text: str


class Judgement(NamedTuple):
    """Verdict of one program on an export.

    versions: the program's name and version
    reason: why it does not serve the export; None if it does
    tried: True if exports of this class were run in the program
    """

    versions: str
    reason: str | None
    tried: bool = False


@dataclass(frozen=True)
class Consumer:
    """A program that serves exports.

    version: the version whose sources were read; for llama.cpp a commit, at or near which each file was read
    serves: class that the program serves -> conditions on its exports
    refusals: other class -> reason why it is not served; the entry "" is for classes without an entry
    tried: class -> conditions under which its exports were run in the program
    by_plugin: classes that the program serves by this package's plugin
    """

    name: str
    version: str
    serves: Mapping[str, tuple[Condition, ...]]
    refusals: Mapping[str, str]
    tried: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    by_plugin: frozenset[str] = frozenset()

    def judge(self, config: Settings) -> Judgement:
        """Return the program's verdict on an export with this config.json."""
        name = class_of(config)
        versions = f"{self.name} {self.version}"
        if name in self.by_plugin:
            versions += " with hybridtron installed"
        if name not in self.serves:
            return Judgement(versions, self.refusals.get(name, self.refusals[""]))
        unmet = [condition.text for condition in self.serves[name] if not condition.holds(config)]
        if unmet:
            return Judgement(versions, f"only if {unmet[0]}")
        tried = name in self.tried and all(condition.holds(config) for condition in self.tried[name])
        return Judgement(versions, None, tried)

    def cell(self, name: str) -> str:
        """Return a table's cell for a class: the conditions under which the program serves it, or why it does not."""
        if name not in self.serves:
            return f"no: {self.refusals.get(name, self.refusals[''])}"
        answer = "yes"
        if name in self.by_plugin:
            answer += ", by our plugin"
        if name in self.tried:
            answer += f" ({', '.join(['tested', *(f'if {condition.text}' for condition in self.tried[name])])})"
        conditions = [condition.text for condition in self.serves[name]]
        if not conditions:
            return answer
        return f"{answer}, if {', and '.join(conditions)}"


def class_of(config: Settings) -> str:
    """Return the class that is first in `architectures`, or an empty text if config.json has none."""
    names = config.get("architectures") or [""]
    return str(names[0])


def rope_type(config: Settings) -> str:
    """Return the kind of RoPE scaling in config.json."""
    return (config.get("rope_parameters") or {}).get("rope_type", "default")


def one_group(config: Settings) -> bool:
    """Return True if all heads of Mamba-2 share B and C."""
    return config.get("n_groups", config.get("mamba_n_groups", 1)) == 1


def without_gated_norm(config: Settings) -> bool:
    """Return True if Falcon-H1's Mamba-2 has no gated norm."""
    return not config.get("mamba_rms_norm", True)


def pattern_alone(config: Settings) -> bool:
    """Return True if a pattern gives the layers of Nemotron-H, and a list of layer types does not."""
    return isinstance(config.get("hybrid_override_pattern"), str) and config.get("layers_block_type") is None


def experts_alone(config: Settings) -> bool:
    """Return True if Nemotron-H has dense MLPs or experts, but not both, and llama.cpp can see which.

    llama.cpp infers experts from the key `num_experts_per_tok`.
    """
    pattern = config.get("hybrid_override_pattern") or ""
    has_experts = "E" in pattern
    return has_experts == ("num_experts_per_tok" in config) and not (has_experts and "-" in pattern)


def plain_llama3(config: Settings) -> bool:
    """Return True unless the RoPE scale is `llama3` with an original length other than 8192, as llama.cpp assumes."""
    rope = config.get("rope_parameters") or {}
    return rope_type(config) != "llama3" or rope.get("original_max_position_embeddings") == 8192


def run_by_plugin(config: Settings) -> bool:
    """Return True if this package's class has only mixers that were run in vLLM: as in Samba and Mamba-SWA-MLP.

    Attention is in a window, and span-expanded attention reads all tokens; neither has short convolutions.
    """
    for options in config.get("layers", {}).values():
        kind = options["kind"]
        attention = not options.get("conv") and options.get("self_extend") is None
        windows = kind == "attention" and attention and options.get("window") is not None
        spans = kind == "span" and attention and options.get("eval") == "full"
        plain = kind == "swiglu" or (kind == "mamba" and options.get("sparse") is None)
        if not (plain or windows or spans):
            return False
    return True


def equal_head_multipliers(config: Settings) -> bool:
    """Return True if Falcon-H1's head is untied, or has the embedding's multiplier."""
    return not config["tie_word_embeddings"] or config["embedding_multiplier"] == config["lm_head_multiplier"]


def every_fourth(config: Settings) -> bool:
    """Return True if every fourth layer has full attention, and no other layer."""
    types = config["layer_types"]
    return all((name == "full_attention") is (layer % 4 == 0) for layer, name in enumerate(types, 1))


HEADS_FILL_WIDTH = Condition(
    lambda config: config["num_attention_heads"] * config["head_dim"] == config["hidden_size"],
    "`num_attention_heads` x `head_dim` = `hidden_size`",
)
NO_WINDOW = Condition(
    lambda config: config["sliding_window"] >= config["max_position_embeddings"],
    "`sliding_window` is not below `max_position_embeddings` (windows are ignored)",
)
DEFAULT_ROPE = Condition(lambda config: rope_type(config) == "default", "RoPE is not scaled")
LLAMA3_OF_8192 = Condition(plain_llama3, "RoPE scale `llama3` has `original_max_position_embeddings` 8192")
NO_ROPE = Condition(lambda config: config["position_embedding_type"] != "rope", "attention has no positions")
EXPAND_2 = Condition(lambda config: config["expand"] == 2, "`expand` = 2")
PATTERN_ALONE = Condition(pattern_alone, "`hybrid_override_pattern` stands without `layers_block_type`")
PATTERN = Condition(
    lambda config: isinstance(config.get("hybrid_override_pattern"), str), "`hybrid_override_pattern` is there"
)
GROUPS_TWICE = Condition(
    lambda config: config.get("mamba_n_groups") == config["n_groups"], "`mamba_n_groups` = `n_groups`"
)
RMS_EPS = Condition(lambda config: "rms_norm_eps" in config, "`rms_norm_eps` is there")
MAMBA_EXPAND_2 = Condition(lambda config: config["mamba_expand"] == 2, "`mamba_expand` = 2")
NO_LOCAL_EXPERTS = Condition(lambda config: not config.get("num_local_experts"), "`num_local_experts` = 0")
EXPERTS_ALONE = Condition(
    experts_alone, "`num_experts_per_tok` is there exactly for a model with experts, which has no dense MLPs"
)
ONE_EXPERT_GROUP = Condition(lambda config: config.get("n_group", 1) == 1, "experts have no groups")
SOME_EXPERTS = Condition(lambda config: config["num_experts"] > 0, "a layer has experts")
ALL_EXPERTS = Condition(
    lambda config: config["num_experts"] > 0 and not config["mlp_only_layers"], "every layer has experts"
)
NO_EXPERT_LAYERS = Condition(
    lambda config: "E" not in (config.get("hybrid_override_pattern") or ""), "no layer has experts"
)
RUN_BY_PLUGIN = Condition(
    run_by_plugin, "mixers are Mamba, windows, span-expanded attention with `eval: full`, and gated MLPs"
)
EVERY_FOURTH = Condition(every_fourth, "every fourth layer has full attention")
EQUAL_MULTIPLIERS = Condition(
    equal_head_multipliers, "the head is untied or `embedding_multiplier` = `lm_head_multiplier`"
)


EQUAL_EPS = Condition(
    lambda config: config["mixer_rms_eps"] == config["layer_norm_epsilon"], "`mixer_rms_eps` = `layer_norm_epsilon`"
)


class Since(NamedTuple):
    """The oldest version of transformers that computes a class as we do.

    oldest: version for exports to which the condition applies
    otherwise: version for other exports
    """

    oldest: str
    condition: Condition | None = None
    otherwise: str = ""


ONE_GROUP = Since("5.16", Condition(one_group, "`groups: 1`"), "5.23")
TRANSFORMERS: dict[str, Since] = {
    "MambaForCausalLM": Since("5.16"),
    "Mamba2ForCausalLM": ONE_GROUP,
    "LlamaForCausalLM": Since("5.16"),
    "MistralForCausalLM": Since("5.16"),
    "GraniteForCausalLM": Since("5.16"),
    "GraniteMoeHybridForCausalLM": ONE_GROUP,
    "BambaForCausalLM": ONE_GROUP,
    "OlmoHybridForCausalLM": Since("5.16"),
    "Qwen3_5ForCausalLM": Since("5.24"),
    "Qwen3NextForCausalLM": Since("5.16"),
    "Qwen3_5MoeForCausalLM": Since("5.24"),
    "NemotronHForCausalLM": Since("5.16"),
    "Zamba2ForCausalLM": Since(
        "5.16", Condition(lambda config: config["num_mem_blocks"] == 1, "one shared block"), "5.17"
    ),
    "FalconH1ForCausalLM": Since("5.16", Condition(without_gated_norm, "`norm: false` of Mamba-2"), "5.23"),
    "FalconMambaForCausalLM": Since("5.16"),
    "JambaForCausalLM": Since("5.16"),
    SHIPPED: Since("5.16"),
}
"""Before 5.23, a grouped norm is computed as one group, and Falcon-H1 with a gated norm generates other tokens."""

VLLM = Consumer(
    "vLLM",
    "0.32.0",
    {
        "MambaForCausalLM": (),
        "Mamba2ForCausalLM": (),
        "LlamaForCausalLM": (),
        "MistralForCausalLM": (),
        "GraniteForCausalLM": (),
        "GraniteMoeHybridForCausalLM": (HEADS_FILL_WIDTH,),
        "OlmoHybridForCausalLM": (HEADS_FILL_WIDTH,),
        "Qwen3NextForCausalLM": (SOME_EXPERTS,),
        "NemotronHForCausalLM": (),
        "Zamba2ForCausalLM": (),
        "FalconH1ForCausalLM": (),
        "FalconMambaForCausalLM": (),
        "JambaForCausalLM": (),
        SHIPPED: (),
    },
    {
        "BambaForCausalLM": "removed in 0.23",
        "Qwen3_5ForCausalLM": NOT_READ,
        "Qwen3_5MoeForCausalLM": NOT_READ,
        "": "it has no such class",
    },
    tried={
        "Mamba2ForCausalLM": (),
        "GraniteMoeHybridForCausalLM": (NO_LOCAL_EXPERTS,),
        "NemotronHForCausalLM": (NO_EXPERT_LAYERS,),
        "FalconH1ForCausalLM": (),
        SHIPPED: (RUN_BY_PLUGIN,),
    },
    by_plugin=frozenset({SHIPPED}),
)
SGLANG = Consumer(
    "SGLang",
    "0.5.23",
    {
        "MambaForCausalLM": (),
        "Mamba2ForCausalLM": (),
        "LlamaForCausalLM": (),
        "MistralForCausalLM": (NO_WINDOW,),
        "GraniteForCausalLM": (),
        "GraniteMoeHybridForCausalLM": (HEADS_FILL_WIDTH, DEFAULT_ROPE),
        "Qwen3NextForCausalLM": (ALL_EXPERTS,),
        "NemotronHForCausalLM": (PATTERN_ALONE, GROUPS_TWICE),
        "FalconH1ForCausalLM": (),
        "FalconMambaForCausalLM": (),
    },
    {
        "Qwen3_5ForCausalLM": NOT_READ,
        "Qwen3_5MoeForCausalLM": NOT_READ,
        "": "it has no such class",
    },
)
LLAMA_CPP = Consumer(
    "llama.cpp",
    "00bdaa1",
    {
        "MambaForCausalLM": (EXPAND_2,),
        "Mamba2ForCausalLM": (EXPAND_2,),
        "LlamaForCausalLM": (LLAMA3_OF_8192,),
        "MistralForCausalLM": (NO_WINDOW, LLAMA3_OF_8192),
        "GraniteForCausalLM": (HEADS_FILL_WIDTH, LLAMA3_OF_8192),
        "GraniteMoeHybridForCausalLM": (HEADS_FILL_WIDTH, NO_ROPE),
        "Qwen3_5ForCausalLM": (EVERY_FOURTH,),
        "Qwen3_5MoeForCausalLM": (EVERY_FOURTH,),
        "Qwen3NextForCausalLM": (ALL_EXPERTS, EVERY_FOURTH),
        "NemotronHForCausalLM": (PATTERN, RMS_EPS, EXPERTS_ALONE, ONE_EXPERT_GROUP),
        "FalconH1ForCausalLM": (DEFAULT_ROPE, EQUAL_MULTIPLIERS),
        "FalconMambaForCausalLM": (EXPAND_2, EQUAL_EPS),
        "JambaForCausalLM": (),
    },
    {
        "BambaForCausalLM": "its converter pairs channels over a whole head, of which Bamba rotates half",
        "": "its converter has no such class",
    },
)
SERVERS = (VLLM, SGLANG, LLAMA_CPP)
GGUF = Consumer(
    "llama.cpp",
    "0c1e570",
    {
        "MambaForCausalLM": (EXPAND_2,),
        "Mamba2ForCausalLM": (),
        "GraniteMoeHybridForCausalLM": (MAMBA_EXPAND_2, DEFAULT_ROPE, NO_LOCAL_EXPERTS),
        "FalconH1ForCausalLM": (DEFAULT_ROPE,),
    },
    {"": "not written"},
    tried=dict.fromkeys(
        ("MambaForCausalLM", "Mamba2ForCausalLM", "GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM"), ()
    ),
)
"""llama.cpp with a file that `hybridtron gguf` wrote. LLAMA_CPP has the conditions of llama.cpp's own converter."""


def oldest_transformers(config: Settings) -> str:
    """Return the oldest version of transformers that computes an export with this config.json as we do."""
    since = TRANSFORMERS[class_of(config)]
    if since.condition is not None and not since.condition.holds(config):
        return since.otherwise
    return since.oldest


def judgements(config: Settings) -> list[Judgement]:
    """Return each program's verdict on an export with this config.json."""
    transformers = Judgement(f"transformers {oldest_transformers(config)} to {NEWEST_TRANSFORMERS}", None)
    served = [server.judge(config) for server in SERVERS]
    by_gguf = GGUF.judge(config)
    if by_gguf.reason is None:
        served[SERVERS.index(LLAMA_CPP)] = by_gguf
    return [transformers, *served]


def summary(config: Settings) -> str:
    """Return one line: the programs that serve an export with this config.json, and why others do not."""
    transformers, *by_server = judgements(config)
    served = [transformers.versions, *(_served(verdict) for verdict in by_server if verdict.reason is None)]
    refused = [f"{verdict.versions} ({verdict.reason})" for verdict in by_server if verdict.reason is not None]
    line = f"served by {', '.join(served)}"
    if refused:
        line += f"; not by {', '.join(refused)}"
    return line.replace("`", "")


def _served(judgement: Judgement) -> str:
    if judgement.tried:
        return judgement.versions
    return f"{judgement.versions} (untried)"


def summary_of(folder: Path) -> str:
    """Return the line for the export in a folder, from its config.json."""
    return summary(json_of(read_regular(folder / "config.json", MAX_CONFIG_BYTES)))


def table() -> str:
    """Write the table of all classes and programs, in Markdown."""
    servers = [f"{server.name} {server.version}" for server in SERVERS]
    of_file = f"{GGUF.name} {GGUF.version} by `hybridtron gguf`"
    head = ["class", f"transformers to {NEWEST_TRANSFORMERS}", *servers, of_file]
    rows = [head, ["---"] * len(head)]
    for name, since in TRANSFORMERS.items():
        versions = f"from {since.oldest}"
        if since.condition is not None:
            versions += f" with {since.condition.text}, else from {since.otherwise}"
        cells = [server.cell(name) for server in (*SERVERS, GGUF)]
        rows.append([name.removesuffix("ForCausalLM"), versions, *cells])
    rows.insert(2, ["", "tested", *["read"] * len(SERVERS), ""])
    return "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n"
