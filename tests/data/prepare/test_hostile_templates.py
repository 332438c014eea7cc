"""Chat templates that loop forever, fill memory or break the renderer: each ends with a message."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from hybridtron.data.prepare import template_process
from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.data.workers import WorkerEnded
from tests.data.prepare.test_learned import CHAT, CHATML
from tests.interop.test_chat_template import with_tokens

LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
ENDLESS = {
    "power": "{{ 7**(10**9) }}",
    "power of a message": "{{ (messages | length + 5) ** (10**9) }}",
    "shift": "{{ (messages | length) * 2**(2**40) }}",
    "loops": LOOPS,
    "loops of text": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "repeated": "{{ ('a' * 10**10) | length }}",
    "list": "{{ ([0] * 10**10) | length }}",
    "center": "{{ 'a' | center(3 * 10**9) }}",
    "tojson": "{{ messages | tojson(indent=10**9) }}",
    "indent": "{{ ('a\\n' * 10**6) | indent(10**6) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "doubled": DOUBLED,
    "format": "{{ '%1000000000000d' % 1 }}",
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
}
SMALL = {"SECONDS": 0.3, "MEMORY": 2**28}


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the bounds, so that a test ends sooner than a user's command would."""
    for name, value in SMALL.items():
        monkeypatch.setattr(template_process, name, value)


def chat_of(text: str) -> ChatTemplate:
    return ChatTemplate(text, (), frozenset())


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_ended_with_a_reason(name: str) -> None:
    chat = chat_of(ENDLESS[name])
    fault = chat.fault()
    if fault is None:  # Python refuses the number at once, as it does each time
        assert name in ("format", "shift")
        with pytest.raises(ValueError, match=r"the chat template can't render the conversation: \S"):
            chat.question(CHAT)
    else:
        assert any(word in fault for word in ("computes", "memory", "nested", "ended", "characters")), fault


@pytest.mark.usefixtures("small_bounds")
def test_rendering_continues_after_a_lost_process() -> None:
    """Rendering continues after each lost process, and the template is given up after three."""
    text = f"{{% if messages[0].content == 'hang' %}}{LOOPS}{{% endif %}}{CHATML}"
    chat = chat_of(text)
    hanging = [{"role": "user", "content": "hang"}]
    wanted = chat_of(CHATML).conversation(CHAT)
    for _ in range(3):
        assert chat.conversation(CHAT) == wanted
        with pytest.raises(ValueError, match="computes for more than"):
            chat.conversation(hanging)
    with pytest.raises(WorkerEnded, match="3 conversations"):
        chat.conversation(CHAT)


def test_the_process_is_kept_knows_no_torch_and_ends_with_its_template() -> None:
    chat = chat_of(CHATML)
    chat.conversation(CHAT)
    kept = template_process.template_process(chat.text, chat.tokens)
    process = kept._process
    assert process is not None
    chat.conversation(CHAT)
    assert kept._process is process
    if Path("/proc/self/maps").exists():
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
    del kept
    chat_of("{{ messages[0].content }}").conversation([{"role": "user", "content": "x"}])
    assert process.poll() == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_template_process_of_its_parent() -> None:
    chat = chat_of(CHATML)
    wanted = chat.conversation(CHAT)
    if (child := os.fork()) == 0:
        os._exit(0 if chat.conversation(CHAT) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert chat.conversation(CHAT) == wanted
    assert template_process.template_process(chat.text, chat.tokens).lost == 0


@pytest.mark.usefixtures("small_bounds")
def test_prepare_refuses_an_endless_template_before_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tokens(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(LOOPS)
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    command = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--learn", "messages"]
    assert main(["data", "prepare", *command, "--output", str(tmp_path / "out")]) == 2
    assert "chat template of tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
