"""Nothing that a run says becomes markup."""

from html.parser import HTMLParser

from vitctl.report.page.markup import escaped, join, table, tag

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m‮"


def test_text__is_escaped_wherever_it_stands() -> None:
    whole = join(
        [tag("p", HOSTILE, title=HOSTILE), table(HOSTILE, (HOSTILE,), [(HOSTILE,)], note=HOSTILE), HOSTILE]
    )
    assert "<script" not in whole
    assert "\x1b" not in whole
    assert "‮" not in whole
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
            seen.append(name)
            assert {key for key, _ in attributes} <= {
                "title",
                "class",
                "tabindex",
                "role",
                "aria-label",
                "scope",
            }

    Reader().feed(whole)
    assert set(seen) == {"p", "div", "table", "caption", "thead", "tbody", "tr", "th"}


def test_markup__is_not_escaped_twice() -> None:
    assert tag("p", tag("b", "a & b")) == "<p><b>a &amp; b</b></p>"
    assert escaped(escaped("<")) == "&lt;"


def test_attributes__without_a_value_and_left_out() -> None:
    assert tag("details", open=True, id=None, hidden=False) == "<details open></details>"
    assert (
        tag("svg", viewbox="0 0 1 1", class_="a", data_x="1")
        == '<svg viewBox="0 0 1 1" class="a" data-x="1"></svg>'
    )


def test_table__columns_of_numbers_are_at_the_right() -> None:
    made = table("t", ("class", "answer", "share"), [("2", "3", "8.16%"), ("4", "1", "–")], names=2)
    assert made.count('class="n"') == 3
    assert '<th scope="row">2</th><td>3</td><td class="n">8.16%</td>' in made
