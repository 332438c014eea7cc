"""Conversations with a checkpoint's model, formatted by the chat template that the model was trained with.

The model may end its answer with the end-of-text token, or with the text that the template writes after an answer:
a special token such as `<|im_end|>`, or ordinary text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.data.prepare.chat import ASSISTANT, ChatTemplate
from hybridtron.evaluate.loaded_model import open_checkpoint, tokenizer_of
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
        """Load a checkpoint's chat template and tokenizer. Raises Unusable if the checkpoint has no template."""
        checkpoint = open_checkpoint(folder)
        if (stored_template := checkpoint.meta.data.get(CHAT)) is None:
            cure = "train on data prepared with `data prepare --learn messages`, or import a model with a chat template"
            raise Unusable(
                f"{folder} has no chat template: {cure}; or leave out --chat, to continue a prompt as plain text",
                code="missing",
            )
        tokenizer = tokenizer_of(checkpoint)
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        return Chat(folder, replace(ChatTemplate.of_stored(stored_template), special=frozenset(special)), tokenizer)

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the token ids of the conversation so far, up to where the next answer begins.

        Raises Unusable if a message contains a special token: only the template may write special tokens.
        """
        try:
            text = self.template.question(messages)
        except ValueError as error:
            raise Unusable(f"{self.folder}: {error}", code="unreadable") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ends(self, messages: list[Message]) -> tuple[list[int], list[str]]:
        """Return (token ids, texts) that end the next answer, besides the end-of-text token.

        If the template writes a special token after an answer, the first list has its id. If the template writes
        ordinary text, the second list has the text. Otherwise both lists are empty.
        """
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
