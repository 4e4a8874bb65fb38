"""Mutations of files by their structure: each takes `draw` and the content of a valid file."""

from __future__ import annotations

import copy
import gzip
import io
import json
import pickletools
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

from tools.fuzz import draws as st
from tools.fuzz.draws import Draws

Mutation = Callable[[Draws, bytes], bytes]

SENTINEL = "sentinel-of-the-fuzzer"  # a file that only code of an input would write
NUMBERS = (
    0,
    1,
    2,
    127,
    255,
    256,
    2**15,
    2**16 - 1,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
MORE = (-1, -(2**31), 10**9, 10**12, 10**30)
TOKENS = [
    *(b"0", b"-1", b"1e400", b"null", b"NaN", b"Infinity", b"[]", b"{}", b'""', b"true", b"99999999999999999999"),
    *(
        b"'",
        b":",
        b"..",
        b"/",
        b"../../x",
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"[[[[",
        b"&a",
        b"*a",
        b"~",
        b"\r",
        b"%s",
    ),
    *(
        b"!!python/object/apply:os.system ['touch sentinel-of-the-fuzzer']",
        b"\xe2\x80\xae",
        b"<<: *a",
        b"- - - -",
        b"|",
    ),
]
DEEP = "depth-of-the-fuzzer"
VALUES: list[Any] = [
    *(None, 0, -1, 1, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", "x", [], {}, [[]], [None], True),
    *("../../etc/passwd", "/etc/passwd", {"a": 1}, [1, 2, 3], "a" * 1000, "\x00", "\ud800", "[/x]", DEEP, -(2**63)),
    *([2**31, 2**31], [-1, 4], {"": ""}, [[[[[]]]]], "os.system:touch", "1e5", 1e308, "inf", [True], False),
]
COMMAND = f"touch {SENTINEL}".encode()
PICKLED = [  # operations of pickles that are no content of a checkpoint
    b"cos\nsystem\nX" + struct.pack("<I", len(COMMAND)) + COMMAND + b"\x85R0",
    b"cbuiltins\neval\nX" + struct.pack("<I", 4) + b"1+1 \x85R0",
    b"cposix\nsystem\nX" + struct.pack("<I", len(COMMAND)) + COMMAND + b"\x85R0",
    b"cpathlib\nPath\nX" + struct.pack("<I", 1) + b"x\x85R0",
    b"r\xff\xff\xff\x7f",
    b"q\xff",
    b"j\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f",
    b"\x8d" + struct.pack("<Q", 1 << 62),
    b"\x8e" + struct.pack("<Q", 1 << 40),
    b"\x8b" + struct.pack("<i", 2**31 - 1),
    b"\x95" + struct.pack("<Q", 1 << 50),
    *(
        b"\x82\x01",
        b"\x81",
        b"\x93",
        b"Q",
        b"b",
        b"(" * 2000,
        b"]" * 2000,
        b"2",
        b"0",
        b"e",
        b"u",
        b"s",
        b"t",
        b".",
        b"h\x00",
    ),
    *(
        b"}",
        b"N",
        b"\x85R",
        b"K\x00",
        b"J\xff\xff\xff\xff",
        b"(lp0\n",
        b"I99999999999999999999\n",
        b"F1e999\n",
        b"\x80\x63",
    ),
]
NAMES = [
    "../x",
    "/etc/x",
    "a/../../x",
    "",
    "x" * 300,
    "inputs.npy",
    "archive/data.pkl",
    "con",
    "a\\..\\x",
    "\u202e",
    "data/0",
]


def _at(draw: Draws, size: int) -> int:
    """Return a place in a file, more often near its beginning."""
    last = max(size - 1, 0)
    return int(draw(st.integers(0, min(last, 400) if draw(st.booleans()) else last)))


def change_bytes(draw: Draws, content: bytes) -> bytes:
    """Change, insert, repeat or remove a few bytes."""
    found = bytearray(content)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        _change_once(draw, found)
    return bytes(found)


def _change_once(draw: Draws, found: bytearray) -> None:
    at, kind = _at(draw, len(found)), draw(st.integers(0, 8))
    if kind == 0 and found:
        found[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == 1:
        del found[at:]
    elif kind == 2:
        found[at:at] = draw(st.binary(1, 8))
    elif kind == 3:
        width, order = draw(st.sampled_from((2, 4, 8))), draw(st.sampled_from(("little", "big")))
        number = draw(st.sampled_from(NUMBERS)) % (1 << 8 * width)
        found[at : at + width] = number.to_bytes(width, order)
    elif kind == 4:
        del found[at : at + draw(st.integers(1, 64))]
    elif kind == 5:
        other = _at(draw, len(found))
        found[at:at] = found[other : other + draw(st.integers(1, 64))]
    elif kind == 6:
        token = draw(st.sampled_from(TOKENS))
        found[at : at + len(token)] = token
    elif kind == 7:
        numbers = list(re.finditer(rb"\d+", bytes(found[:4000])))
        if numbers:
            place = draw(st.sampled_from(numbers))
            found[place.start() : place.end()] = str(draw(st.sampled_from((*NUMBERS, *MORE)))).encode()
    else:
        found[at : at + 1] = draw(st.binary(1, 1))


def change_tree(draw: Draws, tree: Any) -> Any:
    """Return a tree of plain values in which a few were replaced, removed, moved or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        places = list(_places(tree))
        if not places:
            return copy.deepcopy(draw(st.sampled_from(VALUES)))
        holder, key = draw(st.sampled_from(places))
        kind = draw(st.integers(0, 6))
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other, name = draw(st.sampled_from(places))
            if other is not holder:
                holder[key] = copy.deepcopy(other[name])
        elif kind == 2 and isinstance(holder, dict):
            holder[draw(st.sampled_from(("", "x", "method", "name", "..", "weights", "__metadata__")))] = holder.pop(
                key
            )
        elif kind == 3:
            holder[key] = copy.deepcopy(draw.tree)
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return tree


def _places(tree: Any) -> Any:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _as_json(tree: Any) -> bytes:
    text = json.dumps(tree)
    return text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).encode("utf-8", "surrogatepass")


def change_json(draw: Draws, content: bytes) -> bytes:
    """Change values of a JSON file."""
    return _as_json(change_tree(draw, json.loads(content)))


def change_header(draw: Draws, content: bytes) -> bytes:
    """Change values in the header of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    header = _as_json(change_tree(draw, json.loads(content[8 : 8 + size])))
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def change_npy(draw: Draws, content: bytes) -> bytes:
    """Change the header of an .npy file, which is the text of a dictionary."""
    size = struct.unpack_from("<H", content, 8)[0]
    header, values = content[10 : 10 + size], content[10 + size :]
    word = draw(st.sampled_from((rb"\(.*\)", rb"'[<>|=][a-zA-Z]\d+'", rb"False", rb"\d+", rb"'shape'", rb"\}", rb"\{")))
    new = draw(
        st.sampled_from(
            (
                *(b"(99999999999,)", b"(1099511627776, 4)", b"(-1, 4)", b"()", b"(1,)", b"(0,)", b"(2.0,)", b"((1,),)"),
                *(
                    b"'|O'",
                    b"'|V0'",
                    b"'<U0'",
                    b"'<f2'",
                    b"'<c16'",
                    b"'<M8'",
                    b"'|S9'",
                    b"'<U1000000'",
                    b"[('a', '<f4')]",
                ),
                *(b"True", b"0", b"", b"{", b"__import__('os')", b"[" * 500, b"1" * 5000, b"(1,)*99999999"),
            )
        )
    )
    header = re.sub(word, lambda found: new, header, count=1)
    return content[:8] + struct.pack("<H", len(header) % 65536) + header + values


def change_pickle(draw: Draws, content: bytes) -> bytes:
    """Insert, repeat or remove operations of a pickle."""
    places = [at for _, _, at in pickletools.genops(content)]
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(places) - 1))
        at, after = places[index], (*places[1:], len(content))[index]
        kind = draw(st.integers(0, 3))
        if kind < 2:
            return content[:at] + draw(st.sampled_from(PICKLED)) + content[at:]
        content = content[:at] + content[after:] if kind == 2 else content[:after] + content[at:after] + content[after:]
        if kind == 2:
            return content
    return content


def _inside(draw: Draws, name: str, content: bytes) -> bytes:
    """Change an entry of an archive by its structure."""
    if draw(st.booleans()):
        if name.endswith(".npy"):
            return change_npy(draw, content)
        if name.endswith(".pkl"):
            return change_pickle(draw, content)
    return change_bytes(draw, content)


def change_zip(draw: Draws, content: bytes) -> bytes:
    """Change entries of an archive, their names, or what its directory says about them."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [[each.filename, archive.read(each), each.compress_type] for each in archive.infolist()]
    entry, kind = draw(st.sampled_from(entries)), draw(st.integers(0, 9))
    if kind < 5:
        entry[1] = _inside(draw, entry[0], entry[1])
    elif kind == 5:
        entries.remove(entry)
    elif kind == 6:
        entry[0] = draw(st.sampled_from(NAMES))
    elif kind == 7:
        entries.append([entry[0], _inside(draw, entry[0], entry[1]), entry[2]])
    elif kind == 8:
        entry[1], entry[2] = entry[1] + bytes(draw(st.sampled_from((0, 1 << 20, 3 << 20)))), zipfile.ZIP_DEFLATED
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, value, how in entries:
            archive.writestr(zipfile.ZipInfo(name), value, how)
    return _claimed(draw, made.getvalue()) if kind == 9 else made.getvalue()


def _claimed(draw: Draws, content: bytes) -> bytes:
    """Change a field of an entry in the directory of an archive."""
    found = bytearray(content)
    places = [match.start() for match in re.finditer(b"PK\x01\x02", content)]
    if places:
        at = draw(st.sampled_from(places)) + draw(st.sampled_from((8, 10, 16, 20, 24, 28, 30, 42)))
        found[at : at + 4] = (draw(st.sampled_from(NUMBERS)) % (1 << 32)).to_bytes(4, "little")
    return bytes(found)


def change_gzip(draw: Draws, content: bytes) -> bytes:
    """Change what a gzipped file has inside."""
    return gzip.compress(change_bytes(draw, gzip.decompress(content)), 1, mtime=0)


def change_tar(draw: Draws, content: bytes) -> bytes:
    """Change members of a tar.gz archive: content, names, links, sizes."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        members = [[each, archive.extractfile(each).read()] for each in archive if each.isfile()]  # type: ignore[union-attr]
    chosen, kind = draw(st.sampled_from(members)), draw(st.integers(0, 5))
    if kind == 0:
        chosen[1] = change_bytes(draw, chosen[1])
        chosen[0].size = len(chosen[1])
    elif kind == 1:
        chosen[0].name = draw(st.sampled_from((*NAMES, "small/../../x", "/small/data.bin")))
    elif kind == 2:
        chosen[0].type = draw(st.sampled_from((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)))
        chosen[0].linkname, chosen[0].size, chosen[1] = "/etc/passwd", 0, b""
    elif kind == 3:
        members.remove(chosen)
    elif kind == 4:
        members.append(chosen)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member, value in members:
            archive.addfile(member, io.BytesIO(value))
    inside = made.getvalue()
    return gzip.compress(change_bytes(draw, inside) if kind == 5 else inside, 1, mtime=0)


def change_png(draw: Draws, content: bytes) -> bytes:
    """Change chunks of a PNG, with correct checksums."""
    chunks, at = [], 8
    while at < len(content):
        size = struct.unpack_from(">I", content, at)[0]
        chunks.append([content[at + 4 : at + 8], content[at + 8 : at + 8 + size]])
        at += 12 + size
    chunk, kind = draw(st.sampled_from(chunks)), draw(st.integers(0, 5))
    if kind < 2:
        chunk[1] = change_bytes(draw, chunk[1])
    elif kind == 2:
        wide, high = (draw(st.sampled_from((0, 1, 8, 60_000, 2**31 - 1, 2**32 - 1))) for _ in range(2))
        depth, colour = draw(st.sampled_from((1, 2, 4, 8, 16, 3))), draw(st.integers(0, 7))
        chunks[0][1] = struct.pack(">IIBBBBB", wide, high, depth, colour, 0, 0, draw(st.integers(0, 2)))
    elif kind == 3:
        chunks.remove(chunk)
    elif kind == 4:
        chunks.insert(
            1, [draw(st.sampled_from((b"tEXt", b"zTXt", b"iCCP", b"acTL", b"fcTL", b"PLTE", b"tRNS"))), chunk[1]]
        )
    else:
        chunks.insert(1, [b"zTXt", b"a\x00\x00" + zlib.compress(bytes(1 << 20))])
    made = (
        struct.pack(">I", len(value)) + name + value + struct.pack(">I", zlib.crc32(name + value))
        for name, value in chunks
    )
    return content[:8] + b"".join(made)


LINES = [
    b"!!python/object/apply:os.system ['touch sentinel-of-the-fuzzer']",
    b"a: &a [x, x, x, x, x, x, x, x, x]",
    b"b: [*a, *a, *a, *a, *a]",
    b"<<: {members: 3}",
    b"checkpoints: '/**/*.pt'",
    b"checkpoints: 'models/*'",
    b"network: evil.py:make",
    b"? [a, b]",
    b"steps: [average, average]",
    b"members: yes",
    b"- {method: latent_be, perturb: conf_ods}",
    b"  - {method: kd, student: {method: batch_ensemble}}",
    b"ood: [noise, {source: noise}]",
    b"corruptions: {names: [fog]}",
    b"task: {name: regression, head: gaussian}",
    b"trajectory: true",
    b"%YAML 9.9",
    b"---",
    b"...",
    b"x: " + b"[" * 300,
]


def change_text(draw: Draws, content: bytes) -> bytes:
    """Change lines and values of a text such as YAML."""
    lines = content.split(b"\n")
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        index, kind = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, 6))
        line = lines[index]
        if kind == 0 and len(lines) > 1:
            del lines[index]
        elif kind == 1:
            lines.insert(index, draw(st.sampled_from(LINES)))
        elif kind == 2:
            lines.insert(index, draw(st.sampled_from(lines)))
        elif kind == 3 and b":" in line:
            value = draw(st.sampled_from(VALUES))
            lines[index] = line.partition(b":")[0] + b": " + _as_json(value)
        elif kind == 4:
            lines[index] = b" " * draw(st.integers(0, 8)) + line
        elif kind == 5:
            words = line.split(b" ")
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(TOKENS))
            lines[index] = b" ".join(words)
        else:
            lines[index] = change_bytes(draw, line)
    return b"\n".join(lines)


MUTATIONS: dict[str, Mutation] = {
    "bytes": change_bytes,
    "json": change_json,
    "header": change_header,
    "npy": change_npy,
    "pickle": change_pickle,
    "zip": change_zip,
    "gzip": change_gzip,
    "tar": change_tar,
    "png": change_png,
    "text": change_text,
}
