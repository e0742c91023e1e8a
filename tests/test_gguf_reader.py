"""GGUF files that are damaged, hostile, or of another kind: one line each, and no harm."""

import json
import struct
import time
import tracemalloc

import pytest
from conversions import rewrite
from wiola_mlx.convert.gguf_format import Record, encode_header, encode_text, read_gguf
from wiola_mlx.convert.to_gguf import to_gguf

import wiola_mlx
from wiola_mlx import WiolaError

HUGE = 1 << 62
ARCHITECTURE = ("general.architecture", "str", "wiolagsa")


@pytest.fixture
def write(tmp_path):
    def write_bytes(content: bytes):
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        return path

    return write_bytes


def assert_refused(path, *words):
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(WiolaError) as refusal:
        wiola_mlx.load_model(path)
    assert time.monotonic() - start < 5
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def start(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def entry(key: str, code: int, value: bytes) -> bytes:
    return encode_text(key) + struct.pack("<I", code) + value


def tensor(name: str, dims=(32,), code: int = 0, offset: int = 0) -> bytes:
    return encode_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


@pytest.mark.parametrize(
    "content, word",
    [
        (b"", "truncated"),
        (b"GG", "truncated"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (start(version=1), "version 1"),
        (start(version=99), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (start(keys=HUGE), "truncated"),
        (start(tensors=HUGE), "truncated"),
        (start(keys=1) + struct.pack("<Q", HUGE) + b"a", "name of"),
        (start(keys=1) + entry("a", 8, struct.pack("<Q", HUGE)), "truncated"),
        (start(keys=1) + entry("a", 9, struct.pack("<IQ", 8, HUGE)), "truncated"),
        (start(keys=1) + entry("a", 9, struct.pack("<IQ", 4, HUGE)), "truncated"),
        (start(keys=1) + entry("a", 9, struct.pack("<IQ", 7, HUGE)), "truncated"),
        (start(keys=1) + entry("a", 9, struct.pack("<IQ", 9, 1)), "array"),
        (start(keys=1) + entry("a", 77, b""), "unknown type"),
        (start(keys=1) + entry("a", 7, b"\x05"), "neither 0 nor 1"),
        (start(keys=1) + entry("a", 8, struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
        (start(keys=2) + 2 * entry("a\nb", 4, bytes(4)), "twice"),
        (start(keys=1) + entry("split.count", 2, struct.pack("<H", 3)), "split"),
        (start(keys=1) + entry("general.alignment", 4, struct.pack("<I", 0)), "alignment"),
        (start(keys=1) + entry("general.alignment", 4, struct.pack("<I", 48)), "alignment"),
        (start(keys=1) + entry("general.alignment", 8, encode_text("x")), "alignment"),
        (start(1) + tensor("a", (HUGE, HUGE)), "truncated"),
        (start(1) + tensor("a", (32,), 4242), "type that is not known"),
        (start(1) + tensor("a", (31,), 2), "no multiple of 32"),
        (start(1) + tensor("a", (0,)), "shape"),
        (start(1) + tensor("a", ()), "shape"),
        (start(1) + encode_text("a") + struct.pack("<I", 1 << 30), "dimensions"),
        (start(1) + tensor("a", (8,), offset=8) + bytes(200), "aligned"),
        (start(1) + tensor("a", (8,), offset=HUGE), "truncated"),
        (start(2) + tensor("a") + tensor("a", offset=128) + bytes(500), "twice"),
        (start(2) + tensor("a") + tensor("b", offset=32) + bytes(500), "overlaps"),
        (start(1) + tensor("a\x1b[31m\n", (1 << 20,)), "truncated"),
    ],
)
def test_hostile_headers_are_refused_quickly(write, content, word):
    assert_refused(write(content), word)


def test_other_architectures_and_missing_metadata_are_named(write):
    assert_refused(write(encode_header([], [])), "architecture is None", "wiolagsa")
    llama = ("general.architecture", "str", "llama")
    assert_refused(write(encode_header([llama], [])), "'llama'", "wiolagcla")
    assert_refused(write(encode_header([ARCHITECTURE], [])), "no metadata wiolagsa.vocab_size")
    wrong = [ARCHITECTURE, ("wiolagsa.vocab_size", "str", "many")]
    assert_refused(write(encode_header(wrong, [])), "wiolagsa.vocab_size is 'many'")
    code = [ARCHITECTURE, ("wiolagsa.source.config", "str", '{"model_file": "evil.py"}')]
    assert_refused(write(encode_header(code, [])), "wiolagsa.vocab_size")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, checkpoint):
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    to_gguf(checkpoint, path, "q8_0")
    return path.read_bytes()


def test_a_file_cut_anywhere_is_refused(write, whole):
    for size in [*range(0, len(whole) - 32, len(whole) // 60), len(whole) - 33]:
        with pytest.raises(WiolaError, match=r"truncated|damaged|not a GGUF"):
            read_gguf(write(whole[:size]))


def test_flipped_bytes_in_the_header_never_give_a_traceback(write, whole):
    contents = read_gguf(write(whole))
    end = min(record.offset for record in contents.records.values())
    for place in range(0, end, max(1, end // 150)):
        for bit in (0, 7):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            path = write(bytes(broken))
            try:
                wiola_mlx.load_model(path)
            except WiolaError as error:
                assert "\n" not in str(error)


def test_issue_A3_code_named_by_a_gguf_is_refused(write, whole, tmp_path):
    path = write(whole)
    config = json.loads(read_gguf(path).metadata["wiolagsa.source.config"])
    changes = {"wiolagsa.source.config": json.dumps({**config, "model_file": "evil.py"})}
    rewrite(path, tmp_path / "y.gguf", changes=changes)
    assert_refused(tmp_path / "y.gguf", "evil.py", "never run")


def test_nan_and_infinite_blocks_are_refused(write, whole):
    contents = read_gguf(write(whole))
    for name in ("blk.0.attn_q.weight", "output_norm.weight"):
        broken = bytearray(whole)
        place = contents.records[name].offset
        broken[place : place + 4] = b"\x00\x7c\x00\x7f" if "attn" in name else b"\x00\x00\xc0\x7f"
        assert_refused(write(bytes(broken)), "NaN or infinity")


def test_missing_and_extra_tensors_are_listed_by_their_names_in_the_file(write, whole):
    path = write(whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    assert_refused(path, "missing tensors (1): blk.1.attn_q.weight")
    assert_refused(path, "extra tensors (1): blk.1.attn_x.weight")


def test_mlxs_own_loader_is_not_used(write, whole, monkeypatch):
    import mlx.core as mx

    def refuse(*_args, **_kwargs):
        raise AssertionError("mx.load on a GGUF file")

    monkeypatch.setattr(mx, "load", refuse)
    wiola_mlx.load(write(whole))


def test_the_header_that_is_written_is_the_header_that_is_read(write):
    metadata = [
        ARCHITECTURE,
        ("a.u32", "u32", 7),
        ("a.f32", "f32", 0.5),
        ("a.bool", "bool", True),
        ("a.names", "[str]", ["é", "", "x"]),
        ("a.ids", "[i32]", [-1, 2]),
        ("a.scores", "[f32]", [0.25, -8.0]),
    ]
    records = [Record("one", (2, 32), "Q4_0", 0, 36), Record("two", (3,), "F32", 64, 12)]
    header = encode_header(metadata, records)
    assert len(header) % 32 == 0
    contents = read_gguf(write(header + bytes(96)))
    assert contents.metadata == {key: value for key, _, value in metadata}
    assert [(r.name, r.shape, r.kind, r.offset - len(header), r.nbytes) for r in records] == [
        (r.name, r.shape, r.kind, r.offset - len(header) - len(header), r.nbytes)
        for r in contents.records.values()
    ]
