"""Templates of anybody end in bounded time and memory, by a count of steps."""

import re

import pytest

from jaxscale.data.text import template_sandbox
from jaxscale.data.text.chat_template import ChatTemplate, find_template
from tests.data.dialogues import CONVERSATIONS, MARKED, PLAIN, THINKING

MESSAGES = CONVERSATIONS[1]


def doubled(start: str, step: str, end: str) -> str:
    """A template that changes `n.x` 60 times, and then does something with it."""
    loop = f"{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{loop}{{{{ {end} }}}}"


NESTED = "[1]", "[n.x, n.x]"
"""A list of 2^60 numbers, in 60 lists of two."""

LONG = {
    "loops": "{% for a in R %}{% for b in R %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in R %}{% for b in R if 0 %}{% endfor %}{% endfor %}",
    "generators": "{% for a in R %}{% for b in R|map('e') %}{% endfor %}{% endfor %}",
    "lists": "{% for a in R %}{% set b = R|list %}{% endfor %}",
    "literal text": "{% for a in R %}" + 9999 * "x" + "{% endfor %}",
    "text again": "{% set b = 'a' * 99999 %}{% for a in R %}{{ b }}{% endfor %}",
    "slices": "{% set b = 'a' * 99999 %}{% for a in R %}{% set c = b[1:] %}{% endfor %}",
    "comparisons": "{% set b = 'a' * 99999 %}{% for a in R %}{% set c = 'b' in b %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + 15 * "{% call m() %}"
    + 99 * "x"
    + 15 * "{% endcall %}",
    "recursion": "{% for a in 'ab' recursive %}{{ loop('ab') if loop.depth < 60 }}{% endfor %}",
    "product": "{{ 'a' * 10**11 }}",
    "constant product": "{{ 'a' * 100000000000 }}",
    "product of a list": "{{ [1] * 10**10 }}",
    "power": "{{ (10 ** (10**9)) % 7 }}",
    "squares": doubled("10", "n.x * n.x", "n.x % 7"),
    "sums": doubled("'ab'", "n.x + n.x", "1"),
    "concatenation": doubled("'ab'", "n.x ~ n.x", "1"),
    "nested": doubled(*NESTED, "n.x"),
    "nested in JSON": doubled(*NESTED, "n.x | tojson"),
    "nested, joined": doubled(*NESTED, "[n.x] | map('string') | join"),
    "nested, equal": doubled(*NESTED, "n.x == n.x + []"),
    "nested, sorted": doubled(*NESTED, "[n.x, n.x + []] | sort"),
    "nested, a test": doubled(*NESTED, "[n.x] | select('eq', n.x + []) | list | length"),
    "nested, found": doubled(*NESTED, "[n.x + []].index(n.x)"),
    "nested, a key": doubled("(1,)", "(n.x, n.x)", "{}[n.x]"),
    "nested, keys": doubled("(1,)", "(n.x, n.x)", "{n.x: 1} | length"),
    "nested, formatted": doubled(*NESTED, "'%s' % [n.x]"),
    "nested, a format": doubled(*NESTED, "n.x | format"),
    "nested, in braces": doubled(*NESTED, "'{}'.format(n.x)"),
    "nested, raised": doubled(*NESTED, "raise_exception(n.x)"),
    "center": "{{ 'a'.center(10**11) }}",
    "constant center": "{{ 'a' | center(100000000000) }}",
    "mapped center": "{{ ['a'] | map('center', 10**10) | list }}",
    "block center": "{% filter center(10**10) %}a{% endfilter %}",
    "zfill": "{{ 'a'.zfill(10**11) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**10) }}",
    "bytes": "{{ (5).to_bytes(10**11, 'big') }}",
    "indent": "{{ 'a\n\n' | indent(10**10) }}",
    "indent of JSON": "{{ [1] | tojson(indent=10**10) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ R | map('string') | map('list') | sum(start=[]) }}",
    "replace": doubled("'aa'", "n.x.replace('a', n.x)", "1"),
    "join": doubled("'aa'", "n.x.join(n.x)", "1"),
    "translate": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "format again": "{{ ('{0}' * 9999).format('a' * 9999) }}",
}
WIDE = ["'%99999d' % 1", "'%*d' % (9, 1)", "'%99999d' | format(1)", "'{:>99999}'.format(1)"]
WIDE += ["'{:{}}'.format(1, 9)", "'{a:>99999}'.format_map({'a': 1})", "'%.99999f' % 1.0"]


@pytest.mark.parametrize("name", LONG)
def test_a_template_has_a_number_of_steps(name):
    with pytest.raises(ValueError, match=r"^is refused by the chat template: takes more steps"):
        ChatTemplate(LONG[name].replace("R", "range(99999)")).render(MESSAGES)


def test_a_number_of_a_template_has_a_width():
    for source in WIDE:
        with pytest.raises(ValueError, match=r"has a format with too large a width: '[%{]"):
            ChatTemplate(f"{{{{ {source} }}}}").render(MESSAGES)


def test_what_templates_of_models_do_is_far_from_its_bounds(monkeypatch):
    spent = []
    monkeypatch.setattr(template_sandbox, "_spend", spent.append)
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(50)]
    for source in (PLAIN, MARKED, THINKING):
        for messages in (MESSAGES, MESSAGES * 100):
            spent.clear()
            size = len(ChatTemplate(source).render(messages, tools))
            assert sum(spent) < (template_sandbox.STEPS_PER_CHARACTER // 10) * size


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ '%s-%03d' % ('a', 5) }} {{ '{:>4}'.format('b') }} {{ '%d' | format(7) }}",
            "a-005    b 7",
        ),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user, assistant"),
        (
            "{{ 10**12 | int }} {{ [10**12] | tojson(indent=1) | length }} {{ 7 // 2 }}",
            "1000000000000 18 3",
        ),
        (
            "{% for m in messages|selectattr('role', 'eq', 'user') %}{{ loop.last }}{% endfor %}",
            "True",
        ),
        ("{{ (messages | reverse | list)[0].role.title().center(13) | trim }}", "Assistant"),
        ("{% for m in messages[::-1] recursive %}{{ loop.index }}{% endfor %}", "12"),
        ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1.5 %}{{ n.a }}{{ -n.a }}", "2.5-2.5"),
        (
            "{{ dict(messages[0], content='x').content * 3 ~ ('a' in 'ab') ~ (x is defined) }}",
            "xxxTrueFalse",
        ),
    ],
)
def test_what_is_counted_is_not_changed(source, expected):
    assert ChatTemplate(source).render(MESSAGES) == expected


INVALID = {
    "a break": "{% for m in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "a filter that draws": "{{ messages | random }}",
    "parentheses": "{{ " + 5000 * "(" + "1" + 5000 * ")" + " }}",
    "conditions": 3000 * "{% if 1 %}" + 3000 * "{% endif %}",
    "loops": 30 * "{% for a in [1] %}" + 30 * "{% endfor %}",
    "a chain": "{{ a" + 5000 * ".b" + " }}",
    "length": 300_000 * "x",
}


@pytest.mark.parametrize("name", INVALID)
def test_a_template_that_is_no_program_is_refused(name):
    with pytest.raises(
        ValueError, match=r"^the chat template of t.json (is not valid|has 300,000)"
    ):
        find_template({"chat_template.jinja": INVALID[name].encode()}, "t.json")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (b"5", "the chat template of t.json is a int, not text"),
        (b"{}", "the chat template of t.json is a dict, not text"),
        (b"false", "the chat template of t.json is a bool, not text"),
        (b"[5]", "t.json has a list of chat templates, not each with"),
        (b'[{"name": []}]', "t.json has a list of chat templates, not each with"),
        (b'[{"name": "default", "template": 5}]', "template of t.json is a int, not text"),
        (b"[" * 100_000, "tokenizer_config.json of t.json is not JSON: nested more than"),
    ],
)
def test_a_template_of_another_type_is_refused(template, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find_template({"tokenizer_config.json": b'{"chat_template": %s}' % template}, "t.json")
    with pytest.raises(ValueError, match=r"chat_template.jinja of t.json is not text: 'utf-8'"):
        find_template({"chat_template.jinja": b"\xff"}, "t.json")


def test_marks_that_a_template_writes_itself_are_no_text():
    source = "\ufdd1a{% generation %}b{% endgeneration %}\ufdd0"
    assert ChatTemplate(source).render_with_loss(MESSAGES) == [("ab", [(1, 2)])]
