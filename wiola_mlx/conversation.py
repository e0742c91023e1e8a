"""A conversation: turns become token ids, and the cache keeps what both sides have said.

With a chat template, the ids that the model has read are always the template applied once to the
whole conversation. Without one the conversation is a single running text: each line is put behind
what was said so far, and the model goes on from there.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import WiolaError
from .generation import apply_template, check_text, stream_text


class Conversation:
    """A model's side of a chat; ``messages`` are what both sides said.

    Args:
        system: a system prompt, for models with a chat template.
        options: passed to ``stream_text`` with every turn.
    """

    def __init__(self, model, tokenizer, system: str | None = None, **options):
        if system is not None and not tokenizer.has_chat_template:
            raise WiolaError("this model has no chat template, so it takes no system prompt")
        self.model, self.tokenizer, self.system = model, tokenizer, system
        self.options = options
        self.running: Iterator[str] = iter_nothing()
        self.reset()

    def reset(self):
        """Forgets all but the system prompt."""
        self.running.close()
        self.messages = [] if self.system is None else [message("system", self.system)]
        self.text_ids: list[int] = []  # the running text, where there is no template
        self.read_ids: list[int] = []  # what the cache holds
        self.cache = self.model.make_cache()

    def reply(self, text: str) -> Iterator[str]:
        """The answer to ``text``, piece by piece; closing the iterator ends it there.

        A reply that still runs is closed first. What cannot be answered is not kept.
        """
        self.running.close()
        check_text(text)
        self.messages.append(message("user", text))
        try:
            ids = self.next_ids(text)
            self.rewind(ids)
            new = ids[len(self.read_ids) :]
            stream = stream_text(
                self.model, self.tokenizer, new, prompt_cache=self.cache, **self.options
            )
        except WiolaError:
            self.messages.pop()
            raise
        self.running = self.follow(stream, ids)
        return self.running

    def follow(self, stream: Iterator, ids: list[int]) -> Iterator[str]:
        said, tokens = "", []
        try:
            for response in stream:
                tokens.append(response.token)
                said += response.text
                yield response.text
        finally:
            stream.close()
            self.settle(ids + tokens)
            if tokens and tokens[-1] in self.tokenizer.eos_token_ids:
                tokens.pop()  # the running text goes on behind what was said
            self.text_ids = ids + tokens
            self.messages.append(message("assistant", said))

    def next_ids(self, text: str) -> list[int]:
        if self.tokenizer.has_chat_template:
            return list(apply_template(self.tokenizer, self.messages))
        behind = "\n" if self.text_ids else ""
        return self.text_ids + self.tokenizer.encode(behind + text, add_special_tokens=False)

    def rewind(self, ids: list[int]):
        """Takes from the cache what ``ids`` do not begin with; one id at least stays to be read."""
        shared = 0
        for ours, theirs in zip(self.read_ids, ids[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        self.trim(len(self.read_ids) - shared)
        self.read_ids = self.read_ids[:shared]

    def settle(self, known: list[int]):
        """The generator reads ahead: keeps of the cache what is known to be in it."""
        size = self.cache[0][0].size()
        self.trim(max(size - len(known), 0))
        self.read_ids = known[:size]

    def trim(self, count: int):
        for layer in self.cache:
            layer.trim(count)

    def save(self, path: Path):
        """Writes the conversation as text to a new file, complete or not at all."""
        lines = [f"{m['role']}: {m['content']}" for m in self.messages]
        write_new(path, "\n\n".join(lines) + "\n")


def iter_nothing() -> Iterator[str]:
    yield from ()


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def write_new(path: Path, text: str):
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.link(temporary, path)  # unlike a rename, never over a file that is there
        finally:
            os.unlink(temporary)
    except FileExistsError as error:
        raise WiolaError(f"{path} exists already; give another name") from error
    except OSError as error:
        raise WiolaError(f"{path} cannot be written: {error.strerror or error}") from error
