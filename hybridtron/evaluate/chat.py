"""Conversations with a checkpoint's model, formatted by the chat template that it was trained with.

An answer ends where a text ends, or where the template ends a turn: with a special token, or with words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.data.prepare.chat import ASSISTANT, ChatTemplate
from hybridtron.evaluate.served import opened, tokenizer_of
from hybridtron.interop.tokenizer import CHAT
from hybridtron.problems import Unusable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, str]


@dataclass(frozen=True)
class Chat:
    """A checkpoint's chat template and tokenizer."""

    folder: Path
    template: ChatTemplate
    tokenizer: Tokenizer

    @staticmethod
    def of(folder: Path) -> Chat:
        """Load a checkpoint's chat template and tokenizer. Raises Unusable if it has no template."""
        checkpoint, _ = opened(folder)
        if (stored_template := checkpoint.meta.data.get(CHAT)) is None:
            cure = "data that is prepared with --learn messages brings one, and so does an imported folder"
            raise Unusable(
                f"{folder} has no chat template: {cure}; without --chat a prompt is continued as plain text",
                code="missing",
            )
        tokenizer = tokenizer_of(checkpoint)
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        return Chat(folder, replace(ChatTemplate.of_stored(stored_template), special=frozenset(special)), tokenizer)

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the tokens before the next answer, encoded as in prepared data.

        Only the template writes special tokens.
        """
        try:
            text = self.template.question(messages)
        except ValueError as error:
            raise Unusable(f"{self.folder}: {error}", code="unreadable") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ends(self, messages: list[Message]) -> tuple[list[int], list[str]]:
        """Return the tokens and the texts that end the next answer: one special token, one text, or neither."""
        try:
            ending = self.template.behind_answer(messages).strip()
        except ValueError as error:
            raise Unusable(f"{self.folder}: {error}", code="unreadable") from error
        ids = self.tokenizer.encode(ending, add_special_tokens=False).ids
        if ids and self.tokenizer.id_to_token(ids[0]) in self.template.special:
            return ids[:1], []
        return [], [ending] if ending else []


def user(text: str) -> Message:
    """Return a message from the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """Return a message from the model."""
    return {"role": ASSISTANT, "content": text}
