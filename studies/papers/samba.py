"""The Samba paper's claims, in the order of its tables and figures."""

from __future__ import annotations

from studies.papers import samba_tables as paper
from studies.papers import samba_views as views
from studies.papers.claim import Claim, OnGpu, Paper, Table, Written, nothing, unseen
from studies.papers.columns import Column, in_rows, tasks
from studies.papers.samba_runs import CONTEXT
from studies.papers.speed import decoding_flat, prefill_faster, speed_rows
from studies.passkey.samples import LONGER

MAIN = ("samba", "mamba-swa-mlp", "mamba", "mamba-mlp", "llama", "llama-swa", "sliding-gla", "sliding-retnet")
FOUR = ("samba", "mamba", "llama-swa", "llama")
SIX = ("llama", "llama-swa", "mamba", "sliding-gla", "sliding-retnet", "samba")
FIVE = SIX[1:]  # trained in a day on a GPU; Llama is trained for the claims about FOUR
LENGTHS = tuple(CONTEXT * multiple for multiple in (1, 2, 4))
LONG_ROWS = (4096, 8192, 16384)
SWEEP = "samba/slimpajama"
SHORT = ("phases.0.tokens=2B",)
KEYS = (4096, 16384, 65536, 262144)
TIMED = ("samba_1.7b", "mistral_1.6b", "mamba_1.8b", "llama3_1.6b")


def pajama(*only: str, column: Column | None = None, reads: str = "") -> OnGpu:
    """Return runs of models with 430 million parameters, on a tenth of the paper's tokens."""
    if not reads and column is None:
        column = in_rows(*LONG_ROWS)
    return OnGpu(SWEEP, only, SHORT, column, reads=reads)


FOUND = pajama("samba-keys", "llama-swa-keys", column=tasks("passkey", "exact", KEYS))


def in_table(
    number: int,
    name: str,
    says: str,
    *,
    printed: Table,
    variants: tuple[str, ...],
    agreement: str,
    judge: views.Judge,
    on_gpu: OnGpu,
) -> Claim:
    """Return a claim about models in tables.yaml."""
    lengths = LENGTHS
    if number == 5:
        lengths = (CONTEXT // 2, *LENGTHS)
    needs = {"tables": variants}
    ours = views.rows_of("tables", variants, lengths)
    return Claim(
        f"table{number}-{name}", f"Table {number}", says, printed, agreement, needs, ours, judge, on_gpu=on_gpu
    )


HEADS = ("12-2", "6-1", "12-1", "12-4")
CLAIMS = (
    Claim(
        "table3-explodes",
        "Table 3",
        "Full attention cannot read beyond its training length; windows, Mamba and Samba can.",
        paper.TABLE_3,
        f"perplexity in rows of 4 times the training length over that at 1x: at least {views.EXPLODES} for Llama, at "
        "most 1.0 for Llama-SWA, Mamba and Samba",
        {"samba": FOUR},
        views.rows_of("samba", MAIN, (*LENGTHS, CONTEXT * views.LAST)),
        views.explodes,
        views.draw_lengths(MAIN),
        on_gpu=pajama(*FOUR),
    ),
    Claim(
        "table3-order",
        "Table 3",
        "At equal size Samba has the lowest perplexity, then Sliding RetNet, Sliding GLA, Mamba, and Transformers.",
        paper.TABLE_3,
        "the loss at the training length: Samba below Sliding RetNet and Sliding GLA, these below Mamba, Mamba below "
        "Llama-SWA and Llama",
        {"samba": SIX},
        views.rows_of("samba", SIX, LENGTHS),
        views.better(
            "samba",
            ("samba", "sliding-retnet"),
            ("samba", "sliding-gla"),
            ("sliding-retnet", "mamba"),
            ("sliding-gla", "mamba"),
            ("mamba", "llama-swa"),
            ("mamba", "llama"),
        ),
        reason=views.why_other_order,
        further={"tables": views.CONVOLVED},
        on_gpu=pajama(*FIVE),
    ),
    Claim(
        "table3-headline",
        "Table 3",
        "Samba is better than what it is made of: Mamba alone, and attention alone in windows or in full.",
        paper.TABLE_3,
        "the loss at the training length: Samba below Mamba, Llama-SWA and Llama",
        {"samba": FOUR},
        views.rows_of("samba", FOUR, LENGTHS),
        views.better("samba", ("samba", "mamba"), ("samba", "llama-swa"), ("samba", "llama")),
        on_gpu=pajama(*FOUR),
    ),
    Claim(
        "figure1-falls",
        "Table 3 and Figure 1",
        "Samba's perplexity keeps falling far beyond the training length.",
        paper.TABLE_3,
        "Samba's perplexity falls from 1x to 2x to 4x, and at 32x is at most 1% above that at 4x",
        {"samba": ("samba",)},
        views.rows_of("samba", ("samba",), (*LENGTHS, CONTEXT * views.LAST)),
        views.falls,
        on_gpu=pajama("samba", column=in_rows(*LONG_ROWS, 131072)),
    ),
    Claim(
        "table2-hybrids",
        "Table 2",
        "Of ways to mix the layers Samba is the best on average, then Mamba-SWA-MLP, Mamba, Mamba-MLP.",
        paper.TABLE_2,
        "the paper's benchmarks ask for knowledge, which these models don't have; in their place is perplexity at the "
        "training length, Samba's beside Mamba-SWA-MLP's, Mamba's and Mamba-MLP's, which decides nothing",
        {"samba": ("samba", "mamba-swa-mlp", "mamba", "mamba-mlp")},
        views.rows_of("samba", ("samba", "mamba-swa-mlp", "mamba", "mamba-mlp"), LENGTHS),
        views.better_by_loss(("samba", "mamba-swa-mlp"), ("samba", "mamba"), ("samba", "mamba-mlp")),
        reason=views.why_other_hybrid,
        further={"samba": views.HYBRIDS},
        on_gpu=pajama("samba", "mamba-swa-mlp", "mamba", "mamba-mlp"),
    ),
    in_table(
        5,
        "ratio",
        "With the tokens of a step fixed, rows of twice the window are the best for windows; longer ones are worse.",
        printed=paper.TABLE_5,
        variants=("llama-swa", "rows-128", "rows-512", "rows-1024", "rows-2048"),
        agreement="the loss in rows of 256: rows of 256 below those of 512, 1024 and 2048",
        judge=views.better("tables", *(("llama-swa", f"rows-{rows}") for rows in (512, 1024, 2048))),
        on_gpu=pajama("llama-swa", *(f"rows-{rows}" for rows in (2048, 8192, 16384, 32768))),
    ),
    in_table(
        6,
        "full",
        "One layer of full attention beside Mamba is enough for perplexity to rise at 4x; Samba's falls.",
        printed=paper.TABLE_6,
        variants=("samba", "full-0", "full-1", "full-3", "full-1-2"),
        agreement="perplexity at 4x is above that at 2x with full attention in any block, and below it for Samba",
        judge=views.one_full_layer,
        on_gpu=pajama("samba", "full-0", "full-5", "full-11", "full-1-5"),
    ),
    in_table(
        7,
        "heads-swa",
        "A window model is better with one key/value head.",
        printed=paper.TABLE_7,
        variants=("llama-swa", *(f"llama-swa-{heads}" for heads in HEADS)),
        agreement="the loss at the training length: 12 query heads with 1 key/value head below 12 with 12",
        judge=views.better("tables", ("llama-swa-12-1", "llama-swa")),
        on_gpu=pajama("llama-swa", *(f"llama-swa-{heads}" for heads in HEADS)),
    ),
    in_table(
        7,
        "heads-samba",
        "Samba is best with half of the query heads and one key/value head.",
        printed=paper.TABLE_7,
        variants=("samba", *(f"samba-{heads}" for heads in HEADS)),
        agreement="the loss at the training length: 6 and 1 heads below 12 and 12, and below 12 and 1",
        judge=views.better("tables", ("samba-6-1", "samba"), ("samba-6-1", "samba-12-1")),
        on_gpu=pajama("samba", *(f"samba-{heads}" for heads in HEADS)),
    ),
    in_table(
        8,
        "convolution",
        "A short convolution helps windows and RetNet; GLA less.",
        printed=paper.TABLE_8,
        variants=("llama-swa", "llama-swa-sc", "sliding-gla", "sliding-gla-sc", "sliding-retnet", "sliding-retnet-sc"),
        agreement="the loss at the training length: Llama-SWA and Sliding RetNet with it below without",
        judge=views.better("tables", ("llama-swa-sc", "llama-swa"), ("sliding-retnet-sc", "sliding-retnet")),
        on_gpu=pajama(
            *(f"{name}{sc}" for name in ("llama-swa", "sliding-gla", "sliding-retnet") for sc in ("", "-sc"))
        ),
    ),
    Claim(
        "figure4-recall",
        "Figure 4",
        "Tuned on keys in short rows, Samba finds them far beyond; windows alone do not.",
        Table(("1.7B, tuned on 4K", "keys found at 256K"), (("Samba", "about 1.0"), ("Mistral (SWA)", "about 0.3"))),
        "at 1x to 16x the tuned length Samba finds more than windows alone, and at 1x "
        f"{views.FOUND} of the keys at its worst depth",
        {"passkey": ("samba", "swa")},
        views.passkey_rows,
        views.recalls,
        views.draw_passkey,
        on_gpu=FOUND,
        written=Written.PARTLY,
    ),
    Claim(
        "figure4-perfect",
        "Figure 4",
        "Its recall is perfect up to 64 times the tuned length.",
        Table(("1.7B, tuned on 4K", "keys found at 256K"), (("Samba", "about 1.0"),)),
        f"at 16x at least {views.FOUND} of the keys",
        {"passkey": ("samba",)},
        views.passkey_rows,
        views.recalls_all,
        reason=views.why_not_perfect,
        further={"passkey": (LONGER,)},
        on_gpu=FOUND,
        written=Written.PARTLY,
    ),
    Claim(
        "figure5-entropy",
        "Figure 5",
        "Attention looks less widely in the middle layers of Samba; its scans select less there than Mamba-MLP's.",
        Table((), ()),
        "the entropy of selection in the middle third of the scans, as a share of a uniform choice's: Samba's above "
        "Mamba-MLP's, in models of 24 sub-layers",
        {"entropy": views.DEEP},
        views.entropy_rows,
        views.entropies_middle,
        views.draw_entropies,
        reason=views.why_more_selective,
        further={"samba": ("samba", "mamba-mlp")},
        on_gpu=pajama("samba", "mamba-mlp", reads="--instruments entropy"),
    ),
    Claim(
        "figure3-prefill",
        "Figure 3",
        "Samba reads long prompts faster than full attention, in time that grows linearly.",
        Table(("1.6B to 1.7B, 128K tokens", "over Llama-3"), (("Samba", "3.73x"),)),
        "processor time of reading: Llama over Samba at least 2 at the longest rows, and Samba's time per token there "
        "at most 1.2 times that of the shortest",
        {},
        speed_rows("prefill"),
        prefill_faster,
        timed="prefill",
        timed_models=TIMED,
        written=Written.TIMED,
    ),
    Claim(
        "figure1-decode",
        "Figure 1",
        "Samba generates long texts at a speed that does not fall with their length.",
        Table(("1.6B to 1.7B, 64K tokens generated", "over Llama-3"), (("Samba", "3.64x"),)),
        "processor time per token: Samba's after the longest text at most 1.15 times that after the shortest, and "
        "Llama's there at least twice Samba's",
        {},
        speed_rows("decode"),
        decoding_flat,
        timed="decode",
        timed_models=TIMED,
        written=Written.TIMED,
    ),
    Claim(
        "table1-benchmarks",
        "Tables 1 and 2",
        "At 3.8B and 3.2T tokens Samba has 71.2 on MMLU, 69.6 on GSM8K and 54.9 on HumanEval, above Transformer++.",
        Table(
            ("3.8B", "MMLU", "GSM8K", "HumanEval"),
            (("Samba", "71.2", "69.6", "54.9"), ("TFM++", "67.2", "51.5", "51.8")),
        ),
        "each of the three above a Transformer of the same size on the same tokens",
        {},
        nothing,
        unseen("models that know too little answer at chance"),
        seen_at="from about 1B parameters and 100B tokens on: `recipe=samba_1.3b` and `recipe=llama2_1.3b`, 500 and "
        "540 hours of one GPU by the rehearsal's model of an H200. The paper's 3.8B on 3.2T tokens is "
        "`recipe=samba_3.8b`, 45,000 hours, and its data is not public",
    ),
)
PAPER = Paper(
    "samba", "Samba: Simple Hybrid State Space Models for Efficient Unlimited Context Language Modeling", CLAIMS
)
