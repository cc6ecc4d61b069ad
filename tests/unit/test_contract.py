"""Importing the whole of SGLang takes over ten seconds; ``installed`` does it once, the other tests do not need it."""

from __future__ import annotations

import ast
import pkgutil
import re
from importlib import metadata
from pathlib import Path

import pytest

import sglang_dflash
from sglang_dflash import contract
from sglang_dflash.contract import HOOKS, SYMBOLS, Report, Symbol, check, check_symbol


@pytest.fixture(scope="module")
def installed() -> Report:
    return check()


def small_contract(monkeypatch: pytest.MonkeyPatch, *symbols: Symbol, version: str = "0.5.23") -> Report:
    """``check()`` over standard-library names."""
    monkeypatch.setattr(contract, "HOOKS", ())
    monkeypatch.setattr(contract, "SYMBOLS", symbols)
    monkeypatch.setattr(metadata, "version", lambda name: version)
    return check()


def test_holds_on_the_installed_sglang(installed: Report) -> None:
    assert installed.ok, str(installed)
    assert len(installed.findings) == len(HOOKS) + len(SYMBOLS)
    assert str(installed).splitlines()[0] == "sglang-dflash contract with SGLang 0.5.23: holds"


def test_every_hook_has_an_implementation(installed: Report) -> None:
    for hook in HOOKS:
        assert callable(pkgutil.resolve_name(hook.implementation)), hook.implementation


def test_every_hook_names_a_patch_file_and_a_reason() -> None:
    for hook in HOOKS:
        assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", hook.patch), hook.patch
        assert hook.what and hook.why
        assert hook.kind in ("before", "after", "around", "replace")
        assert hook.when in ("always", "cpu", "dump")


def test_no_name_is_listed_twice() -> None:
    paths = [hook.symbol.path for hook in HOOKS] + [symbol.path for symbol in SYMBOLS]
    assert sorted(paths) == sorted(set(paths))


def test_every_import_from_sglang_is_listed() -> None:
    listed = [hook.symbol.path for hook in HOOKS] + [symbol.path for symbol in SYMBOLS]
    package = Path(sglang_dflash.__path__[0])
    imported = {
        f"{node.module}.{alias.name}": file.name
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }
    assert len(imported) > 30
    unlisted = [path for path in imported if not any(name == path or name.startswith(path + ".") for name in listed)]
    assert not unlisted, [f"{imported[path]}: {path}" for path in unlisted]


def test_every_user_is_a_module_of_ours() -> None:
    for symbol in [hook.symbol for hook in HOOKS] + list(SYMBOLS):
        assert pkgutil.resolve_name(f"sglang_dflash.{symbol.used_by.partition('.')[0]}"), symbol.used_by


@pytest.mark.parametrize("path", ["json.nothing", "json.no.thing", "no_such_package.thing"])
def test_missing_name_is_found_missing(path: str) -> None:
    assert check_symbol(Symbol(path, "x")).startswith("not found (")


def test_missing_parameter_is_named_with_what_there_is() -> None:
    problem = check_symbol(Symbol("json.loads", "x", ("s", "gone", "parse_int", "lost")))
    assert problem.startswith("parameters gone, lost are gone; it has (s, ")


def test_present_name_and_parameters_hold() -> None:
    assert check_symbol(Symbol("json.loads", "x", ("s", "parse_int"))) == ""
    assert check_symbol(Symbol("json.JSONEncoder", "x", ("skipkeys",))) == ""
    assert check_symbol(Symbol("math.pi", "x")) == ""


def test_value_where_a_callable_was_is_reported() -> None:
    assert check_symbol(Symbol("math.pi", "x", ("y",))) == "is float, expected a callable"


def test_report_names_each_failure_and_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = small_contract(
        monkeypatch,
        Symbol("json.loads", "plugin", ("s",)),
        Symbol("json.nothing", "speculative.worker"),
        Symbol("json.dumps", "dump.hook", ("gone",)),
    )
    assert not report.ok
    assert [bool(finding.problem) for finding in report.findings] == [False, True, True]
    text = str(report)
    assert "DOES NOT HOLD" in text and "1 of 3 upstream names" in text
    assert "json.nothing (used by speculative.worker): not found" in text
    assert "json.dumps (used by dump.hook): parameters gone are gone" in text
    assert "json.loads" not in text


def test_other_version_is_reported_even_where_all_names_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    report = small_contract(monkeypatch, Symbol("json.loads", "plugin"), version="0.6.0")
    assert not report.ok
    assert "version 0.6.0 is not one this plugin was tested with; install one of: 0.5.23" in str(report)


def test_missing_sglang_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    report = check()
    assert not report.ok
    assert "pip install sglang==0.5.23" in str(report)
