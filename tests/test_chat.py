"""``python -m wiola_mlx.chat``: turns, the cache between them, Ctrl-C, pipes."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import tiny

import wiola_mlx
from wiola_mlx import WiolaError
from wiola_mlx.conversation import Conversation

SYSTEM = "Be brief."
pytestmark = pytest.mark.filterwarnings("ignore:the text is")


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("chat") / "model")
    tiny.write_tokenizer(folder, tiny.CHAT_TEMPLATE)
    return folder


def whole(conversation, text, stop_after=None):
    pieces = conversation.reply(text)
    said = ""
    for count, piece in enumerate(pieces, 1):
        said += piece
        if count == stop_after:
            pieces.close()
            break
    return said


def test_issue_F2_what_was_read_is_the_template_applied_once(templated):
    model, tokenizer = wiola_mlx.load(templated)
    talk = Conversation(model, tokenizer, SYSTEM, max_tokens=6)
    for turn in ("Hello", "How are you?", "Bye"):
        whole(talk, turn)
        prompt = tokenizer.apply_chat_template(talk.messages[:-1], add_generation_prompt=True)
        assert talk.read_ids[: len(prompt)] == list(prompt)
        text = tokenizer.decode(talk.read_ids)
        assert text.count(SYSTEM) == 1
    assert len(talk.messages) == 7


def test_the_cache_is_kept_and_says_what_a_fresh_start_says(templated):
    model, tokenizer = wiola_mlx.load(templated)
    talk = Conversation(model, tokenizer, max_tokens=6)
    for turn in ("Hello", "How are you?"):
        whole(talk, turn)
    read_before = len(talk.read_ids)
    answer = whole(talk, "And now?")
    prompt = tokenizer.apply_chat_template(talk.messages[:-1], add_generation_prompt=True)
    assert answer == wiola_mlx.generate_text(model, tokenizer, list(prompt), max_tokens=6)
    assert talk.cache[0][0].size() == len(talk.read_ids) > read_before


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_stopped_answer_leaves_a_whole_cache(checkpoint, stop_after):
    model, tokenizer = wiola_mlx.load(checkpoint)
    talk = Conversation(model, tokenizer, max_tokens=20)
    whole(talk, "Hello", stop_after)
    assert talk.cache[0][0].size() == len(talk.read_ids)
    ids = talk.next_ids("and on")
    answer = whole(talk, "and on")
    assert answer == wiola_mlx.generate_text(model, tokenizer, ids, max_tokens=20)


def test_a_reply_that_still_runs_is_closed_by_the_next(checkpoint):
    model, tokenizer = wiola_mlx.load(checkpoint)
    talk = Conversation(model, tokenizer, max_tokens=10)
    running = talk.reply("a")
    next(running)
    whole(talk, "b")
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    ids = talk.next_ids("c")
    assert whole(talk, "c") == wiola_mlx.generate_text(model, tokenizer, ids, max_tokens=10)


def test_what_cannot_be_answered_is_not_kept(templated):
    model, tokenizer = wiola_mlx.load(templated)
    talk = Conversation(model, tokenizer, temp=-1)
    with pytest.raises(WiolaError, match="temp"):
        talk.reply("a")
    assert talk.messages == []


def test_reset_save_and_a_system_prompt_without_template(checkpoint, tmp_path):
    model, tokenizer = wiola_mlx.load(checkpoint)
    with pytest.raises(WiolaError, match="chat template"):
        Conversation(model, tokenizer, SYSTEM)
    talk = Conversation(model, tokenizer, max_tokens=4)
    first = whole(talk, "Hello")
    talk.save(tmp_path / "talk.txt")
    assert "user: Hello" in (tmp_path / "talk.txt").read_text(encoding="utf-8")
    with pytest.raises(WiolaError, match="exists already"):
        talk.save(tmp_path / "talk.txt")
    with pytest.raises(WiolaError, match="cannot be written"):
        talk.save(tmp_path / "no" / "talk.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["talk.txt"]
    talk.reset()
    assert whole(talk, "Hello") == first


def test_lines_from_a_pipe_are_a_conversation(cli, checkpoint, tmp_path):
    script = f"Hello\n\n/save {tmp_path / 'talk.txt'}\nAnd then?\n/nope\n".encode()
    argv = ("--model", checkpoint, "-m", 5, "--temp", 0)
    result = cli(*argv, stdin=script, module="wiola_mlx.chat")
    assert result.returncode == 0, result.stderr
    assert b"> " not in result.stdout and b"Traceback" not in result.stderr
    assert b"/nope" in result.stderr
    assert (tmp_path / "talk.txt").read_text(encoding="utf-8").startswith("user: Hello")
    assert cli(*argv, stdin=b"", module="wiola_mlx.chat").returncode == 0
    refused = cli(*argv, "--system", "x", stdin=b"hi", module="wiola_mlx.chat")
    assert refused.returncode == 1 and b"Traceback" not in refused.stderr
    broken = cli(*argv, stdin=b"\xff\xfe\n", module="wiola_mlx.chat")
    assert broken.returncode == 1
    assert b"Traceback" not in broken.stderr and b"not UTF-8" in broken.stderr


class Terminal:
    """The chat in a terminal of its own."""

    def __init__(self, *argv):
        self.seen = ""
        here, there = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "wiola_mlx.chat", *map(str, argv)],
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(there)
        self.here = here

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """Reads until the pattern comes; returns what came since the last match."""
        until = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.here], [], [], 0.2)[0]:
                self.seen += os.read(self.here, 4096).decode("utf-8", "replace")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def say(self, text: str):
        os.write(self.here, text.encode())


def test_issue_M4_three_turns_ctrl_c_reset_and_ctrl_d():
    chat = Terminal("--temp", 0, "-m", 4000)
    chat.wait_for(r"leaves[^>]*> ")
    chat.say("Once upon a time\n")
    chat.wait_for(r"there was")
    os.kill(chat.process.pid, signal.SIGINT)
    chat.wait_for(r"> $")
    chat.say("/reset\n")
    chat.wait_for(r"new conversation[^>]*> $")
    chat.say("Once upon a time\n")
    chat.wait_for(r"there was a little")
    os.kill(chat.process.pid, signal.SIGINT)
    chat.wait_for(r"> $")
    chat.say("One day, a cat\n")
    chat.wait_for(r"cat\s+\w+")
    os.kill(chat.process.pid, signal.SIGINT)
    rest = chat.wait_for(r"> $")
    chat.say("\x04")
    assert chat.process.wait(30) == 0
    assert "Traceback" not in rest + chat.seen
