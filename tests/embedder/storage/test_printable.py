"""Text for people: control characters are escapes, spelling stays, one string is one line."""

import io
import json
import logging
import re
import sys
import unicodedata

import hostile_texts
import pytest
from rich.table import Table
from rich.text import Text

from embedder.cli import main
from embedder.cli.results import Result, json_line, print_result
from embedder.cli.terminal import MAX_CELL_CHARACTERS, Terminal, TerminalLog
from embedder.config import load_config
from embedder.errors import ConfigError, StoreError
from embedder.observability.log import RunLog, messages_to
from embedder.observability.run_observer import observe_run
from embedder.plugins.maintain.purge.id_matcher import ItemNames
from embedder.retrieval.hit import Duplicate, Hit
from embedder.retrieval.hits import Answers, Hits
from embedder.storage.printable import printable, shorten
from embedder.store.files import StoreFiles

TEXTS = hostile_texts.texts(1_000)
DRAWN_SIGNS = {0x600, 0x601, 0x602, 0x603, 0x604, 0x605, 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}


def printed(*objects, width=120, **options):
    """Return the output of the console."""
    file = io.StringIO()
    console = Terminal(width=width)
    console.file = file
    console.print(*objects, **options)
    return file.getvalue()


@pytest.mark.medium
def test_every_control_and_format_character_of_unicode_is_an_escape():
    unseen = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        shown = printable(f"a{chr(code)}b")
        if category in unseen and code not in DRAWN_SIGNS:
            assert shown.isascii(), hex(code)
            assert shown.isprintable(), hex(code)
            assert len(shown) > 3, hex(code)
        elif category != "Cn":
            assert shown == f"a{chr(code)}b", hex(code)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x9b\x7f", r"\u009b\x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("caf\udce9.jpg", r"caf\xe9.jpg"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("a\u200db", r"a\u200db"),
        ("\u200d", r"\u200d"),
        (r"C:\new", r"C:\new"),
    ],
)
def test_an_escape_says_which_character_it_was(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "👩‍❤️‍👨 and 🏴‍☠️ and 🧑🏽‍🚀",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "می\u200cخواهم",
        "ക്\u200d",
        "Åland, Größe, 中文, שלום",
    ],
)
def test_joiners_that_are_spelling_stay(text):
    assert printable(text) == text


def test_escapes_are_final():
    assert [printable(printable(text)) for text in TEXTS] == [printable(text) for text in TEXTS]


def test_what_is_long_keeps_its_both_ends():
    assert shorten("a" * 10, 10) == "a" * 10
    assert shorten("begin" + "-" * 10_000 + "end.jpg", 40) == "begin" + "-" * 24 + "…" + "---end.jpg"
    assert len(printable("\x1b" * 10_000, 100)) == 100


def test_no_text_reaches_the_terminal_raw_nor_begins_a_line_of_its_own():
    for text in TEXTS:
        line = printed(text, soft_wrap=True)
        assert hostile_texts.raw_characters(line) == []
        assert line.count("\n") == 1
        assert len(line) < 5_000


def test_markup_and_emoji_codes_in_a_text_are_literal():
    table = Table("[red]head[/red]")
    table.add_row("[bold]x[/bold] [/] :smile:")
    assert "[bold]x[/bold] [/] :smile:" in printed(table)
    assert "[red]head[/red]" in printed(table)
    assert printed("[link=http://x]y[/link] :cat:", soft_wrap=True) == "[link=http://x]y[/link] :cat:\n"


@pytest.mark.medium
def test_a_table_of_hostile_cells_has_its_rows_side_by_side():
    table = Table(box=None, pad_edge=False)
    for name in ("number", "name", "caption"):
        table.add_column(name, overflow="fold")
    for number, text in enumerate(TEXTS):
        table.add_row(f"#{number}#", text, text)
    shown = printed(table, width=2_500)
    assert hostile_texts.raw_characters(shown) == []
    rows = [line for line in shown.split("\n")[1:] if line.strip()]
    assert [row.split()[0] for row in rows] == [f"#{number}#" for number in range(len(TEXTS))]
    assert max(map(len, rows)) < 4 * MAX_CELL_CHARACTERS, "a wide character takes two columns"


def test_wide_characters_leave_columns_aligned():
    table = Table(box=None, pad_edge=False)
    table.add_column("a")
    table.add_column("b")
    table.add_row("中文", "x")
    table.add_row("a\nb", "x")
    first, second = printed(table).split("\n")[1:3]
    assert first.index("x") + 2 == second.index("x"), "two characters take four columns, as a, \\, n, b do"


def test_rich_objects_do_not_control_the_terminal_either():
    shown = printed(Text("a\x1b[31mb\u202e\udcff"), soft_wrap=True)
    assert shown == "a\\x1b[31mb\\u202e\\xff\n"


def test_progress_lines_are_escaped(capsys):
    with messages_to(TerminalLog()):
        for text in TEXTS[:200]:
            logging.getLogger("embedder").info(text)
    shown = capsys.readouterr().err
    assert hostile_texts.raw_characters(shown) == []
    assert shown.count("\n") == 200


def test_a_message_that_nobody_can_read_any_more_ends_nothing(monkeypatch):
    """As where standard error goes into a program that has ended."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("nobody reads")

    console = Terminal(stderr=True)
    console.file = Gone()
    monkeypatch.setattr("embedder.cli.terminal.error_terminal", lambda: console)
    with messages_to(TerminalLog()):
        logging.getLogger("embedder").info("publishing")
        logging.getLogger("embedder").info("published")
    assert console.quiet


def test_json_gives_every_string_back_and_is_safe_to_print(capsys):
    odd = ["\udcff", "\ud800", "\x7f", "\\u007f", *TEXTS]
    line = json_line({"names": odd})
    assert line.isascii()
    assert hostile_texts.raw_characters(line) == []
    assert json.loads(line)["names"] == odd
    print_result(True, Result({"names": odd}))
    assert capsys.readouterr().out == line


@pytest.mark.medium
def test_no_name_forges_a_line_of_the_log(tmp_path):
    path = tmp_path / "log.txt"
    log = RunLog(path)
    for text in TEXTS:
        log.add(text)
    content = path.read_bytes().decode()
    assert hostile_texts.raw_characters(content) == []
    lines = content.split("\n")
    assert lines.pop() == ""
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")
    assert [stamp.sub("", line, count=1) for line in lines] == [printable(text) for text in TEXTS]
    assert all(stamp.match(line) for line in lines)


def test_a_purge_finds_a_name_where_the_log_has_it(tmp_path):
    for text in TEXTS[:300]:
        path = tmp_path / "log.txt"
        RunLog(path).add(f"{text}: the file is broken")
        line = path.read_bytes().decode()
        names = ItemNames([text])
        assert names.found_in(line), text
        assert names.removed_from(line).endswith(" [purged]: the file is broken\n"), text
        path.unlink()


def test_the_end_of_a_run_is_shown_without_control_characters(tmp_path):
    runs, metrics = tmp_path / "runs.jsonl", tmp_path / "m.prom"
    output = tmp_path / "printed"
    config = load_config(
        overrides={
            "store": str(tmp_path / "no\nstore"),
            "runs_file": str(runs),
            "metrics_file": str(metrics),
            "log_file": str(tmp_path / "log.txt"),
            "on_failure": {"command": ["sh", "-c", f'printf "%s" "$EMBEDDER_MESSAGE" > {output}']},
        }
    )
    message = "item a\x00b\x1b[31m\n\udcff\ud800: gone"
    with pytest.raises(StoreError), observe_run(config.observing, "embed"):
        raise StoreError(message)
    shown = r"item a\x00b\x1b[31m\n\xff\ud800: gone"
    assert output.read_text() == shown
    assert json.loads(runs.read_text())["message"] == shown
    assert len(runs.read_text().splitlines()) == 1
    assert hostile_texts.raw_characters(metrics.read_text() + (tmp_path / "log.txt").read_text()) == []


def test_a_store_whose_name_is_no_utf8_is_refused():
    with pytest.raises(StoreError, match="not valid UTF-8"):
        StoreFiles("/tmp/st\udcff")


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["embedder", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("search", "x", "--store", "/no\x1b[31m\nwhere\udcff"),
        ("search", "x", "--\x1b[31m\nx"),
        ("search", "x", "-k", "\x1b[31m\nx"),
        ("\x1b[31m\nx",),
        ("refresh", "/no\x1b[31m\nwhere\udcff.toml"),
        ("doctor", "--set", "\x1b[31m\nx=1"),
        ("embed", "/no\x1b[31m\nwhere\udcff", "--store", "/no\x1b/where", "--model", "/no\x1b\n"),
        ("search", "--vector", "/no\x1b[31m\nwhere\udcff.npy", "--store", "/no\x1b"),
    ],
)
def test_a_mistake_is_one_printable_line_whatever_was_typed(arguments, monkeypatch, capsys):
    code, stderr = run_main(monkeypatch, capsys, *arguments)
    assert code == 2
    assert stderr.startswith("embedder: ")
    assert stderr.count("\n") == 1
    assert hostile_texts.raw_characters(stderr) == []


def test_a_mistake_with_options_names_the_help_that_explains_them(monkeypatch, capsys):
    code, stderr = run_main(monkeypatch, capsys, "search", "x", "--wher", "y")
    assert code == 2
    assert "--wher" in stderr
    assert "search --help`" in stderr


def test_a_group_without_a_command_shows_its_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["embedder", "model"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert "import" in shown.out + shown.err
    assert "apply-delta" in shown.out + shown.err


def test_a_traceback_does_not_control_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    run_main(monkeypatch, capsys, "--help")
    try:
        raise RuntimeError("name \x1b[31m \u202e \udcff")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    stderr = capsys.readouterr().err
    assert hostile_texts.raw_characters(stderr) == []
    assert r"RuntimeError: name \x1b[31m \u202e \xff" in stderr
    assert "Traceback (most recent call last)" in stderr


def test_a_terminal_without_unicode_shows_escapes(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["embedder", "--help"])
    with pytest.raises(SystemExit):
        main()
    print_result(False, Result({}, ["中文 Å"]))
    stream.flush()
    assert stream.buffer.getvalue().decode("ascii").endswith("\\u4e2d\\u6587 \\xc5\n")


def test_a_query_that_is_no_utf8_is_a_mistake(tiny_model):
    from embedder.encoders.query_encoder import QueryEncoder
    from embedder.models.model_folder import open_model

    encoder = QueryEncoder(open_model(str(tiny_model)))
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        encoder.encode_text(["caf\udce9"])


def hit(name, caption):
    return Hit(0.5, name, 0, "image", "/nowhere", None, None, caption, {}, duplicates=[Duplicate(name, 0.9)])


@pytest.mark.medium
def test_a_notebook_shows_no_markup_and_no_control_characters():
    for text in TEXTS:
        hits = Hits([hit(text, text)], query=text)
        page = Answers([hits])._repr_html_() + Hits(note=text)._repr_html_()
        assert hostile_texts.raw_characters(page) == []
        assert "<script" not in page
        assert page.count("</figcaption>") == 1
        assert len(page) < 30_000


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:Glyph .* missing")
def test_the_title_of_a_plot_is_literal(tmp_path):
    from embedder.plugins.train.train_outputs import draw_curves

    for number, title in enumerate(("5$ or \\frac{$ more", "a\x1b[31m\nb\u202e\udcff", "plain")):
        draw_curves(tmp_path / f"{number}.png", [], title)
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")
