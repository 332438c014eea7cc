"""Write an archive of a version's folders, which later versions must read: python tests/compatibility/write.py FILE

It holds prepared tokens, a run of ten steps, its export, and the losses of ten more steps and of a run that starts from
its weights. The digest that this prints belongs into `RELEASED` of `hybridtron/interop/shipped_code.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridtron.cli import convert, data_prepare, train
from hybridtron.interop.shipped_code import digest_of, shipped_code

SHAPE = [
    "data=folder", "data.path=tokens", "data.epochs=null", "model.width=16", "model.vocab_size=32",
    "model.layers.M.state=4", "model.layers.W.window=8", "model.layers.-.hidden=32", "phases.0.seq_len=16",
    "phases.0.global_batch=4", "phases.0.micro_batch=2", "phases.0.tokens=1280", "run.eval_tokens=256",
    "run.eval_every=10", "checkpoint.every=5", "checkpoint.keep=1", "optim.warmup=5%", "run.sample_tokens=0",
    "phases.0.states.mode=passing",
]  # fmt: skip
FROM_WEIGHTS = [
    "recipe=length/state_passing", "run.weights=run", "run.dir=again", "run.sample_tokens=0", "run.max_steps=5",
    "checkpoint.every=5", "run.eval_tokens=256",
]  # fmt: skip
ORIGINAL = Path(__file__).with_name("written_by_0.1.0.tar.xz").resolve()


def losses(run: Path) -> list[float]:
    """Read the training losses of a run, in order."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def done(status: int) -> None:
    """Stop where a command has failed."""
    if status:
        raise SystemExit(status)


def write(target: Path) -> None:
    """Fill the current folder, which is empty, and pack it."""
    with tarfile.open(ORIGINAL) as archive:
        archive.extractall(members=["counting.jsonl", "tokenizer.json"], filter="data")
    inputs = ["--input", "counting.jsonl", "--tokenizer", "tokenizer.json", "--validation", "7%", "--output", "tokens"]
    done(data_prepare.main(inputs))
    done(train.main([*SHAPE, "run.dir=run", "run.max_steps=10"]))
    done(convert.main(["export", "run", "--output", "hf"]))
    shutil.copytree("run", "kept")
    done(train.main([*SHAPE, "run.dir=run"]))
    resumed = losses(Path("run"))[10:]
    shutil.rmtree("run")
    Path("kept").rename("run")
    done(train.main(FROM_WEIGHTS))
    expected = {"resumed": resumed, "from_weights": losses(Path("again"))}
    Path("expected.json").write_text(json.dumps(expected, indent=1))
    with tarfile.open(target, "w:xz") as archive:
        for name in ("counting.jsonl", "tokenizer.json", "tokens", "run", "hf", "expected.json"):
            archive.add(name)
    print(f"{target}: {digest_of(shipped_code())}")


if __name__ == "__main__":
    output = Path(sys.argv[1]).resolve()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        write(output)
