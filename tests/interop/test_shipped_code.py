"""The code that is shipped with a model: its bytes have a version, and what it computes with are the package's ops."""

from __future__ import annotations

import ast
import hashlib
import shutil
import sys
from pathlib import Path

import hybridtron.ops
from hybridtron.interop.shipped_code import EARLIER, OPS_FILE, VERSION, foreign_file, ops_text, shipped_code

OPS = Path(hybridtron.ops.__file__).parent
DIGEST = (2, "79ca959ad8c3034495ffb1b3a99f8399586edb8e25754547d07937b900e5e475")
"""Of the version under development. When it is released, its files' digests are added to EARLIER, and a change of a
byte after that needs the next VERSION."""


def test_the_bytes_are_those_of_their_version() -> None:
    digest = hashlib.sha256(b"".join(shipped_code().values())).hexdigest()
    assert (VERSION, digest) == DIGEST, "what is shipped has changed: see the remark at DIGEST"
    assert max(EARLIER) + 1 == VERSION


def test_a_change_of_an_op_is_a_change_of_what_is_shipped(tmp_path: Path) -> None:
    shutil.copytree(OPS, tmp_path / "ops")
    assert ops_text(tmp_path / "ops") == ops_text(OPS)
    shutil.copytree(OPS, tmp_path / "changed")
    file = tmp_path / "changed/swiglu/reference.py"
    file.write_text(file.read_text().replace("F.silu(inputs.gate)", "F.gelu(inputs.gate)"))
    assert "F.gelu(inputs.gate)" in ops_text(tmp_path / "changed")
    assert "F.gelu(inputs.gate)" not in ops_text(OPS)


def test_the_shipped_ops_need_torch_alone_and_define_each_name_once() -> None:
    tree = ast.parse(shipped_code()[OPS_FILE])
    roots = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert roots - set(sys.stdlib_module_names) == {"torch"}
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    defined += [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]
    assert len(defined) == len(set(defined))
    compile(tree, OPS_FILE, "exec")


def test_only_files_of_one_version_are_ours() -> None:
    ours = shipped_code()
    assert foreign_file(ours) is None
    assert foreign_file(ours | {"more.py": b""}) == "more.py"
    assert foreign_file(ours | {OPS_FILE: b"pass"}) == OPS_FILE
    assert foreign_file({name: content for name, content in ours.items() if name != OPS_FILE}) == OPS_FILE
