"""Sandbox of chat templates: Jinja with a bound on the cost of a rendering.

A template is downloaded with a tokenizer and rendered for each conversation. Jinja's sandbox keeps
it from other objects of the process, but does not bound its time and memory. Here every rendering
has a budget of steps; they are counted, not timed, so that a template is refused on all machines or
on none. A step is an evaluated node of the template, or a byte (in a text a character) that an
operation reads or creates. The size of an operation's result is computed before it runs.

The environment is otherwise that of transformers' `apply_chat_template`: immutable, blocks trimmed,
loop controls, `{% generation %}`, `tojson` without HTML escapes, `raise_exception` and
`strftime_now`. It lacks functions for random numbers and for web pages.
"""

import contextvars
import datetime
import functools
import json
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, runtime, sandbox, utils

STEPS, STEPS_PER_CHARACTER = 2_000_000, 1000
"""Steps of a rendering (less than a second), and further ones per rendered character. Templates
such as Qwen3's take about 5 per character."""

MAX_CHARACTERS = 100_000  # of a template; published ones have up to 20,000

BEGIN, END = "\ufdd0", "\ufdd1"  # Unicode noncharacters, which no text has
"""Marks around the text of a `{% generation %}` block."""

TODAY = datetime.datetime(2024, 7, 26)
"""The date that `strftime_now` formats: the default date of Llama 3's templates. It is constant,
since a run that is resumed on another day has to see the same tokens."""

_ITEM = 32  # steps of reading a member of a list or an object
_TEXTS, _LISTS = (str, bytes), (list, tuple, type({}.items()), type({}.values()))
_SIZED = (list, tuple, dict, range)
_CALL = 100  # steps of a function call, in addition to those of its arguments
_LEFT_OUT = ("random", "urlize", "wordwrap", "xmlattr")

_WIDENING = frozenset(
    (
        *("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "translate"),
        *("replace", "join", "format", "format_map"),
        *("indent", "tojson", "batch", "slice", "truncate", "round", "sum"),
    )
)
"""Filters and methods whose result is as large as the product of the sizes of their arguments; an
int is a width or a number of items. The result of others is as large as the sum."""

_SHALLOW = frozenset(
    (
        *("length", "count", "list", "first", "last", "reverse", "items", "default", "d", "attr"),
        *("map", "select", "selectattr", "reject", "rejectattr"),
    )
)
"""Filters that keep the members of their argument, or pass each to another filter."""

_CONSTANT = frozenset(
    (
        *("defined", "undefined", "none", "boolean", "true", "false", "integer", "float"),
        *("number", "string", "mapping", "iterable", "sequence", "callable", "sameas"),
        *("escaped", "filter", "test"),
    )
)
"""Tests of a type or an identity."""

_left: contextvars.ContextVar[list[int]] = contextvars.ContextVar("remaining steps")


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> tuple[jinja2.Template, bool]:
    """A template, and whether it has `{% generation %}` blocks.

    Raises:
      ValueError: it is not valid, or too long; a reason as in "the chat template ...".
    """
    if len(source) > MAX_CHARACTERS:
        raise ValueError(f"has {len(source):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    token = _left.set([STEPS])  # Jinja evaluates constant expressions now
    try:
        marks = any(
            isinstance(call.call.node, nodes.ExtensionAttribute)
            for call in environment.parse(source).find_all(nodes.CallBlock)
        )
        return environment.from_string(source), marks
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"is not valid: {error.message}, line {error.lineno}") from error
    except Exception as error:  # errors of Python, to which Jinja compiles a template
        raise ValueError(f"is not valid: {first_line(error)}") from error
    finally:
        _left.reset(token)


def render_template(template: jinja2.Template, size: int, **values: Any) -> str:
    """Renders a template with these values.

    Args:
      size: of the values, in characters.

    Raises:
      Exception: any error of Python, or a ValueError if it takes too many steps.
    """
    token = _left.set([STEPS + STEPS_PER_CHARACTER * size])
    try:
        return template.render(**values)
    finally:
        _left.reset(token)


def first_line(error: Exception) -> str:
    """The first line of an error, or its name."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _spend(steps: int) -> None:
    left = _left.get()
    left[0] -= steps
    if left[0] < 0:
        raise ValueError("takes more steps than a text of this size can need")


def _shallow(value: Any) -> int:
    """The size of a value itself: the characters of a text, the items of a list."""
    if isinstance(value, _TEXTS):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    if isinstance(value, _SIZED):
        return _ITEM * len(value)
    return 0


def _deep(value: Any) -> int:
    """The size of a value with its contents; one list may contain another many times."""
    if isinstance(value, str):
        return len(value)
    size, waiting, left = _shallow(value), [value], _left.get()[0]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            inner = [*one.keys(), *one.values()]
        elif isinstance(one, _LISTS):
            inner = one
        else:
            continue
        size += sum(map(_shallow, inner))
        if size > left:
            break
        waiting += [each for each in inner if not isinstance(each, str)]
    return size


def _spend_call(name: str, value: Any, others: Sequence[Any]) -> None:
    """Spends the steps of a filter, a test or a method.

    Args:
      value: the first argument.
      others: further arguments.
    """
    _spend(_CALL)
    if name in _SHALLOW:
        _spend(_shallow(value))
    elif name in ("format", "format_map"):
        _spend((1 + _deep(value)) * (1 + sum(map(_deep, others))))
    elif name in _WIDENING:
        steps = 1 + _deep(value)
        for one in others:
            width = isinstance(one, int) and not isinstance(one, bool)
            steps *= 1 + (abs(one) if width else _deep(one))
        _spend(steps * (1 + len(value) if name == "sum" and others else 1))
    else:
        _spend(_deep(value) + sum(map(_deep, others)))


def _as_list(value: Any) -> Any:
    """A list of a lazy value, such as the result of `map`, so that it has a size."""
    return list(value) if hasattr(value, "__next__") else value


def _check_widths(text: str, directives: Sequence[str]) -> None:
    """Refuses a format whose width is an argument, or has four digits."""
    if any(re.search(r"\d{4}|[*{]", directive) for directive in directives):
        raise ValueError(f"has a format with too large a width: {text[:80]!r}")


def _brace_specs(text: str) -> list[str]:
    return [spec for _, _, spec, _ in string.Formatter().parse(text) if spec]


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that spends its steps before it runs."""
    first = int(hasattr(function, "jinja_pass_arg"))  # after the context, if it takes one

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        values = [*args[:first], *map(_as_list, args[first:])]
        _spend_call(name, values[first], [*values[first + 1 :], *kwargs.values()])
        if name == "format":
            _check_widths(str(values[first]), [str(values[first])])
        return function(*values, **kwargs)

    return metered


@utils.pass_context  # so that Jinja does not evaluate these on compiling
def _read(context: runtime.Context, value: Any) -> Any:
    """A value that an operation reads completely."""
    _spend(1 + len(value) if isinstance(value, str) else 1 + _deep(value))
    return value


@utils.pass_context
def _sliced(context: runtime.Context, value: Any) -> Any:
    """A value of which an operation reads a part."""
    _spend(1 + _shallow(value))
    return value


@utils.pass_context
def _looped(context: runtime.Context, value: Any, weight: int) -> Any:
    """The iterable of a loop whose body has `weight` nodes."""
    value = _as_list(value)
    _spend(weight * (1 + (len(value) if hasattr(value, "__len__") else 0)))
    return value


@utils.pass_context
def _entered(context: runtime.Context, nothing: None, weight: int) -> None:
    """Spends the steps of a block or macro on entry."""
    _spend(weight)


class _Names(utils.Namespace):
    """`namespace`, whose text does not include its values, which may be large."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(sandbox.SandboxedEnvironment.default_binop_table)
    weight = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters = {name: _metered(name, one) for name, one in self.filters.items()}
        self.tests |= {
            name: _metered(name, one) for name, one in self.tests.items() if name not in _CONSTANT
        }
        for own in (_read, _sliced, _looped, _entered):
            self.filters[own.__name__] = own
        self.globals |= {
            "namespace": _Names,
            "raise_exception": _raise,
            "strftime_now": TODAY.strftime,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Jinja's code generation, for a template whose operations spend steps."""
        self.weight = _weight(source)
        return super()._generate(_meter(source), *args, **kwargs)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # fast path
            _spend(1 + len(left) + len(right))
            return left + right
        one, other = _shallow(left), _shallow(right)
        if isinstance(left, str) and operator == "%":
            _check_widths(left, [left])
            _spend((1 + one) * (1 + _deep(right)))
        elif isinstance(left, int) and isinstance(right, int):
            # Operators of big integers take the product of their sizes, or more.
            size = left.bit_length() * abs(right) // 8 if operator == "**" else one
            _spend((1 + size) * (1 + (size if operator == "**" else other)))
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            count, size = (left, other) if isinstance(left, int) else (right, one)
            _spend(1 + (size * max(count, 0) if isinstance(count, int) else 0))
        else:
            _spend(1 + one + other)
        return self.binop_table[operator](left, right)

    def call(self, context: runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a function, a method or a macro."""
        args = tuple(map(_as_list, args))
        others = [*args, *kwargs.values()]
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(called, runtime.LoopContext):
            _spend(_CALL + self.weight * (1 + sum(map(_shallow, others))))
        elif isinstance(called, runtime.Macro):
            _spend(_CALL)
        elif isinstance(owner, dict) or not isinstance(owner, str | bytes | int | list | tuple):
            _spend(_CALL + _shallow(owner) + sum(map(_deep, others)))
        else:
            if method.__name__ in ("format", "format_map"):
                _check_widths(str(owner), _brace_specs(str(owner)))
            _spend_call(method.__name__, owner, others)
        return super().call(context, called, *args, **kwargs)


def _meter(template: nodes.Template) -> nodes.Template:
    """Inserts the filters above between a template's operations and their operands."""
    for node in list(template.find_all(nodes.Node)):
        match node:
            case nodes.For():
                node.iter = _through(_looped, node.iter, _weight(node))
            case nodes.Output() | nodes.Concat():
                node.nodes = [_through(_read, one) for one in node.nodes]
            case nodes.Compare() | nodes.Operand():
                node.expr = _through(_read, node.expr)
            case nodes.Getitem(arg=nodes.Slice()):
                node.node = _through(_sliced, node.node)
            case nodes.Getitem():
                node.arg = _through(_read, node.arg)  # hashed
            case nodes.Pair():
                node.key = _through(_read, node.key)
            case nodes.Macro() | nodes.CallBlock() | nodes.Block():
                place = {"lineno": node.lineno, "environment": node.environment}
                weight = [nodes.Const(_weight(node), **place)]
                entered = nodes.Filter(
                    nodes.Const(None), _entered.__name__, weight, [], None, None, **place
                )
                node.body = [nodes.ExprStmt(entered, **place), *node.body]
    return template


def _through(function: Callable[..., Any], node: Any, *args: Any) -> nodes.Expr:
    """An expression wrapped in one of the filters above, unless it is a constant."""
    if isinstance(node, nodes.TemplateData | nodes.Const):
        return node
    place = {"lineno": node.lineno, "environment": node.environment}
    values = [nodes.Const(one, **place) for one in args]
    return nodes.Filter(node, function.__name__, values, [], None, None, **place)


def _weight(node: nodes.Node) -> int:
    """The number of nodes in a part of a template, plus the characters of its literal text."""
    texts = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
    return 1 + texts + sum(1 for _ in node.find_all(nodes.Node))


class _Generation(ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, rendered between two marks."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja requires

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
