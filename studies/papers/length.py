"""The length-generalization paper's claims, in the order of its figures."""

from __future__ import annotations

from collections.abc import Callable

from studies.length_story.runs import FURTHER
from studies.papers import length_answers as answers
from studies.papers import length_views as views
from studies.papers.claim import EMPTY, Claim, Kept, OnGpu, Paper, Table, Written, unseen
from studies.papers.columns import SAME_TEXT, Column, by_position, tasks
from studies.papers.length_runs import LONGER

RISE = f"the rise at {views.FAILS_AT}x (perplexity over that of {SAME_TEXT})"
FAILING = f"a model fails whose rise is above {views.FAILS}; if none does, it does not fail at this size"
REPAIRED = (
    f"{RISE}: the base fails, and after 100 steps of passing both the rise and perplexity itself are below the base's, "
    f"seed by seed ({FAILING}; no control from zero states was trained"
)
INTERVENTIONS = ("base", "zero", "random", "fitted", "passing", "tbtt")
SIGMAS = ("sigma-0.1", "sigma-0.3", "random", "sigma-3")
BY_POSITION = by_position(1, 4, 16)
SMALL = ("phases.0.tokens=9B", "checkpoint.keep_every=2.25B")  # 10 times Chinchilla's tokens for 45 million parameters
PUBLISHED_SIGMAS = tuple(f"sigma={one}" for one in ("0.01", "0.1", "0.3", "1.0", "3.0", "10.0"))
CONTEXTS = tuple(f"T={context}-recipe=mamba2_45m" for context in (256, 512, 1024, 2048))


def scratch(sweep: str, *only: str, every: bool = False) -> OnGpu:
    """Return runs of models with 45 to 70 million parameters, trained on 9 billion tokens."""
    return OnGpu(f"length/{sweep}", only, SMALL, BY_POSITION, every)


def published(*only: str, sweep: str = "interventions", column: Column | None = BY_POSITION, reads: str = "") -> OnGpu:
    """Return runs that post-train published models for 100 steps and more, as in the paper."""
    if reads:
        column = None
    return OnGpu(f"length/{sweep}", only, column=column, reads=reads)


KEYS = (2048, 8192, 32768, 131072)
BABILONG = tasks("babilong_qa1", "accuracy", KEYS, options={"style": "tuned"}, samples=100)
FEW_SHOT = tasks("babilong_qa1", "accuracy", KEYS, samples=100)
STATES = published("zero", "passing", reads="--instruments remembrance,states --length 8x")


def figure(
    number: int,
    name: str,
    says: str,
    *,
    variants: tuple[str, ...],
    agreement: str,
    judge: views.Judge,
    on_gpu: OnGpu,
    reason: Callable[[Kept], str] | None = None,
    further: tuple[str, ...] = (),
) -> Claim:
    """Return a claim about perplexity by position."""
    return Claim(
        f"figure{number}-{name}",
        f"Figure {number}",
        says,
        EMPTY,
        agreement,
        {"length": variants},
        views.table_of(variants),
        judge,
        views.draw(variants),
        reason=reason,
        further={"length": further} if further else {},
        on_gpu=on_gpu,
        written=Written.KNOWN,
    )


def of_training(name: str, base: str, *, says: str, on_gpu: OnGpu | None) -> Claim:
    """Return the claim of Figure 3 about a base."""
    further = (LONGER, "mamba")
    return Claim(
        name,
        "Figure 3",
        says,
        EMPTY,
        f"{RISE}: after 20 times Chinchilla's tokens above that after 2.5 times, seed by seed, of a base that fails "
        f"({FAILING})",
        {"length": (base,)},
        views.training_rows(base),
        views.more_training(base),
        reason=views.why_not_failed if base == "base" else None,
        further={"length": further} if base == "base" else {},
        on_gpu=on_gpu,
        written=Written.KNOWN,
    )


CLAIMS = (
    figure(
        2,
        "fails",
        "A recurrence that is trained long enough on short rows fails beyond them.",
        variants=("base",),
        agreement=f"{RISE}: above {views.FAILS}; otherwise it does not fail at this size",
        judge=views.fails("base"),
        on_gpu=scratch("contexts", CONTEXTS[-1]),
        reason=views.why_not_failed,
        further=(LONGER, "mamba"),
    ),
    figure(
        2,
        "contexts",
        "The longer the training context, the better the length generalization.",
        variants=("context-32", "base", "context-128"),
        agreement=f"{RISE}, 4096 tokens into the text for all: that of context 128 below 64, and that of 64 below 32, "
        f"of models of which one fails ({FAILING})",
        judge=views.ordered(
            ("context-32", "base", "context-128"), ("context-128", "base"), ("base", "context-32"), tuned=False
        ),
        on_gpu=scratch("contexts", *CONTEXTS),
        reason=views.why_no_order(("context-32", "base", "context-128")),
    ),
    of_training(
        "figure3-training",
        "base",
        says="The failure comes with more training: after 7.5 times Chinchilla's tokens, not before.",
        on_gpu=scratch("contexts", CONTEXTS[2], every=True),
    ),
    of_training("figure3-mamba", "mamba", says="The same, of Mamba, where the paper has Mamba-2.", on_gpu=None),
    figure(
        5,
        "repairs",
        "100 steps with passed states, or with TBTT, repair it.",
        variants=("zero", "passing", "tbtt"),
        agreement=f"{RISE}: from zero states above {views.FAILS}, with passing and TBTT below it and below zero "
        f"states', and perplexity itself below zero states', seed by seed ({FAILING})",
        judge=views.repairs(("passing", "tbtt")),
        on_gpu=published("zero", "passing", "tbtt"),
        reason=views.why_not_repaired,
    ),
    Claim(
        "figure5-forced",
        "Figure 5",
        "The same, of a base that is made to fail by states that decay slowly from the beginning.",
        EMPTY,
        f"perplexity at {views.FORCED_AT}x over the least, and perplexity itself: passing and TBTT below fitted noise, "
        "random noise and zero states, seed by seed",
        {"language": INTERVENTIONS},
        views.table_of(INTERVENTIONS, views.FORCED),
        views.forced([(one, other) for one in ("passing", "tbtt") for other in ("fitted", "random", "zero")]),
        views.draw(INTERVENTIONS, views.FORCED),
        on_gpu=published(*INTERVENTIONS[1:]),  # the published base fails unforced
        written=Written.KNOWN,
    ),
    figure(
        5,
        "interventions",
        "The closer the initial states come to attainable ones, the better: random noise, fitted noise, passing.",
        variants=INTERVENTIONS,
        agreement=f"{RISE}, and perplexity itself: passing below fitted noise, fitted noise below random noise, TBTT "
        f"and passing below zero states, seed by seed, of a base that fails ({FAILING})",
        judge=views.ordered(
            ("base",), ("passing", "fitted"), ("fitted", "random"), ("passing", "zero"), ("tbtt", "zero")
        ),
        on_gpu=published(*INTERVENTIONS[1:]),
        reason=views.why_no_order(INTERVENTIONS),
    ),
    Claim(
        "figure1-remembrance",
        "Figure 1",
        "Tokens far before the context move the answers of a model that fails; after passing they do not.",
        EMPTY,
        "Effective Remembrance (total variation), mean over t up to one context of four: after passing below the "
        f"base's, seed by seed, if the base's is above {views.FLOOR:g}; below that it remembers nothing that could "
        "move its answers",
        {"length": ("base", "passing")},
        views.behaviour_rows,
        views.remembers_less("passing"),
        on_gpu=STATES,
        written=Written.KNOWN,
    ),
    Claim(
        "figure4-states",
        "Figures 4 and 9",
        "States of a model that fails keep growing beyond the context; after passing they do not.",
        EMPTY,
        "the largest deviation of a layer's state at the end of the text over that at the context: after passing "
        f"below the base's, seed by seed, of a base that fails ({FAILING})",
        {"length": ("base", "passing")},
        views.behaviour_rows,
        views.steadier("passing"),
        on_gpu=STATES,
        written=Written.KNOWN,
    ),
    *(
        figure(
            number,
            name,
            f"{title} fails in the same way, and passing repairs it.",
            variants=(name, f"{name}-passing"),
            agreement=f"{REPAIRED}{paper_steps})",
            judge=views.fails_and_is_repaired(name),
            on_gpu=on_gpu,
            reason=views.why_no_order((name, f"{name}-passing")),
        )
        for number, name, title, paper_steps, on_gpu in (
            (1, "mamba", "Mamba", "; the paper's figure has 1,000 steps", published("mamba-zero", "mamba-passing")),
            (1, "gla", "GLA", "; the paper's figure has 500 steps", scratch("families", "gla", "gla-passing")),
            (10, "rwkv6", "RWKV-6", "", scratch("families", "rwkv6", "rwkv6-passing")),
        )
    ),
    Claim(
        "open-hybrid",
        "Section 7",
        "Whether hybrids behave so is left open by the paper; we asked one of Mamba-2 and a window.",
        EMPTY,
        f"{REPAIRED}); the paper claims nothing",
        {"length": ("hybrid", "hybrid-passing")},
        views.table_of(("hybrid", "hybrid-passing")),
        views.fails_and_is_repaired("hybrid"),
        views.draw(("hybrid", "hybrid-passing")),
        reason=views.why_no_order(("hybrid", "hybrid-passing")),
        on_gpu=scratch("families", "hybrid", "hybrid-passing"),
        written=Written.KNOWN,
    ),
    figure(
        11,
        "warmup",
        "A longer warm-up is worse beyond the context.",
        variants=("base", "warmup-25"),
        agreement=f"{RISE}: with 10% below that with 25%, of models of which one fails ({FAILING})",
        judge=views.ordered(("base", "warmup-25"), ("base", "warmup-25"), tuned=False),
        on_gpu=scratch("warmup", "warmup=10_", "warmup=25_"),
        reason=views.why_no_order(("base", "warmup-25")),
    ),
    figure(
        12,
        "sigma",
        "Random states help only at a deviation that suits the model.",
        variants=("zero", *SIGMAS),
        agreement=f"{RISE}, and perplexity itself: at sigma 0.3, one of the deviations 0.1, 0.3, 1 and 3, below zero "
        f"states', and at sigma 3 above them, seed by seed, if it fails from zero states ({FAILING})",
        judge=views.ordered(("zero",), ("sigma-0.3", "zero"), ("zero", "sigma-3")),
        on_gpu=OnGpu("length/sigma", PUBLISHED_SIGMAS, column=BY_POSITION),
        reason=views.why_no_order(("zero", *SIGMAS)),
    ),
    Claim(
        "table1-copying",
        "Table 1",
        "Trained with passed states, a model copies longer strings than it was trained on.",
        Table(
            ("45M, trained on 50 to 100", "accuracy at 300"),
            (("zero states", "0.27 ± 0.03"), ("passing", "0.47 ± 0.11")),
        ),
        "letters copied rightly at 3 times the longest string of training: with passing above without. The strings are "
        "packed into rows of 128 tokens, in which the test's 123 fit; the paper's sequences end with the string",
        {"copying": ("zero", "passing")},
        answers.copying_rows,
        answers.copies_further,
        reason=answers.why_not_copied,
        further={"copying": FURTHER},
        written=Written.KNOWN,
        on_gpu=published("zero", "passing", sweep="copying", column=tasks("copying", "accuracy", (203, 603))),
    ),
    Claim(
        "figure7-passkey",
        "Figure 7",
        "Tuned from fitted noise, a model finds keys in texts at least twice as long.",
        EMPTY,
        "keys found at 16 times the tuned length: from fitted noise above zero states",
        {"passkey": ("mamba2", "mamba2_fitted")},
        answers.passkey_rows,
        answers.finds_further,
        on_gpu=published(
            "keys", "keys-fitted", sweep="answers", column=tasks("passkey", "exact", KEYS, options={"digits": 4})
        ),
        written=Written.PARTLY,
    ),
    Claim(
        "figure6-tuned",
        "Figure 6 and B.3",
        "Tuned on bAbI from zero states, a model that had passed states before answers in longer texts.",
        EMPTY,
        "answers on qa1 in texts of 4 times the context and longer: after passing above the base's, where facts alone "
        "were tuned on, seed by seed",
        {"babilong": ("base-babi", "passing-babi")},
        answers.babilong_rows,
        answers.answers_further,
        on_gpu=published("babi", "passing-babi", sweep="answers", column=BABILONG),
    ),
    Claim(
        "figure6-few-shot",
        "Figure 6",
        "Passing helps on BABILong few-shot, up to 256k tokens.",
        EMPTY,
        "accuracy on qa1 at 4 times the context and above: after passing above the base's",
        {},
        answers.babilong_rows,
        unseen("a model of 0.2 million parameters does not follow examples"),
        seen_at="the published mamba2-780m, imported, 100 steps of 0.5M tokens",
        on_gpu=published("zero", "passing", column=FEW_SHOT),
    ),
)
PAPER = Paper("length", "Understanding and Improving Length Generalization in Recurrent Models", CLAIMS)
