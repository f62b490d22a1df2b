import pytest

from jaxmorph.reporting.page.elements import Html, element, joined, number


def test_text_is_escaped_and_html_is_not_escaped_again():
    inner = element("b", "1 < 2 & 3")
    assert inner == "<b>1 &lt; 2 &amp; 3</b>"
    assert element("p", inner, "<i>") == "<p><b>1 &lt; 2 &amp; 3</b>&lt;i&gt;</p>"


def test_attributes_are_escaped_renamed_or_absent():
    made = element("td", class_="a", aria_label='say "hi" <now>', title=None, tabindex=0)
    assert made == '<td class="a" aria-label="say &quot;hi&quot; &lt;now&gt;" tabindex="0"></td>'


def test_elements_without_content_close_themselves():
    assert element("path", d="M0 0") == '<path d="M0 0"/>'


def test_joined_text_is_html():
    assert joined(["a<", None, Html("<br/>")]) == "a&lt;<br/>"
    assert isinstance(joined(["a"]), Html)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (-0.01, "0"), (12.0, "12"), (12.34, "12.3"), (-1.26, "-1.3")]
)
def test_coordinates_are_short(value, text):
    assert number(value) == text
