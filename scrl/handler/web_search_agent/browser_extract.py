"""The worker process that turns a page's bytes into text: HTML by trafilatura, PDF by pypdf, plain text.

A process of its own because the parsers meet bytes that somebody may have made to hurt them: one that crashes, hangs
or takes all memory costs one page, not the training run, and Python code that parses for a second holds no lock of
the process that trains. It is started as a script (see browser_pool), imports nothing of this project, and talks
over the socket that is its standard input: a request is a 4-byte length, a JSON header, and a body; a reply is a
4-byte length and JSON. It ends when the other side closes, also where that was killed. Its arguments are the seconds
of CPU that a page may take (work, not waiting, so that a busy machine fails no honest page) and the bytes of address
space that it may.
"""

import codecs
import io
import itertools
import json
import re
import resource
import signal
import socket
import sys

MAX_TEXT = 1_000_000  # characters kept of a page
MAX_PDF_PAGES = 200
MAX_ELEMENTS = 50_000  # of a page whose main text is looked for; a long Wikipedia article has 30,000
RETIRE_PAGES = 500  # then a fresh process takes over, so that what the libraries keep can't add up
RETIRE_MEMORY = 400 << 20  # bytes in use after a page; what a big one took is hardly ever given back

# Only what the web really uses: Python's own list has codecs that run for ever or unpack archives.
_CHARSET = re.compile(
    r"utf-?8|utf-?16(-?[lb]e)?|iso-?8859-?\d{1,2}|latin-?1|us-ascii|ascii|(windows-|cp)(125\d|874|93[26]|949|950|866)"
    r"|koi8-[ru]|gb2312|gbk|gb18030|big5(-hkscs)?|euc-(jp|kr)|shift[_-]jis|iso-2022-jp|tis-620|macintosh",
    re.IGNORECASE,
)
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w-]{1,40})""", re.IGNORECASE)
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_AS_WINDOWS = ("iso-8859-1", "iso8859-1", "latin-1", "latin1", "ascii", "us-ascii")  # as the HTML standard has it
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), 0xFEFF, 0xFFFE, 0xFFFF])
_SPACES = re.compile(r"[^\S\n]+")
_LINES = re.compile(r" ?\n[ \n]*")
_SKIPPED_TAGS = ("script", "style", "noscript", "template", "head")


def extract(kind: str, body: bytes, charset: str = "") -> dict[str, object]:
    """``{"title", "text", "plain"}``, both clean and cut at MAX_TEXT. ``plain``: the layout was too odd to be read.

    ``kind`` is one of fetch's HTML, PDF and TEXT. Raises ValueError for a body that can't be read.
    """
    reader = {"html": _read_html, "pdf": _read_pdf, "text": _read_text}[kind]
    title, text, plain = reader(body, charset)
    return {
        "title": clean(title[:1000]).replace("\n", " ")[:300],
        "text": clean(text[: 2 * MAX_TEXT])[:MAX_TEXT],
        "plain": plain,
    }


def decode(body: bytes, charset: str = "") -> str:
    """Text of ``body``: by its byte order mark, the server's word, UTF-8 where it fits, <meta>, else Windows-1252."""
    for mark, name in _BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    meta = _META_CHARSET.search(body[:4096])
    for name in (charset, "utf-8", meta[1].decode("ascii", "replace") if meta else ""):
        if not _CHARSET.fullmatch(name):
            continue
        try:
            # What was said is believed, with some bytes wrong; UTF-8 as our own guess has to fit.
            named = "cp1252" if name.lower() in _AS_WINDOWS else name
            return body.decode(named, "strict" if name == "utf-8" and name != charset else "replace")
        except (UnicodeDecodeError, LookupError):
            continue
    return body.decode("cp1252", "replace")


def clean(text: str) -> str:
    """Without control characters; runs of spaces and of empty lines folded."""
    text = _SPACES.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROL))
    return _LINES.sub("\n", text).strip().encode("utf-8", "replace").decode()


def _read_text(body: bytes, charset: str) -> tuple[str, str, bool]:
    return "", decode(body, charset), False


def _read_html(body: bytes, charset: str) -> tuple[str, str, bool]:
    import trafilatura
    from lxml import html

    source = decode(body, charset).translate(_CONTROL)
    if not source.strip():
        return "", "", False
    # As bytes: lxml refuses a str that declares an encoding, as XHTML does.
    parser = html.HTMLParser(remove_comments=True, remove_pis=True, encoding="utf-8")
    tree = html.document_fromstring(source.encode("utf-8", "replace"), parser=parser)
    title = tree.findtext(".//title") or ""
    if next(itertools.islice(tree.iter(), MAX_ELEMENTS, None), None) is not None:
        return title, _all_text(tree), True
    try:
        text = trafilatura.extract(tree, include_comments=False, include_tables=True, with_metadata=False) or ""
    except Exception:  # a library of heuristics, on a page that may be anything; what it can't do is done plainly
        text = ""
    if text:
        return title, text, False
    return title, _all_text(tree), True


def _all_text(tree) -> str:  # noqa: ANN001
    """Everything that the page would show, a block a line. By iteration: the tree may be deep."""
    from lxml import etree

    pieces, skipping = [], 0
    for event, element in etree.iterwalk(tree, events=("start", "end")):
        skipping += (element.tag in _SKIPPED_TAGS) * (1 if event == "start" else -1)
        if element.tag in _BLOCKS:
            pieces.append("\n")
        text = element.text if event == "start" else element.tail
        if text and not skipping:
            pieces.append(text)
    return "".join(pieces)


_BLOCKS = frozenset("p div br li tr table section article h1 h2 h3 h4 h5 h6 blockquote pre dt dd".split())


def _read_pdf(body: bytes, charset: str) -> tuple[str, str, bool]:
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(body), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            raise ValueError("the PDF needs a password")
        title = str((reader.metadata or {}).get("/Title") or "")
        pieces, size = [], 0
        for number, page in enumerate(reader.pages):
            if number >= MAX_PDF_PAGES or size >= MAX_TEXT:
                break
            pieces.append(page.extract_text())
            size += len(pieces[-1])
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # whatever a broken PDF does to its parser
        raise ValueError(f"the PDF is damaged ({type(error).__name__})") from error
    return title, "\n".join(pieces), False


def _receive(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _send(channel: socket.socket, reply: dict[str, object]) -> None:
    data = json.dumps(reply).encode()
    channel.sendall(len(data).to_bytes(4, "big") + data)


def _answer(header: dict[str, object], body: bytes) -> dict[str, object]:
    try:
        return extract(str(header["kind"]), body, str(header["charset"]))
    except ValueError as error:
        return {"error": str(error)[:300]}
    except MemoryError:
        return {"error": "reading it takes too much memory", "retire": True}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # lxml's and trafilatura's own kinds: told to whoever asked, as one page's failure
        return {"error": f"it can't be parsed ({type(error).__name__})"}


def _memory_in_use() -> int:
    """Bytes. Not ru_maxrss, which begins with the size of the process that started this one, maybe a trainer's."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(cpu_seconds: float, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it has no business writing files
    import pypdf  # noqa: F401

    _read_html(b"<p>Now, and not at the first page, whose time is limited.", "")  # loads all that it needs
    channel = socket.socket(fileno=0)
    _send(channel, {"ready": True})
    for number in range(1, RETIRE_PAGES + 1):
        try:
            header = json.loads(_receive(channel, int.from_bytes(_receive(channel, 4), "big")))
            body = _receive(channel, header["size"])
        except (EOFError, ConnectionError):
            return
        # The kernel ends a parser that doesn't end by itself; C code never gets to a Python handler.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = _answer(header, body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply["retire"] = bool(reply.get("retire")) or number == RETIRE_PAGES or _memory_in_use() > RETIRE_MEMORY
        _send(channel, reply)
        if reply["retire"]:
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
